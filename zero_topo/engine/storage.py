# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What one rank stores of the weights: 16-bit shards, INT8 weights and exact rows, and copies of
each parameter in them that gathers send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_topo.collectives.queue import OrderedQueue
from zero_topo.config import ResolvedConfig
from zero_topo.engine.codes import CodeStore, Planner
from zero_topo.engine.copies import Copy
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh
from zero_topo.plan import coded_params
from zero_topo.quant.ops import cast_to
from zero_topo.quant.spec import BlockSpec, Format
from zero_topo.sync import Parameter


class Storage:
    """This rank's memory of the weights.

    Args:
        config: the plan and the formats.
        parameters: in flat order.
        like: a tensor of the model's dtype on the accelerator.
        wires: by parameter, the format in which a forward gather sends it, if not as INT8 weights.
        mesh: the groups.
        planned: cuts updates of INT8 weights into runs.
        queue: the ordered queue of publish.

    Attributes:
        layout: of the parameters.
        rows: the layout of what is not INT8: the columns of the primary.
        coded: by parameter, whether it is stored as INT8.
        primary: ``[N / W, ...]`` in the model's dtype: the columns of parameters that are not INT8.
        own: ``[N / O, F]``: the rows that this rank's optimizer updates; a strided view of the
            primary if no weights are INT8.
        own_row: ``[F]``, a view of ``own``: the rank's own world shard, DeepSpeed's flat parameter
            buffer.
        updatable: the rows of the primary that this rank's optimizer updates, a strided view.
        exact: by parameter, the copy that exact gathers send.
        shards: by parameter, the copy that a forward gather sends.
        row_sizes: by parameter that is not INT8: elements with padding, over the whole world.
        store: the INT8 weights; None if there are none.
        columns: by device, the columns of ``own`` that the primary has too; empty without INT8
            weights.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        parameters: Sequence[Parameter],
        like: Tensor,
        wires: Sequence[Format],
        mesh: Mesh,
        planned: Planner,
        queue: OrderedQueue,
    ) -> None:
        plan = config.plan
        int8 = config.resident_spec
        param_indices = range(len(parameters))
        numels = tuple(p.numel for p in parameters)
        self.layout = layout = Layout(plan, mesh.rank, numels)
        self.coded: Sequence[bool] = [False] * len(param_indices)
        if int8 is not None:
            dims = [p.dims for p in parameters]
            persistent = [p.persistent for p in parameters]
            self.coded = coded_params(plan, numels, dims, persistent, int8.block_size)
        kept = [0 if coded else numel for coded, numel in zip(self.coded, numels, strict=True)]
        self.rows = Layout(plan, mesh.rank, tuple(kept))
        self.primary = like.new_zeros(self.rows.shape(plan.weights))
        hierarchy = mesh.hierarchy(1, plan.weights)
        exact = cast_to(like.dtype)
        self.exact = [
            Copy(hierarchy, self.rows.parameter(self.primary, param_index), exact)
            for param_index in param_indices
        ]
        self.shards = [
            Copy(hierarchy, copy.data, wire) for copy, wire in zip(self.exact, wires, strict=True)
        ]
        self.updatable = self.rows.subset(self.primary, plan.weights, plan.optimizer)
        if int8 is None:
            self.own = self.updatable
        else:
            # Memory of their own: the primary has no columns of INT8 parameters.
            self.own = like.new_zeros(layout.shape(plan.optimizer))
        self.row_sizes = {
            param_index: layout.padded_numels[param_index]
            for param_index in param_indices
            if not self.coded[param_index]
        }
        self.columns: dict[torch.device, Tensor] = {}
        self.store: CodeStore | None = None
        if int8 is not None:
            self._build_int8(int8.block_size, mesh, planned, queue)
        self.own_row = self.own[layout.row(plan.optimizer)]

    def _build_int8(self, block: int, mesh: Mesh, planned: Planner, queue: OrderedQueue) -> None:
        """Build the INT8 weights and the exact rows (Note [INT8 weights] in ``weights.py``)."""
        layout = self.layout
        device = self.primary.device
        self.store = CodeStore(layout, self.coded, block, device, planned, queue)
        sent = BlockSpec("int8", block)
        columns = [torch.arange(0, dtype=torch.int64, device="cpu")]
        for param_index, coded in enumerate(self.coded):
            if coded:
                # Exact values are with the owners alone; forward gathers send the codes as they are
                # stored.
                self.exact[param_index] = self.owned(param_index, mesh)
                buffer = self.store.buffers[param_index]
                hierarchy = self.shards[param_index].hierarchy
                self.shards[param_index] = Copy(hierarchy, buffer, sent, True, block)
            else:
                ((begin, end),) = layout.shard_ranges([param_index])
                columns.append(torch.arange(begin, end, dtype=torch.int64, device="cpu"))
        joined = torch.cat(columns)
        self.columns = {joined.device: joined, device: joined.to(device)}

    def owned(self, param_index: int, mesh: Mesh) -> Copy:
        """Return the exact rows of a parameter that this rank stores with INT8 weights."""
        rows = self.layout.parameter(self.own, param_index)
        return Copy(mesh.hierarchy(1, self.layout.plan.optimizer), rows, cast_to(rows.dtype))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are stored, without views of them."""
        stored = [self.primary]
        if self.store is not None:
            stored += [self.store.codes.stored, self.own]
        return stored
