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
from itertools import chain, groupby

import torch
from torch import Tensor

from zero_topo.collectives.transport import Group
from zero_topo.engine.shards import Layout

Update = Callable[[Sequence[int], Tensor], Tensor]
"""Parameter indices, and their matrices ``[count, *shape]`` -> the updates, ``[count, *shape]``."""


Batch = list[list[int]]
"""Parameter indices of matrices of one shape that are exchanged at once, by owner."""


class Matrices:
    """Distributes matrices over the ranks that together store the optimizer states once.

    Args:
        layout: the shards.
        group: these ranks, metered.
        limit: elements of the matrices that are exchanged at once; at least one matrix for each
            rank is. They have one shape.
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
        numels = self._layout.numels
        size = self._group.size
        ordered = sorted(param_indices, key=lambda i: (-numels[i], shapes[i], i))
        planned = []
        turn = 0  # the owner of the next matrix, modulo the size
        for _, equal in groupby(ordered, shapes.__getitem__):
            alike = list(equal)
            most = max(size, self._limit // numels[alike[0]])
            for begin in range(0, len(alike), most):
                part = alike[begin : begin + most]
                planned.append([part[(owner - turn) % size :: size] for owner in range(size)])
                turn += len(part)
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
        size = group.size
        owned = batch[group.index]
        ordered = list(chain.from_iterable(batch))
        first = ordered[0]
        # Every member sends an owner as much: its part of each matrix of that owner.
        sizes = [len(indices) * parts[first].numel() for indices in batch]
        same = [sizes[group.index]] * size
        sent = torch.stack([parts[param_index] for param_index in ordered]).to(self._dtype)
        reply = group.begin("all_to_all", sent.view(-1), sizes, same).wait()
        if owned:
            # A member's rows interleave with those of the others, as in every shard: see `members`.
            by_member = reply.view(size, len(owned), *parts[first].shape)
            rows = by_member.permute(1, 2, 0, 3).flatten(1)
            whole = layout.flat_of(rows, first).unflatten(1, shapes[first])
            changed = update(owned, whole.float())
            # Back into shards: row r belongs to member r % size.
            rows = layout.rows(changed.flatten(1)).unflatten(1, (-1, size))
            reply = rows.permute(2, 0, 1, 3).to(self._dtype).flatten()
        back = group.begin("all_to_all", reply, same, sizes).wait()
        for param_index, values in zip(ordered, back.view(sent.shape), strict=True):
            parts[param_index].copy_(values)
