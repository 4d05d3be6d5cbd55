# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""FP32 optimizer shards of one or several rows: optimizer states replicated between domains,
as in HSDP.

DeepSpeed stores one world shard of masters and optimizer states per rank. With ``O < N`` a rank's
optimizer shard has ``N / O`` such rows. Ranks that replicate it compute the same update from the
same bits, without communication. Checkpoints keep DeepSpeed's layout: each rank saves the row that
stock ZeRO-3 would, and a load gathers the others. A shard of one row (``O = N``) has that layout
already: it is neither copied nor replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zero_topo.collectives.transport import all_gather_rows
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh

State = MutableMapping[Tensor, dict[str, Any]]


class Masters:
    """Lays out masters as tables of rows, and converts them and their optimizer states from and to
    DeepSpeed's layout.

    Attributes:
        own_row: index of the row that DeepSpeed's layout stores.
    """

    def __init__(self, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        self._rows = layout.plan.world_size // layout.plan.optimizer
        self.own_row = layout.row(layout.plan.optimizer)
        self._hierarchy = mesh.hierarchy(layout.plan.optimizer, layout.plan.world_size).metered(
            "publish"
        )
        self._device = device

    def table(self, flat: Tensor) -> Tensor:
        """View a flat master, state or gradient as ``[N / O, columns]``."""
        return flat.view(self._rows, -1)

    def share(self, flat: Tensor, begin: int = 0, width: int | None = None) -> None:
        """Fill the other rows (of some columns) from the ranks that own them; collective if there
        are several rows.

        An offloaded tensor is copied to the accelerator and back.
        """
        if self._rows == 1:
            return
        table = self.table(flat.detach())
        columns = table[:, begin : table.shape[1] if width is None else begin + width]
        # Offloaded masters move to the accelerator, whose groups gather them.
        moved = columns.to(self._device)
        all_gather_rows(self._hierarchy, moved)
        if moved is not columns:
            columns.copy_(moved)

    def follow(self, flat: Tensor, begin: int, rows: Tensor, edited: Tensor) -> None:
        """Copy edited weights into a master; elements that were not edited keep their FP32 values.

        Args:
            flat: a master.
            begin: the first column.
            rows: the weights, ``[N / O, width]``.
            edited: whether each was edited, bool ``[N / O, width]``.
        """
        masters = self.table(flat.detach())[:, begin : begin + rows.shape[1]]
        masters.copy_(torch.where(edited.to(flat.device), rows.to(flat), masters))

    @contextmanager
    def narrowed(
        self,
        masters: list[Tensor],
        optimizer: torch.optim.Optimizer,
        share: bool,
    ) -> Iterator[list[Tensor]]:
        """Present masters and optimizer states in DeepSpeed's layout during a save or load.

        Args:
            masters: the masters of all rows, one per sub-group.
            optimizer: its state is keyed by master; within the context it has the one-row entries
                instead. Loading a state dict replaces the optimizer's state, so it is read again at
                the end.
            share: for a load: copy the one-row tensors back, and to all rows (collective), unless
                the context raised.

        Yields:
            One leaf tensor ``[columns]`` per master: the given masters, if they have one row.
        """
        if self._rows == 1:
            yield masters
            return
        state = optimizer.state
        narrow = [self._own_row_of(master.detach()).requires_grad_() for master in masters]
        # The wide entries wait here; DeepSpeed sees, saves and loads those of one row.
        saved = [state.pop(master, None) for master in masters]
        for small, master, entry in zip(narrow, masters, saved, strict=True):
            small.ds_id = getattr(master, "ds_id", None)  # type: ignore[attr-defined]
            if entry is not None:
                state[small] = dict(entry)
                for key, value in entry.items():
                    if _is_laid_out_as(master, value):
                        state[small][key] = self._own_row_of(value)
        loaded = False
        try:
            yield narrow
            loaded = share
        finally:
            # After a failed load the old state stays, without a collective: other ranks may not
            # have failed.
            state = optimizer.state
            for small, master, entry in zip(narrow, masters, saved, strict=True):
                # By now the entry of the narrow master is what was loaded.
                changed = state.pop(small, None)
                if loaded:
                    self.table(master.detach())[self.own_row].copy_(small.detach())
                    self.share(master)
                    entry = changed and {
                        key: self._widen(value, small, master) for key, value in changed.items()
                    }
                if entry is not None:
                    state[master] = entry

    def _own_row_of(self, flat: Tensor) -> Tensor:
        """Return a copy of the row of DeepSpeed's layout."""
        return self.table(flat)[self.own_row].clone()

    def _widen(self, value: Any, small: Tensor, master: Tensor) -> Any:
        if not _is_laid_out_as(small, value):
            return value
        wide = value.new_zeros(master.numel())
        self.table(wide)[self.own_row].copy_(value)
        self.share(wide)
        return wide


def _is_laid_out_as(master: Tensor, value: Any) -> bool:
    """Return whether an entry of the optimizer's state has one value for each element of a
    master.
    """
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == master.numel()


def clean(layout: Layout, masters: Sequence[Tensor], state: State) -> None:
    """Zero the padding after a load (Note [Padding] in ``shards.py``), and give each master its own
    step count.

    A universal checkpoint gives all masters one step tensor, which each of their updates would
    increment.

    Args:
        layout: the parameters' shard ranges.
        masters: one world shard per sub-group, in flat order.
        state: optimizer states by master.
    """
    first = 0
    for master in masters:
        entry = state.get(master, {})
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                # A step count for each master; see the docstring.
                entry[key] = value.clone()
        for flat in (
            master.detach(),
            *(value for value in entry.values() if _is_laid_out_as(master, value)),
        ):
            layout.clear_padding(flat.view(-1), first)
        first += master.numel()
