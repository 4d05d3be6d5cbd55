# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning's own Trainer and DeepSpeed strategy on four ranks: as under stock ZeRO-3, also after a resume."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.launching import ROOT, LaunchSettings, launch


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch-lightning is not installed")
def test_lightning_trains_as_under_stock_zero3(tmp_path: Path) -> None:
    """Twenty steps in FP32, unquantized, micro-batches and clipping by Lightning; the strategy passes the block on."""
    command = [str(ROOT / "tests/e2e/programs/lightning.py"), str(tmp_path)]
    done = launch(command, LaunchSettings(world_size=4, log_dir=tmp_path / "logs", timeout_s=300))
    assert done.returncode == 0, done.tails()
    found = json.loads((tmp_path / "lightning.json").read_text())
    plain, topo, resumed = (found[name] for name in ("plain", "topo", "resumed"))
    assert len(plain) == len(topo) == len(resumed) == 40 and topo[-1] < topo[0] / 2
    assert topo == pytest.approx(plain, rel=0, abs=1e-5)
    assert resumed[:20] == topo[:20]
    assert found["sent"] == ["gather_forward gpu", "publish world", "scatter gpu", "sync world"]
    assert resumed[20:] == pytest.approx(topo[20:], rel=0, abs=1e-5)
