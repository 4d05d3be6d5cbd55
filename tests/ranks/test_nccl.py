# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every scheme's and mode's step keeps NCCL's rules, whatever the order in which ranks wait for
their gathers; and the script's default dtype changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from tests.device import default_dtype
from tests.marks import often
from tests.nccl import nccl_rules
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import BLOCKS, SPARSE, World, shuffled, world
from zero_topo.plan import Phase
from zero_topo.topology.presets import emulated

NUMELS = (5, 64, 501, 512, 512)
PERSISTENT = (1, 3)
GATHERS: tuple[Phase, ...] = ("gather_forward", "gather_backward")
PARTS = (range(2), range(2, 5))
OFTEN = ("zero++ quantized", "codes", "q4", "two groups, ring", "oktopk", "scape")
"""Blocks of which each has collectives that the others have not."""


@contextmanager
def queues_of_a_gpu() -> Iterator[None]:
    """Queues start what follows at once; nothing here has to be ordered among streams
    (tests/ranks/test_streams.py).
    """
    streams = MagicMock()
    with (
        patch("zero_topo.collectives.queue.torch", streams),
        patch("zero_topo.collectives.queue.on_gpu", lambda _: True),
        patch.object(Tensor, "record_stream", lambda *_: None),
    ):
        yield


def trained(w: World, mixed: bool) -> list[list[Tensor]]:
    """All that each rank computes in some steps and loads after them: weights, rows, masters and
    state; ``mixed``: each waits for its gathers in an order of its own.
    """

    def rank_main(rank: int) -> list[Tensor]:
        trainer = Trainer(w, rank, persistent=PERSISTENT)
        engine, weights = trainer.engine, trainer.engine.weights
        weights.publish_world()
        drawn = torch.Generator().manual_seed(rank)
        rows: list[Tensor] = []
        # Its mask is used in the third
        for step in range(3 if w.config.sync.MODE == "radius" else 2):
            for phase in GATHERS:
                order = torch.randperm(len(NUMELS), generator=drawn).tolist()
                # All begin before the first is waited for, as in a prefetch
                handles = [weights.gather([index], phase) for index in range(len(NUMELS))]
                for index in order if mixed else range(len(NUMELS)):
                    assert handles[index].wait()[0].isfinite().all()
            grads = w.grads(rank, step)
            for last in (False, True):
                for bucket in reversed(PARTS):
                    bucket_grads = [grads[index] for index in bucket]
                    engine.gradients.scatter(bucket, bucket_grads, last)
            if step == 1:
                engine.gradients.peek()
            engine.gradients.sync()
            rows.append(engine.gradients.optimizer_rows().clone())
            trainer.update(rows[-1])
            masters = trainer.table(trainer.masters)
            for part in PARTS:
                ranges = engine.layout.shard_ranges(part)
                weights.update(masters[:, ranges[0][0] : ranges[-1][1]], part)
            for whole in weights.gather(PERSISTENT, "gather_exact").wait():
                assert whole.isfinite().all()
            engine.end_step(skipped=False)
        weights.wait_for_publish()
        engine.gradients.mode.drain()
        trainer.resume()
        state = trainer.engine.gradients.mode.state_dict().values()
        found = (weights.replicas()[0], *rows, *trainer.masters, *state)
        return [tensor.detach().clone() for tensor in found]

    return w.on_ranks(rank_main)


def check_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """All ranks have the same bits, and dtypes."""
    for ours, theirs in zip(found, expected, strict=True):
        for tensor, other in zip(ours, theirs, strict=True):
            assert tensor.dtype == other.dtype and torch.equal(tensor, other)


@pytest.mark.parametrize("name", often(OFTEN, BLOCKS))
def test_a_step_keeps_the_rules(name: str) -> None:
    """On queues of a CPU and of a GPU, with the weights that a step has without the rules."""
    w = world(BLOCKS[name], shuffled(emulated(2, 2, 2)), NUMELS)
    plain = trained(w, mixed=False)
    for queues in (nullcontext, queues_of_a_gpu):
        with queues(), nccl_rules():
            found = trained(w, mixed=True)
        check_equal(found, plain)


@pytest.mark.parametrize("name", often(("zero++ quantized", "codes", "q4", *SPARSE), BLOCKS))
def test_the_default_dtype_changes_nothing(name: str) -> None:
    """BF16 and FP16 as the default dtype give the bits, and the dtypes, of FP32."""
    w = world(BLOCKS[name], emulated(2, 1, 2), NUMELS)
    expected = trained(w, mixed=False)
    for dtype in (torch.bfloat16, torch.float16):
        with default_dtype(dtype):
            check_equal(trained(w, mixed=False), expected)
