# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How far a weight or a gradient goes through the code: files and Python calls below the hook,
with limits.

Counted by the interpreter on rank 0 of 2 nodes x 2 GPUs x 2 GCDs, when an operation runs for the
second time. The limits are today's counts, so the test fails if the path of a step gets a layer
more. Lower them when it gets shorter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import zero_topo
from tests.harness import run_threads
from tests.ranks.worlds import BLOCKS, loaded, world
from zero_topo.engine.stage3 import Stage3

PACKAGE = str(Path(zero_topo.__file__).parent)
TOPO: dict[str, Any] = {"scheme": "topo"}
SHARDED = BLOCKS["sharded"]
NUMELS = (4096, 8192)
"""A matrix each, so that both have INT8 weights under `topo`."""


def trip(work: Callable[[], object]) -> tuple[int, int]:
    """Files of the package in which this thread's work calls a function, and calls of such
    functions.
    """
    calls: list[str] = []

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(set(calls)), len(calls)


def gather(engine: Stage3) -> None:
    """One parameter, as in a forward pass."""
    engine.weights.gather([1], "gather_forward").wait()


def scatter(engine: Stage3) -> None:
    """One gradient, in a micro-batch that is not the last."""
    engine.gradients.scatter([1], [torch.ones(NUMELS[1])], last=False)
    engine.queues.updates.finish()


def sync(engine: Stage3) -> None:
    """Two gradients, in the last micro-batch, and the reduction between nodes."""
    engine.gradients.scatter([0, 1], [torch.ones(n) for n in NUMELS], last=True)
    engine.gradients.sync()
    engine.gradients.end_step(skipped=False)


def publish(engine: Stage3) -> None:
    """Two parameters, from FP32 masters."""
    columns = sum(engine.layout.widths)
    masters = torch.zeros(engine.config.plan.world_size // engine.config.plan.optimizer, columns)
    engine.weights.update(masters, range(2))
    engine.weights.start_publish()
    engine.weights.wait_for_publish()


@pytest.mark.parametrize(
    ("work", "block", "most"),
    [
        (gather, TOPO, (8, 34)),
        (gather, BLOCKS["topo"], (8, 40)),
        (gather, BLOCKS["quantized"], (8, 34)),
        (scatter, TOPO, (9, 50)),
        (scatter, BLOCKS["topo"], (9, 52)),
        (sync, TOPO, (12, 134)),
        (sync, BLOCKS["q4"], (12, 135)),
        (sync, SHARDED, (15, 256)),
        (publish, TOPO, (9, 100)),
        (publish, BLOCKS["topo"], (9, 72)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_trip_is_no_longer_than_it_was(
    work: Callable[[Stage3], None], block: dict[str, Any], most: tuple[int, int]
) -> None:
    def ranked(rank: int) -> tuple[int, int]:
        engine, _ = loaded(world(block, numels=NUMELS), torch.bfloat16)
        work(engine)
        if rank == 0:
            return trip(lambda: work(engine))
        work(engine)
        return 0, 0

    files, calls = run_threads(8, ranked)[0]
    assert files <= most[0] and calls <= most[1], (files, calls)
