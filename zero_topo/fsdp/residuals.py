# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Residuals of sync in a checkpoint.

Note [Residuals of a checkpoint]
    A residual of sync is what one rank has not sent yet. A checkpoint has the sum of all ranks'
    residuals, one value for each element, which fits any number of ranks. It is loaded as a
    gradient that only the owner of an element has: the first step after a load delivers it whole,
    in any mode of sync. The sum of all that is ever delivered does not change. A mode's own
    counters (first steps, masks) start again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zero_topo.collectives.transport import all_gather_rows
from zero_topo.engine.gradients import Gradients
from zero_topo.fsdp.parts import Part
from zero_topo.mesh import Mesh
from zero_topo.sync.crossing import Crossing


def summed_residuals(gradients: Gradients, parts: Iterable[Part], mesh: Mesh) -> dict[Part, Tensor]:
    """Return all ranks' residuals of each part, summed. Collective.

    Args:
        gradients: the gradient shard and the mode of sync, which keeps residuals.
        parts: the parts of this rank.
        mesh: has the group ``(optimizer, world)``.
    """
    mode = gradients.mode
    layout = gradients.layout
    assert isinstance(mode, Crossing)
    mode.drain()
    if not layout.columns:  # FSDP2 stores nothing on these ranks
        return {part: part.master.detach() for part in parts}
    table = torch.zeros(mode.peers.size, layout.columns, device=gradients.buffer.device)
    rows = mode.residual_rows()
    owned = mode.residual_owners()
    # With gradients in the same memory there is nothing to save: the warning says so.
    if rows is not None and owned is not None and gradients.state_dict():
        members = mode.members()
        owners = [members.index(rank) for rank in owned.owners]
        for parameter in mode.context.parameters:
            if parameter.name in owned.parameters:
                _, first, past = owned.parameters[parameter.name]
                begin, end = parameter.shard_range
                table[owners, begin:end] = rows[:, first:past].to(table)
    own = mode.peers.metered("sync").all_to_all(table).sum(0)
    plan = layout.plan
    part_rows = table.new_zeros(layout.shape(plan.optimizer))
    part_rows[layout.row(plan.optimizer)] = own
    hierarchy = mesh.hierarchy(plan.optimizer, plan.world_size).metered("sync")
    all_gather_rows(hierarchy, part_rows)
    return {part: part.columns(part_rows).reshape(-1) for part in parts}
