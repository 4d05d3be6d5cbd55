# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Storage of INT8 weights, and the publish of their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle, OrderedQueue
from zero_topo.collectives.transport import all_gather
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Hierarchy
from zero_topo.quant import ops
from zero_topo.quant.operands import Change, Codes, Masters, counted
from zero_topo.quant.spec import BlockSpec, ChangeSpec

NO_CODE = 128  # the byte of -128, which no weight has: every weight that is stored so changes

Update = tuple[Sequence[int], Tensor | None, int]
"""Parameters, their masters ``[rows, columns]`` (None: the rows already have the new weights), and
the first column.
"""

Planner = Callable[[Sequence[Update], Mapping[int, int]], list[Update]]
"""Cuts updates into runs, with the sizes of those parameters that take part."""

Begun = Iterator[tuple[Sequence[int], Handle[None]]]
"""Runs in progress: the parameters that one collective carries, and its handle."""


class CodeStore:
    """Stores the INT8 weights of some parameters of a layout, and publishes their changes.

    Args:
        layout: of all parameters.
        coded: by parameter, whether it is stored as INT8.
        block: number of values that share a scale.
        device: where INT8 weights are stored.
        planned: cuts updates into runs.
        queue: the ordered queue in which runs are started and finished.

    Attributes:
        codes: INT8 weights and scales of the rank's weight shard, ``[N / W]`` rows of each
            parameter.
        sizes: by INT8 parameter: elements with padding, over the whole world.
        buffers: by parameter, the stored bytes, a view; empty for parameters that are not INT8.
        message_sizes: by first parameter of each run of the last publish of a step: the bytes of
            every rank's message.
        loaded_scales: scales of the own world shard, until the restart that follows each load.
    """

    def __init__(
        self,
        layout: Layout,
        coded: Sequence[bool],
        block: int,
        device: torch.device,
        planned: Planner,
        queue: OrderedQueue,
    ) -> None:
        self._planned = planned
        self._queue = queue
        widths = [width if has else 0 for width, has in zip(layout.widths, coded, strict=True)]
        blocks = [-(-width // block) for width in widths]
        self._rows = layout.plan.world_size // layout.plan.weights
        self.codes = Codes.build(
            list(zip(layout.begins, widths, strict=True)), self._rows, block, device
        )
        self.sizes = {
            param_index: layout.padded_numels[param_index]
            for param_index, has in enumerate(coded)
            if has
        }
        self._ends = list(accumulate(blocks, initial=0))  # block columns
        wire = BlockSpec("int8", block)
        sizes = (wire.nbytes(self._rows * count * block) for count in blocks)
        bounds = accumulate(sizes, initial=0)
        self.buffers = [self.codes.stored[begin:end] for begin, end in pairwise(bounds)]
        self._own_row = layout.row(layout.plan.weights)
        self.message_sizes = dict[int, int]()
        self.loaded_scales: Tensor | None = None

    def _part(self, param_indices: Sequence[int], size: int) -> Codes:
        """Return the blocks of some neighbouring parameters that each of ``size`` ranks owns."""
        begin = self._ends[param_indices[0]]
        end = self._ends[param_indices[-1] + 1]
        return self.codes.part(begin, end, self._rows // size, size)

    @cached_property
    def _scales(self) -> Tensor:
        """Positions of the own world shard's scales in the stored bytes, viewed as FP32."""
        param_index = self.codes.param_indices[self.codes.param_index_of.long()]
        here = counted(len(param_index), param_index) - param_index[:, 3]
        return param_index[:, 1] // 4 + self._own_row * param_index[:, 2] + here

    def own_scales(self) -> Tensor:
        """Return a copy of the scales in the own world shard, FP32 ``[block columns]``."""
        return self.codes.stored.view(torch.float32)[self._scales]

    def begin_anew(self) -> None:
        """Forget all INT8 weights, and all scales but for the loaded ones.

        The next publish sends every block whole, as the other ranks do not have these scales. Only
        blocks of zeros without a loaded scale are not sent, which all ranks store alike.
        """
        scales = self.loaded_scales
        self.loaded_scales = None
        stored = self.codes.stored
        stored.zero_()
        if scales is not None:
            for buffer, (begin, end) in zip(self.buffers, pairwise(self._ends), strict=True):
                # Codes that no weight has: every block differs, and is sent whole.
                numel = self._rows * (end - begin) * self.codes.block
                buffer[:numel].fill_(NO_CODE)
            stored.view(torch.float32)[self._scales] = scales.nan_to_num(0.0)

    def recode(self, param_index: int, rows: Tensor, first: int) -> None:
        """Quantize a parameter's rows, FP32 ``[N / W, width]`` from column ``first`` on, with new
        scales.

        The result depends on the rows alone, as after a load.
        """
        self.buffers[param_index].zero_()
        masters = Masters(rows, first, 0)
        part = self._part([param_index], 1)
        change = ops.assess_changes(masters, part)
        nbytes = ChangeSpec(part.block).largest(part.blocks)
        ops.encode_changes(masters, part, change, nbytes)

    def begin(
        self,
        hierarchy: Hierarchy,
        sizes: dict[int, int],
        updates: Sequence[Update],
    ) -> Begun:
        """Begin to publish some updates: each rank of ``hierarchy`` sends the changes of the rows
        it owns.

        Args:
            hierarchy: ``(weights, optimizer)``, or ``(weights, world)`` at start-up and after a
                load.
            sizes: filled for each run, by its first parameter: the bytes of every rank's message.
            updates: with FP32 masters on the device of the INT8 weights.
        """
        runs = self._planned(updates, self.sizes)
        assessed = []
        for param_indices, masters, first in runs:
            assert masters is not None
            own = Masters(masters, first, hierarchy.index)
            part = self._part(param_indices, hierarchy.size)
            # All runs are assessed before any is sent: their sizes then take one host
            # synchronization.
            assessed.append((own, part, ops.assess_changes(own, part)))
        agreed = self._agreed_sizes(hierarchy, [change for *_, change in assessed])
        for (param_indices, *_), run, nbytes in zip(runs, assessed, agreed, strict=True):
            sizes[param_indices[0]] = nbytes
            own, _, change = run
            # The queue's stream reads them after this function has returned.
            reads = [own.table, *change]
            publish = partial(self._publish, hierarchy, *run, nbytes)
            yield param_indices, self._queue.run(publish, reads)

    def _agreed_sizes(self, hierarchy: Hierarchy, changes: Sequence[Change]) -> list[int]:
        """Return the bytes of the messages of each run: enough for the changes of every rank.

        This is the only host synchronization of a publish, one for all its runs.
        """
        if not changes:
            return []
        # Blocks sent whole, bytes of changes
        totals = torch.cat([change.ends[-1:] for change in changes])
        gathered = all_gather(hierarchy, totals.view(-1).view(torch.uint8)).wait()
        numbers = gathered.contiguous().view(torch.int64)
        most = numbers.view(-1, len(changes), 2).amax(0).tolist()
        spec = ChangeSpec(self.codes.block)
        sizes = []
        for change, largest in zip(changes, most, strict=True):
            blocks = len(change.scales)
            # Where nearly all blocks change, whole blocks are the shorter message.
            sizes.append(min(spec.nbytes(blocks, *largest), spec.largest(blocks)))
        return sizes

    def _publish(
        self,
        hierarchy: Hierarchy,
        own: Masters,
        part: Codes,
        change: Change,
        nbytes: int,
    ) -> Handle[None]:
        message = ops.encode_changes(own, part, change, nbytes)

        def finish(received: Tensor) -> None:
            ops.apply_changes(received, part, hierarchy.index)

        return all_gather(hierarchy, message).then(finish)
