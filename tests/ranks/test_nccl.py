# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every scheme's and mode's step keeps NCCL's rules, whatever the order in which ranks wait for
their gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.marks import often
from tests.nccl import nccl_rules
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import BLOCKS, World, shuffled, world
from zero_topo.plan import Phase
from zero_topo.topology.presets import emulated

NUMELS = (5, 64, 501, 512, 512)
PERSISTENT = (1, 3)
PARTS = (slice(0, 2), slice(2, 5))
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


def gathered(trainer: Trainer, phase: Phase, order: Sequence[int]) -> None:
    """Starts a gather for each parameter, as a prefetch does, and waits for them in some order."""
    handles = [
        trainer.engine.weights.gather([param_index], phase) for param_index in range(len(NUMELS))
    ]
    for param_index in order:
        assert handles[param_index].wait()[0].isfinite().all()


def trained(w: World, mixed: bool) -> list[Tensor]:
    """The weights of each rank after some steps; ``mixed``: each waits for its gathers in an order
    of its own.
    """

    def rank_main(rank: int) -> Tensor:
        trainer = Trainer(w, rank, persistent=PERSISTENT)
        engine, weights = trainer.engine, trainer.engine.weights
        weights.publish_world()
        drawn = torch.Generator().manual_seed(rank)
        # Its mask is used in the third
        for step in range(3 if w.config.sync.MODE == "radius" else 2):
            for phase in ("gather_forward", "gather_backward"):
                order = (
                    torch.randperm(len(NUMELS), generator=drawn).tolist()
                    if mixed
                    else range(len(NUMELS))
                )
                gathered(trainer, phase, order)
            grads = w.grads(rank, step)
            for last in (False, True):
                for bucket in reversed(PARTS):
                    engine.gradients.scatter(range(len(NUMELS))[bucket], grads[bucket], last)
            engine.gradients.sync()
            trainer.update(engine.gradients.optimizer_rows().clone(), lambda _: 0.1)
            masters = trainer.table(trainer.masters)
            for part in (range(len(NUMELS))[part] for part in PARTS):
                begin, end = (
                    engine.layout.shard_ranges(part)[0][0],
                    engine.layout.shard_ranges(part)[-1][1],
                )
                weights.update(masters[:, begin:end], part)
            assert all(
                tensor.isfinite().all()
                for tensor in weights.gather(PERSISTENT, "gather_exact").wait()
            )
            engine.end_step(skipped=False)
        weights.wait_for_publish()
        engine.gradients.mode.drain()
        return weights.replicas()[0].clone()

    return run_threads(w.size, rank_main)


@pytest.mark.parametrize("name", often(OFTEN, BLOCKS))
def test_a_step_keeps_the_rules(name: str) -> None:
    """On queues of a CPU and of a GPU, with the weights that a step has without the rules."""
    w = world(BLOCKS[name], shuffled(emulated(2, 2, 2)), NUMELS)
    plain = trained(w, mixed=False)
    for queues in (nullcontext, queues_of_a_gpu):
        with queues(), nccl_rules():
            found = trained(w, mixed=True)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
