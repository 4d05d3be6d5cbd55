# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Another default dtype of the script changes no bit of what an engine computes, in any scheme and
mode.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.device import default_dtype
from tests.harness import run_threads
from tests.marks import often
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import BLOCKS, PARAM_INDICES, SPARSE, World, world
from zero_topo.topology.presets import emulated

STEPS = 3
OFTEN = ("zero++ quantized", "codes", "q4", *SPARSE)
"""Blocks whose modes create tensors of their own."""


def trained(w: World, rank: int) -> list[Tensor]:
    """All that a rank computes in some steps, the last of them after a resume: rows, masters,
    weights and state.
    """
    trainer = Trainer(w, rank)
    found = []
    for step in range(STEPS):
        if step == STEPS - 1:
            trainer.resume()
        rows = trainer.sync(step, peeks=step == 1)
        trainer.update(rows, lambda group: 0.01)
        trainer.engine.weights.publish_world()
        trainer.engine.end_step(skipped=False)
        found.append(rows)
    gathered = trainer.engine.weights.gather(PARAM_INDICES, "gather_forward").wait()
    state = trainer.engine.gradients.mode.state_dict()
    return [
        tensor.detach().clone() for tensor in (*found, *trainer.masters, *gathered, *state.values())
    ]


@pytest.mark.parametrize("block", often(OFTEN, BLOCKS))
def test_the_default_dtype_changes_nothing(block: str) -> None:
    """BF16 and FP16 as the default dtype give the bits, and the dtypes, of FP32."""
    w = world(BLOCKS[block], emulated(2, 1, 2))
    expected = run_threads(w.size, lambda rank: trained(w, rank))
    for dtype in (torch.bfloat16, torch.float16):
        with default_dtype(dtype):
            found = run_threads(w.size, lambda rank: trained(w, rank))
        for ours, theirs in zip(found, expected, strict=True):
            assert all(
                a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
            )
