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
SUITES = {
    "phases": (["tests/ranks/test_phases.py"], "some", 5),
    "weights": (["tests/ranks/test_weights.py"], "", 25),
    "agreement": (["tests/ranks/test_agreement.py"], "", 20),
    "quantized sync": (["tests/ranks/test_quantized_sync.py"], "", 35),
    "order": (
        ["tests/ranks/test_streams.py"],
        "not no_race or (no_race and True-True and (codes or q4 or oktopk))",
        20,
    ),
}
"""Of tests that need only a device: files, an expression, and how many pass at least."""


@pytest.mark.parametrize("name", SUITES)
def test_ranks_that_are_threads_work_on_an_xpu(name: str) -> None:
    """Gathers, scatters, sync and publish are right; and in order on its streams, of which each
    queue has one.
    """
    files, expression, least = SUITES[name]
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        expression,
        *files,
    ]
    printed = output(words, cwd=ROOT, env=os.environ | environment(), timeout=1200)
    passed = printed.split(" passed")[0].split()[-1]
    assert int(passed) >= least


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
