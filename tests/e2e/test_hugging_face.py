# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Hugging Face on eight ranks: the Trainer and Accelerate train as under stock ZeRO-3, save, and go on from there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, LaunchSettings, launch

CLOSE = 1e-5
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
        reason="transformers or accelerate is not installed: pip install 'zero-topo[hf]'",
    ),
]


def outcome(program: str, folder: Path) -> dict[str, Any]:
    """What rank 0 of a program wrote."""
    command = [str(ROOT / "tests/e2e/programs" / f"hf_{program}.py"), str(folder)]
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = launch(command, LaunchSettings(log_dir=folder / "logs", timeout_s=600, env=env))
    assert done.returncode == 0, done.tails()
    return dict(json.loads((folder / f"{program}.json").read_text()))


def furthest(a: list[float], b: list[float]) -> float:
    """Largest difference of two loss curves."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_the_trainer_trains_as_under_stock_zero3(tmp_path: Path) -> None:
    """Twenty steps in FP32, unquantized; a checkpoint of the tenth resumes with the losses that followed it."""
    found = outcome("trainer", tmp_path)
    plain, topo, resumed = (found[name]["losses"] for name in ("plain", "topo", "resumed"))
    assert (found["plain"]["topo"], found["topo"]["topo"], found["resumed"]["topo"]) == (None, 20, 10)
    assert len(topo) == 20 and topo[-1] < topo[0] - 1
    assert furthest(topo, plain) <= CLOSE
    assert resumed[:10] == topo[:10]  # the Trainer's own log, read back
    assert furthest(resumed[10:], topo[10:]) <= CLOSE


def test_accelerate_trains_as_under_stock_zero3(tmp_path: Path) -> None:
    """Twenty steps in FP32, unquantized; a saved state goes on as it would have, and saved weights are the engine's."""
    found = outcome("accelerate", tmp_path)
    assert found["topo"] == 20 and found["losses"][-1] < found["losses"][0] - 1
    assert furthest(found["losses"], found["plain"]) <= CLOSE
    assert furthest(found["resumed"], found["losses"][10:]) <= CLOSE
    assert found["saved"] == 0
