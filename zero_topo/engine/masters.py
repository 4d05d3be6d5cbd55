# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""FP32 optimizer shards of one row or several: optimizer states replicated between domains (MiCS, HSDP).

DeepSpeed keeps one world shard of masters and optimizer states per rank. With ``O < N`` a rank's optimizer shard is
``N / O`` of them. Ranks that share it compute the same update from the same bits, so nothing travels for them.
Checkpoints keep DeepSpeed's layout: each rank saves the row that stock ZeRO-3 would, and a load gathers the others.
A shard of one row (``O = N``) has that layout already: it is never copied, and nothing of it is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zero_topo.collectives.meter import Counted, Meter
from zero_topo.collectives.transport import all_gather_rows
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh
from zero_topo.sync import Moment

State = MutableMapping[Tensor, dict[str, Any]]


class Masters:
    """Masters as tables of rows, and their way, with their optimizer states, from and to DeepSpeed's layout.

    Attributes:
        own_row: index of the row that DeepSpeed's layout knows.
    """

    def __init__(self, layout: Layout, mesh: Mesh, meter: Meter, device: torch.device) -> None:
        self._rows = layout.plan.world_size // layout.plan.optimizer
        self.own_row = layout.row(layout.plan.optimizer)
        self._route = mesh.route(layout.plan.optimizer, layout.plan.world_size)
        self._counted = Counted(meter, "publish")
        self._device = device

    def table(self, flat: Tensor) -> Tensor:
        """A flat master, state or gradient as ``[N / O, columns]``, a view."""
        return flat.view(self._rows, -1)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for an optimizer whose state exists before the masters do."""
        if optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} fills its state when it is built, which zero_topo cannot replicate; use "
                'an Adam-like optimizer or "optimizer": "world"'
            )

    def build(self, rows: Tensor, like: Tensor) -> Tensor:
        """A leaf tensor of ``[N / O * columns]`` in ``like``'s dtype and device, filled from ``rows`` (a view)."""
        master = torch.empty(rows.numel(), dtype=like.dtype, device=like.device)
        self.table(master).copy_(rows)
        return master.requires_grad_(True)

    def share(self, flat: Tensor, begin: int = 0, width: int | None = None) -> None:
        """Fill the other rows (of some columns) from the ranks that own them; offloaded ones by way of the accelerator.

        Collective if there are others.
        """
        if self._rows == 1:
            return
        table = self.table(flat.detach())
        columns = table[:, begin : table.shape[1] if width is None else begin + width]
        moved = columns.to(self._device)
        all_gather_rows(self._route, moved, self._counted)
        if moved is not columns:
            columns.copy_(moved)

    def follow(self, flat: Tensor, begin: int, rows: Tensor, edited: Tensor) -> None:
        """Take over edited weights; masters of the others stay, exact where the weights are published rounded.

        Args:
            flat: a master.
            begin: the first column.
            rows: ``[N / O, width]``, weights.
            edited: which of them were; bool of the same shape.
        """
        masters = self.table(flat.detach())[:, begin : begin + rows.shape[1]]
        masters.copy_(torch.where(edited.to(flat.device), rows.to(flat), masters))

    def moments(
        self, state: State, flats: Sequence[Tensor], begins: Sequence[int], groups: Sequence[Any]
    ) -> list[Moment]:
        """What an Adam-like optimizer remembers of the gradients, for the mode of sync.

        Args:
            state: by master.
            flats: the masters, one for each sub-group.
            begins: the first column of each.
            groups: the optimizer's parameter group of each.

        Returns:
            One entry for each sub-group that has been updated before.
        """
        found = []
        for flat, begin, group in zip(flats, begins, groups, strict=True):
            mean = state.get(flat, {}).get("exp_avg")
            if mean is not None:
                found.append(Moment(begin, self.table(mean), float(group["betas"][0])))
        return found

    @contextmanager
    def narrowed(self, masters: list[Tensor], optimizer: torch.optim.Optimizer, share: bool) -> Iterator[list[Tensor]]:
        """Masters and optimizer states in DeepSpeed's layout for the length of a save or load.

        Args:
            masters: the masters of all rows, one per sub-group.
            optimizer: its state is keyed by master, and holds the narrow entries within the context. Loading a state
                dict gives an optimizer a new state, so it is looked up again at the end.
            share: take what the context wrote into the narrow tensors back into all rows (a load; collective), unless
                it raised.

        Yields:
            One leaf tensor ``[columns]`` per master: those given, if they have one row.
        """
        if self._rows == 1:
            yield masters
            return
        state = optimizer.state
        narrow = [self._narrow(master) for master in masters]
        saved = [state.pop(master, None) for master in masters]
        for small, master, entry in zip(narrow, masters, saved, strict=True):
            if entry is not None:
                state[small] = {key: self._narrow_value(value, master) for key, value in entry.items()}
        loaded = False
        try:
            yield narrow
            loaded = share
        finally:  # a load that failed leaves what was there, and is not shared: other ranks may not have failed
            state = optimizer.state
            for small, master, entry in zip(narrow, masters, saved, strict=True):
                changed = state.pop(small, None)
                if loaded:
                    self.table(master.detach())[self.own_row].copy_(small.detach())
                    self.share(master)
                    entry = None if changed is None else {k: self._widen(v, small, master) for k, v in changed.items()}
                if entry is not None:
                    state[master] = entry

    def _narrow(self, master: Tensor) -> Tensor:
        small = self.table(master.detach())[self.own_row].clone().requires_grad_(True)
        if hasattr(master, "ds_id"):
            small.ds_id = master.ds_id  # type: ignore[attr-defined]
        return small

    def _narrow_value(self, value: Any, master: Tensor) -> Any:
        if isinstance(value, Tensor) and value.numel() == master.numel() and value.dim():
            return self.table(value)[self.own_row].clone()
        return value

    def _widen(self, value: Any, small: Tensor, master: Tensor) -> Any:
        if not (isinstance(value, Tensor) and value.numel() == small.numel() and value.dim()):
            return value
        wide = torch.zeros(master.numel(), dtype=value.dtype, device=value.device)
        self.table(wide)[self.own_row].copy_(value)
        self.share(wide)
        return wide


def clean(layout: Layout, masters: Sequence[Tensor], state: State) -> None:
    """After a load: zero the padding (Note [Padding] in ``shards.py``), and give each master a step count of its own.

    A universal checkpoint gives all masters one tensor to count in, which each of their updates would increment.

    Args:
        layout: the slots.
        masters: one world shard per sub-group, in flat order.
        state: optimizer states by master.
    """
    first = 0
    for master in masters:
        entry = state.get(master, {})
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                entry[key] = value.clone()
        tensors = [v for v in entry.values() if isinstance(v, Tensor) and v.dim() and v.numel() == master.numel()]
        for flat in (master.detach(), *tensors):
            layout.clear_padding(flat.view(-1), first)
        first += master.numel()
