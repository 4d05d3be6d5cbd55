# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The all-gather of updated weights after a step, as they are or as quantized differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from zero_topo.collectives.queue import Handle, OrderedQueue
from zero_topo.collectives.transport import all_gather_views
from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import Move, gather_moves, rows_message
from zero_topo.fsdp.parts import Part
from zero_topo.mesh import Mesh
from zero_topo.plan import packed_runs
from zero_topo.quant.ops import cast_to, quantize


class Publisher:
    """Sends masters to all ranks that store the shards.

    With ``quantize.publish`` a rank sends the difference between its masters and the weights as all
    ranks store them; each adds the same decoded bits, so copies stay equal, and the error is part
    of the next difference.

    Args:
        stored: the parts of all trained parameters of which this rank stores a shard.
        weights: the type of the stored weights.
        config: the plan and the format.
        mesh: has the group ``(weights, optimizer)``.
        run_numel: parameter elements that one collective carries.
        queue: runs collectives in one order on all ranks, on a GPU on a stream of its own.

    Attributes:
        wire: the format.
        runs: the parts of each collective.
        run_numel: parameter elements that one collective carries.
    """

    def __init__(
        self,
        stored: Sequence[Part],
        weights: torch.dtype,
        config: ResolvedConfig,
        mesh: Mesh,
        run_numel: int,
        queue: OrderedQueue,
    ) -> None:
        plan = config.plan
        self._spec = config.publish_spec
        self.wire = self._spec or cast_to(weights)
        sizes = [plan.world_size * part.width for part in stored]
        runs = packed_runs(sizes, run_numel)
        self.runs = [list(stored[run.start : run.stop]) for run in runs]
        self.run_numel = run_numel
        self._plan = plan
        self._hierarchy = mesh.hierarchy(plan.weights, plan.optimizer).metered("publish")
        self._meter = mesh.meter
        self._queue = queue

    def publish(self) -> None:
        """Send all masters; on a GPU the current stream waits, not the host. Collective."""
        with self._meter.timing("publish"):
            handles = [self._queue.run(partial(self._start, run)) for run in self.runs]
            for handle in handles:
                handle.wait()
        for run in self.runs:
            for part in run:
                part.remember()

    def moves(self) -> Iterator[Move]:
        """Yield what a rank sends, by the formula."""
        for run in self.runs:
            part_numels = [part.shard_range for part in run]
            message = rows_message(1, part_numels, self._spec, self.wire.bits // 8)
            yield from gather_moves(self._plan, self._plan.pair_of("publish"), message)

    def _start(self, run: list[Part]) -> Handle[None]:
        block = self.wire.block_size
        own = [part.message(block) for part in run]
        message = quantize(own, self.wire)
        stored = [part.stored(block) for part in run]
        delta = self._spec is not None
        # The owner decodes its own message too: it stores what the others store.
        return all_gather_views(self._hierarchy, stored, self.wire, message, delta, own=True)
