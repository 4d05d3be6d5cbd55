# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Nothing asks for CUDA by name: ranks, streams and a DeepSpeed job on an XPU, which stands in for
Intel's GPUs.

Its tensors are of PyTorch's own device ``xpu``, its streams and events those of
``torch.accelerator`` (``tests/xpu``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.launching import ROOT, LaunchSettings, output, succeeded
from tests.xpu import environment

pytestmark = pytest.mark.long
PROGRAM = ROOT / "tests/e2e/programs/xpu.py"
RACES = "not no_race or (no_race and True-True and (codes or q4 or oktopk))"
SUITES = {
    "test_phases.py": "some",
    "test_weights.py": "",
    "test_agreement.py": "",
    "test_quantized_sync.py": "",
    "test_streams.py": RACES,
}
"""Files whose tests need only a device, and those of them that run."""


@pytest.mark.parametrize("file", SUITES)
def test_ranks_that_are_threads_work_on_an_xpu(file: str) -> None:
    """Gathers, scatters, sync and publish are right; and in order on its streams, of which each
    queue has one.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-k", SUITES[file], f"tests/ranks/{file}"]
    assert " passed" in output(command, cwd=ROOT, env=os.environ | environment(), timeout=1200)


@pytest.mark.parametrize("scheme", ["topo", "codes"])
def test_a_job_trains_on_an_xpu_as_on_a_cpu(tmp_path: Path, scheme: str) -> None:
    """Under the launcher, with DeepSpeed's accelerator for XPUs: the same losses and weights;
    queues have streams.
    """
    found = {}
    for device, env in (("cpu", {"DS_ACCELERATOR": "cpu"}), ("xpu", environment(devices=2))):
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))}
        settings = LaunchSettings(tmp_path / device, world_size=2, timeout_s=600, env=env | paths)
        succeeded([str(PROGRAM), str(tmp_path / f"{device}.pt"), scheme], settings)
        found[device] = torch.load(tmp_path / f"{device}.pt")
    assert [found[device]["device"] for device in ("cpu", "xpu")] == ["cpu", "xpu"]
    assert [found[device]["streams"] for device in ("cpu", "xpu")] == [[False, False], [True, True]]
    assert len(set(found["cpu"]["losses"])) == 6
    # Not the same bits: on a CPU a linear layer is one operation of oneDNN.
    assert found["xpu"]["losses"] == pytest.approx(found["cpu"]["losses"], rel=1e-3)
    for own, cpus in zip(found["xpu"]["weights"], found["cpu"]["weights"], strict=True):
        assert float((own - cpus).abs().mean()) < 1e-4  # of updates of 1e-2 each
