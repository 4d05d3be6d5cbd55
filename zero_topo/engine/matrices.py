# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Applies a function of whole matrices, such as Muon's, to matrices that are sharded like the
optimizer states.

Each matrix has one owner among the ``O`` ranks that together store the optimizer states once. Every
rank sends its part to the owner, the owner applies the function, and every rank receives its part
of the result. A rank computes ``1 / O`` of the matrices and sends about ``2 / O`` of their
elements. With the optimizer sharded over a node nothing crosses nodes, and every node computes all
matrices. With the optimizer sharded over the world each matrix is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from zero_topo.collectives.transport import Group
from zero_topo.engine.shards import Layout
from zero_topo.plan import packed_runs

Update = Callable[[Sequence[int], Tensor], Tensor]
"""Parameter indices, and their matrices ``[count, *shape]`` -> the updates, ``[count, *shape]``."""


Batch = tuple[list[list[list[int]]], list[int]]
"""The matrices that are exchanged at once: for each owner, its parameter indices in groups of equal
shape; and the elements of this rank's parts, by owner.
"""


class Matrices:
    """Distributes matrices over the ranks that together store the optimizer states once.

    Args:
        layout: the shards.
        group: these ranks, metered.
        limit: elements of the matrices that are exchanged at once; at least one matrix for each
            rank is.
        dtype: type of the values on the wire.
    """

    def __init__(self, layout: Layout, group: Group, limit: int, dtype: torch.dtype) -> None:
        self._layout = layout
        self._group = group
        self._limit = limit
        self._dtype = dtype
        # By parameter indices, filled on first use: the batches of one step.
        self._batches: dict[tuple[int, ...], list[Batch]] = {}

    def apply(
        self,
        parts: Mapping[int, Tensor],
        shapes: Mapping[int, tuple[int, ...]],
        update: Update,
    ) -> None:
        """Replace matrices by their updates, in place. Collective for the group.

        Args:
            parts: parameter index -> this rank's part of the matrix, ``[N / O, width]``.
            shapes: parameter index -> shape of the matrix.
            update: called once for each shape among the matrices that this rank owns.
        """
        key = tuple(parts)
        if key not in self._batches:
            self._batches[key] = self._planned(shapes, key)
        for batch in self._batches[key]:
            self._exchange(parts, shapes, batch, update)

    def _planned(
        self,
        shapes: Mapping[int, tuple[int, ...]],
        param_indices: Sequence[int],
    ) -> list[Batch]:
        """Assign matrices to owners in turn, large ones first, so that owners compute about equally
        much.
        """
        layout = self._layout
        size = self._group.size
        rows = layout.plan.world_size // layout.plan.optimizer
        ordered = sorted(
            param_indices,
            key=lambda param_index: (-layout.numels[param_index], shapes[param_index], param_index),
        )
        # In each turn every owner gets one matrix, of about the same size.
        turns = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        numels = [sum(map(layout.numels.__getitem__, turn)) for turn in turns]
        planned = []
        for run in packed_runs(numels, self._limit):
            alike = []
            sizes = []
            for owner in range(size):
                owned = [turns[t][owner] for t in run if owner < len(turns[t])]
                sizes.append(rows * sum(map(layout.widths.__getitem__, owned)))
                alike.append([list(equal) for _, equal in groupby(owned, shapes.__getitem__)])
            planned.append((alike, sizes))
        return planned

    def _exchange(
        self,
        parts: Mapping[int, Tensor],
        shapes: Mapping[int, tuple[int, ...]],
        batch: Batch,
        update: Update,
    ) -> None:
        layout = self._layout
        group = self._group
        by_owner, sizes = batch
        groups = [alike for owned in by_owner for alike in owned]
        numels = {
            param_index: parts[param_index].numel() for alike in groups for param_index in alike
        }
        # Every member sends an owner as much: its part of each matrix of that owner.
        same = [sizes[group.index]] * group.size
        sent = torch.cat(
            [torch.stack(list(map(parts.__getitem__, alike))).flatten() for alike in groups]
        ).to(self._dtype)
        received = group.begin("all_to_all", sent, sizes, same).wait().view(group.size, same[0])
        tables = received.split(
            [sum(map(numels.__getitem__, alike)) for alike in by_owner[group.index]], dim=1
        )
        replies = [received[:, :0]]  # never an empty list
        for alike, table in zip(by_owner[group.index], tables, strict=True):
            first = alike[0]
            # A member's rows interleave with those of the others, as in every shard: see `members`.
            rows = (
                table.unflatten(1, (len(alike), *parts[first].shape))
                .permute(1, 2, 0, 3)
                .flatten(1, 2)
            )
            changed = update(
                alike, layout.flat_of(rows.flatten(-2), first).unflatten(1, shapes[first]).float()
            )
            # Back into shards: row r belongs to member r % size.
            rows = layout.rows(changed.flatten(1)).unflatten(1, (-1, group.size))
            replies.append(rows.permute(2, 0, 1, 3).flatten(1))
        reply = torch.cat(replies, dim=1).to(self._dtype).view(-1)
        back = group.begin("all_to_all", reply, same, sizes).wait()
        for param_index, values in zip(numels, back.split([*numels.values()]), strict=True):
            parts[param_index].copy_(values.view(parts[param_index].shape))
