# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The optimizer's state dict: DTensors of the parameters' shapes, for torch's checkpoints.

Note [Residuals of a checkpoint]
    A residual of sync is what one rank has not sent yet. A checkpoint has the sum of all ranks'
    residuals, one value for each element, which fits any number of ranks. It is loaded as a
    gradient that only the owner of an element has: the first step after a load delivers it whole,
    in any mode of sync. The sum of all that is ever delivered does not change. A mode's own
    counters (first steps, masks) start again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_topo.collectives.transport import all_gather_rows
from zero_topo.engine.gradients import Gradients
from zero_topo.fsdp.host import Host
from zero_topo.fsdp.parts import Part
from zero_topo.fsdp.publish import Publisher
from zero_topo.quant.ops import cast_to
from zero_topo.sync.crossing import Crossing

MASTER = "zero_topo_master"
RESIDUAL = "zero_topo_residual"
"""Entries that torch's own optimizers do not have: FP32 weights, and the residual of sync."""


class CheckpointedOptimizer(torch.optim.Optimizer):
    """What a checkpoint reads and writes of a :class:`~zero_topo.fsdp.optimizer.ShardedOptimizer`.

    Its attributes are described there.
    """

    host: Host
    inner: torch.optim.Optimizer
    parts: dict[Tensor, Part]
    gradients: Gradients
    publisher: Publisher

    @property
    def keeps_masters(self) -> bool:
        """Whether FP32 masters are more exact than the weights, so that a checkpoint needs both."""
        exact = self.publisher.wire == cast_to(torch.float32)
        return next(iter(self.parts)).dtype != torch.float32 or not exact

    def params_in_order(self) -> list[Tensor]:
        """Return the parameters in the order of the groups, in which state dicts count them."""
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return states as DTensors of the parameters' shapes, as under FSDP2, whose memory they
        share. Collective.
        """
        index = {param: place for place, param in enumerate(self.params_in_order())}
        residuals = self._residuals()
        state = {}
        for param, place in index.items():
            part = self.parts[param]
            entry = dict(self.inner.state.get(part.master, {}))
            if entry and self.keeps_masters:
                entry[MASTER] = part.master.detach()
            if entry and part in residuals:
                entry[RESIDUAL] = residuals[part]
            state[place] = {key: _global(part, value) for key, value in entry.items()}
        groups = []
        for group in self.param_groups:
            places = [index[param] for param in group["params"]]
            groups.append({**group, "params": places})
        return {"state": state, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load :meth:`state_dict`, resharded by torch's checkpoints from that of other ranks; see
        Note [Residuals of a checkpoint].
        """
        groups = state_dict["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        self.zero_grad()
        mode = self.gradients.mode
        mode.drain()  # the state that is replaced owns what its collectives send
        mode.load_state_dict({})
        for key, param in zip(keys, self.params_in_order(), strict=True):
            part = self.parts[param]
            entry = {}
            for name, value in state_dict["state"].get(key, {}).items():
                entry[name] = _flat(part, value)
            residual = entry.pop(RESIDUAL, None)
            if residual is not None and part.param_index is not None:
                gradients = self.gradients
                own = gradients.layout.parameter(gradients.own_row[None], part.param_index)[0]
                own.copy_(residual.view(-1, part.width)[gradients.layout.row(part.degree)])
            master = entry.pop(MASTER, None)
            if master is not None:
                part.master.copy_(master)
                part.remember()
            self.inner.state[part.master] = entry
            self.state[param] = entry
        for group, own_group in zip(groups, self.param_groups, strict=True):
            own_group.update({key: value for key, value in group.items() if key != "params"})

    def _residuals(self) -> dict[Part, Tensor]:
        """Return all ranks' residuals of each part, summed; none without feedback. Collective."""
        gradients = self.gradients
        mode = gradients.mode
        layout = gradients.layout
        feedback = getattr(self.host.config.sync, "error_feedback", False)
        if not isinstance(mode, Crossing) or not feedback:
            return {}
        mode.drain()
        if not layout.columns:  # FSDP2 stores nothing on these ranks
            return {part: part.master.detach() for part in self.parts.values()}
        table = torch.zeros(mode.peers.size, layout.columns, device=gradients.buffer.device)
        rows = mode.residual_rows()
        owned = mode.residual_owners()
        # With gradients in the same memory there is nothing to save: the warning says so.
        if rows is not None and owned is not None and gradients.state_dict():
            places = {rank: place for place, rank in enumerate(mode.members())}
            owners = [places[rank] for rank in owned.owners]
            for parameter in mode.context.parameters:
                if parameter.name in owned.parameters:
                    _, first, past = owned.parameters[parameter.name]
                    begin, end = parameter.shard_range
                    table[owners, begin:end] = rows[:, first:past].to(table)
        own = mode.peers.metered("sync").all_to_all(table).sum(0)
        plan = layout.plan
        part_rows = table.new_zeros(plan.world_size // plan.optimizer, layout.columns)
        part_rows[layout.row(plan.optimizer)] = own
        hierarchy = self.host.mesh.hierarchy(plan.optimizer, plan.world_size).metered("sync")
        all_gather_rows(hierarchy, part_rows)
        found = {part: part.master.new_zeros(0) for part in self.parts.values()}
        for part in found:
            if part.param_index is not None:
                found[part] = layout.parameter(part_rows, part.param_index).reshape(-1)
        return found


def _global(part: Part, value: Any) -> Any:
    """Return an entry of the state as a DTensor if it has a value for each element."""
    flat = isinstance(value, Tensor) and value.dim() > 0 and value.numel() == part.master.numel()
    return part.as_dtensor(value) if flat else value


def _flat(part: Part, value: Any) -> Any:
    """Return an entry as the optimizer stores it: a part flat and padded, a scalar as it is."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if not isinstance(value, DTensor):
        raise ValueError(
            f"{part.name}: the optimizer's state is a whole tensor; load it by "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    flat = part.from_dtensor(value)
    padded = flat.new_zeros(part.master.numel())
    padded[: part.numel] = flat[: part.numel]
    return padded
