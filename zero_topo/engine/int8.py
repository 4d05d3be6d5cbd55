# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""INT8 weights (Note [INT8 weights] in ``weights.py``): what a rank stores of them, and the publish
of their changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle, OrderedQueue
from zero_topo.collectives.transport import all_gather
from zero_topo.engine.buffer import Form
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Hierarchy
from zero_topo.quant import ops
from zero_topo.quant.operands import Change, Codes, Masters, counted
from zero_topo.quant.spec import BlockSpec, ChangeSpec

NO_CODE = 128  # the byte of -128, which no weight has: every weight that is stored so changes


class Int8:
    """The INT8 weights of some parameters of a layout: ``[N / W]`` rows of each.

    Args:
        layout: of all parameters.
        coded: by parameter, whether it is stored as INT8.
        spec: the format.
        device: where INT8 weights are stored.

    Attributes:
        codes: the INT8 weights and their scales.
        forms: by INT8 parameter, its stored bytes.
        message_sizes: by first parameter of each run of the last publish of a step: the bytes of
            every rank's message.
        loaded_scales: scales of the own world shard, until the restart that follows each load.
    """

    def __init__(
        self,
        layout: Layout,
        coded: Sequence[bool],
        spec: BlockSpec,
        device: torch.device,
    ) -> None:
        widths = [width if has else 0 for width, has in zip(layout.widths, coded, strict=True)]
        blocks = [spec.blocks(width) for width in widths]
        self._rows = layout.plan.world_size // layout.plan.weights
        self._own_row = layout.row(layout.plan.weights)
        columns = list(zip(layout.edges, widths, strict=False))
        self.codes = Codes.build(columns, self._rows, spec.block_size, device)
        self._ends = list(accumulate(blocks, initial=0))  # block columns
        self._numels = [self._rows * count * spec.block_size for count in blocks]
        parts = self.codes.stored.split(list(map(spec.nbytes, self._numels)))
        self.forms = {}
        for index, part in enumerate(parts):
            if coded[index]:
                self.forms[index] = Form(part, spec, block=spec.block_size)
        self.message_sizes = dict[int, int]()
        self.loaded_scales: Tensor | None = None

    # -- scales, which have a history --------------------------------------------------------------

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
        self.codes.stored.zero_()
        if scales is not None:
            for index, form in self.forms.items():
                # Codes that no weight has: every block differs, and is sent whole.
                form.data[: self._numels[index]].fill_(NO_CODE)
            self.codes.stored.view(torch.float32)[self._scales] = scales.nan_to_num(0.0)

    # -- changes -----------------------------------------------------------------------------------

    def _part(self, param_indices: Sequence[int], size: int) -> Codes:
        """Return the blocks of some neighbouring parameters that each of ``size`` ranks owns."""
        begin = self._ends[param_indices[0]]
        end = self._ends[param_indices[-1] + 1]
        return self.codes.part(begin, end, self._rows // size, size)

    def recode(self, index: int, rows: Tensor, first: int) -> None:
        """Quantize a parameter's rows, FP32 ``[N / W, width]`` from column ``first`` on, with new
        scales.

        The result depends on the rows alone, as after a load.
        """
        self.forms[index].data.zero_()
        masters = Masters(rows, first, 0)
        part = self._part([index], 1)
        change = ops.assess_changes(masters, part)
        nbytes = ChangeSpec(part.block).largest(part.blocks)
        ops.encode_changes(masters, part, change, nbytes)

    def publish(
        self,
        hierarchy: Hierarchy,
        runs: Sequence[tuple[Sequence[int], Tensor, int]],
        queue: OrderedQueue,
        sizes: dict[int, int],
    ) -> Iterator[tuple[Sequence[int], Handle[None]]]:
        """Begin to publish some updates: each rank of ``hierarchy`` sends the changes of the rows
        it owns.

        Args:
            hierarchy: ``(weights, optimizer)``, or ``(weights, world)`` at start-up and after a
                load.
            runs: the parameters of each collective, neighbours; their FP32 masters on the device of
                the INT8 weights; and the first column of these.
            queue: starts and finishes the collectives.
            sizes: filled for each run, by its first parameter: the bytes of every rank's message.
        """
        assessed = []
        for param_indices, table, first in runs:
            masters = Masters(table, first, hierarchy.index)
            part = self._part(param_indices, hierarchy.size)
            # All runs are assessed before any is sent: their sizes then take one host
            # synchronization.
            assessed.append((masters, part, ops.assess_changes(masters, part)))
        agreed = self._agreed_sizes(hierarchy, assessed)
        for (param_indices, *_), run, nbytes in zip(runs, assessed, agreed, strict=True):
            sizes[param_indices[0]] = nbytes
            masters, _, change = run
            # The queue's stream reads them after this function has returned.
            reads = [masters.table, *change]
            yield param_indices, queue.run(partial(self._send, hierarchy, *run, nbytes), reads)

    def _agreed_sizes(
        self,
        hierarchy: Hierarchy,
        assessed: Sequence[tuple[Masters, Codes, Change]],
    ) -> list[int]:
        """Return the bytes of the messages of each run: enough for the changes of every rank.

        This is the only host synchronization of a publish, one for all its runs.
        """
        if not assessed:
            return []
        # Blocks sent whole, bytes of changes
        totals = torch.cat([change.ends[-1:] for *_, change in assessed])
        gathered = all_gather(hierarchy, totals.view(-1).view(torch.uint8)).wait()
        numbers = gathered.contiguous().view(torch.int64)
        most = numbers.view(-1, len(assessed), 2).amax(0).tolist()
        spec = ChangeSpec(self.codes.block)
        sizes = []
        for (_, part, _), largest in zip(assessed, most, strict=True):
            blocks = part.blocks
            # Where nearly all blocks change, whole blocks are the shorter message.
            sizes.append(min(spec.nbytes(blocks, *largest), spec.largest(blocks)))
        return sizes

    def _send(
        self,
        hierarchy: Hierarchy,
        masters: Masters,
        part: Codes,
        change: Change,
        nbytes: int,
    ) -> Handle[None]:
        message = ops.encode_changes(masters, part, change, nbytes)

        def finish(received: Tensor) -> None:
            ops.apply_changes(received, part, hierarchy.index)

        return all_gather(hierarchy, message).then(finish)
