# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Without a ``zero_topo`` block nothing about DeepSpeed changes: its own ZeRO-1, 2 and 3 give the
same bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launching import ROOT, LaunchSettings, succeeded

pytestmark = pytest.mark.long
Runs = tuple[dict[str, Any], dict[str, Any]]
PROGRAM = ROOT / "tests/e2e/programs/plain_deepspeed.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What two ranks computed without the hook, and with it: ranks of the launcher, as forked ones
    have the hook.
    """
    folder = tmp_path_factory.mktemp("plain")
    settings = LaunchSettings(folder / "logs", world_size=2, timeout_s=300)
    succeeded([str(PROGRAM), str(folder / "found.pt")], settings)
    without, hooked = torch.load(folder / "found.pt")
    assert (without["hook"], hooked["hook"]) == (False, True)
    return without, hooked


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_weights_are_the_same_bits(runs: Runs, stage: int) -> None:
    """Five steps of two micro-batches with clipping."""
    (losses, weights), (hooked_losses, hooked_weights) = (found["runs"][stage] for found in runs)
    assert len(losses) == 10 and len(set(map(float, losses))) > 5
    assert all(map(torch.equal, losses, hooked_losses))
    assert len(weights) == 6 and all(map(torch.equal, weights, hooked_weights))
