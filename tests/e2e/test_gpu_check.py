# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` runs to its end without a GPU, says that it was a stand-in, and asks a GPU for tests that exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device import Naps
from tests.gpu import goals
from tests.gpu.__main__ import TITLES, commands
from tests.launching import ROOT

FAST = (4, 6)


@pytest.mark.parametrize("stage", [pytest.param(s, marks=[] if s in FAST else [pytest.mark.long]) for s in TITLES])
def test_a_stage_runs_on_the_cpu(stage: int) -> None:
    """Every command of its stand-in succeeds."""
    env = {**os.environ, "ZERO_TOPO_TEST_DEVICE": "cpu"}
    words = [sys.executable, "-m", "tests.gpu", str(stage)]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"stage {stage}: {TITLES[stage]} -- STAND-IN" in done.stdout and "0 commands failed" in done.stdout


@pytest.mark.parametrize("stage", TITLES)
def test_what_a_gpu_would_run_exists(stage: int, tmp_path: Path) -> None:
    """Files of tests, and modules."""
    for command in commands(stage, True, tmp_path):
        words = command.words
        files = [word for word in words if word.endswith(".py")]
        files += [f"{word.replace('.', '/')}.py" for word in words if word.startswith("tests.gpu.")]
        assert all((ROOT / name).is_file() for name in files) and (files or "quantizers" in words)


def test_naps_delay_forward_and_backward() -> None:
    """Some operations of each, by a seed."""
    x = torch.ones(3, requires_grad=True)
    with Naps(0) as naps:
        for _ in range(50):
            y = (x * 2).sum()
        forward = naps.taken
        for _ in range(50):
            y = y * 1.5
        before = naps.taken
        y.backward()
    assert 0 < forward < 100 and naps.taken > before and x.grad is not None


def test_goals_are_held_to_on_a_gpu_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.8 of a copy, and no slower than anyone else's."""
    kernel = {"op": "quantize", "dtype": "bf16", "bits": 8, "block_size": 256}
    cases = {(0.9, 0.85, "H200"): 0, (0.7, 0.1, "H200"): 1, (0.85, 0.9, "H200"): 1, (0.1, 0.9, None): 0}
    for (own, other, device), status in cases.items():
        ratios = {"native": own, "reference": 1.0, "eager": other}
        results = [{**kernel, "backend": name, "memcpy_ratio": ratio} for name, ratio in ratios.items()]
        (tmp_path / "record.json").write_text(json.dumps({"device": device, "results": results}))
        assert goals.main([str(tmp_path / "record.json")]) == status
        assert ("MISSED" in capsys.readouterr().out) == (own < max(0.8, other))
