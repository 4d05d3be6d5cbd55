# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The secondary copy of the weights, from which the backward pass gathers (Note [Which copy is read])."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from zero_topo.collectives.wire import cast_to
from zero_topo.engine.shards import Layout
from zero_topo.engine.sources import Rows, Stored
from zero_topo.mesh import Mesh
from zero_topo.quant.spec import BlockSpec


class Secondary:
    """What the backward pass gathers from. This one is the primary, or rows of it: always fresh, and costs nothing.

    Attributes:
        source: what its gathers send.
        tensors: held besides the primary.
        shared: tensors of its own that are bit-identical on all ranks that share them.
    """

    tensors: tuple[Tensor, ...] = ()
    shared: tuple[Tensor, ...] = ()

    def __init__(self, source: Rows | Stored) -> None:
        self.source = source

    def is_fresh(self, index: int) -> bool:
        """Whether a slot is of the present version of the weights.

        Raises:
            RuntimeError: if it is not, though it should have been refreshed.
        """
        return True

    def expire(self, slots: Sequence[int]) -> None:
        """The primary shards of some slots have changed: what was copied from them is stale."""

    def refresh(self, slots: Sequence[int]) -> None:
        """Bring some slots up to date with the primary, if that takes no collective."""

    def capturing(self, slots: Sequence[int]) -> Callable[[int, Tensor], None]:
        """For a forward gather that begins now: what to do with each slot's rows ``[N, width]`` when they are there."""
        return lambda index, rows: None


class _Stamped(Secondary):
    """A copy apart: each slot is stamped with the version of the weights that it holds."""

    def __init__(self, source: Rows | Stored, layout: Layout) -> None:
        super().__init__(source)
        self.tensors = (source.tensor,)
        self._layout = layout
        self._versions = [0] * len(layout.numels)  # of the primary, by slot
        self._stamps = [-1] * len(layout.numels)

    def is_fresh(self, index: int) -> bool:
        return self._stamps[index] == self._versions[index]

    def expire(self, slots: Sequence[int]) -> None:
        for index in slots:
            self._versions[index] += 1

    def _store(self, index: int, rows: Tensor) -> None:
        """Keep a slot's secondary rows (``[N / S, width]``)."""
        self.source.store(index, rows)
        self._stamps[index] = self._versions[index]


class _Cut(_Stamped):
    """S a multiple of W: rows of the primary (``[N / S, F]``, a view), quantized once after each change."""

    def __init__(self, source: Stored, layout: Layout, rows: Tensor) -> None:
        super().__init__(source, layout)
        self.shared = self.tensors
        self._rows = rows

    def is_fresh(self, index: int) -> bool:
        if not super().is_fresh(index):
            raise RuntimeError(f"the secondary shard of slot {index} was not refreshed after the last publish")
        return True

    def refresh(self, slots: Sequence[int]) -> None:
        for index in slots:
            self._store(index, self._layout.slot(self._rows, index))


class _Captured(_Stamped):
    """S < W: rows kept from the forward gathers, which bring the parameters whole."""

    def __init__(self, source: Rows | Stored, layout: Layout, degree: int) -> None:
        super().__init__(source, layout)
        self._degree = degree

    def capturing(self, slots: Sequence[int]) -> Callable[[int, Tensor], None]:
        begun = {index: self._versions[index] for index in slots if not self.is_fresh(index)}

        def keep(index: int, rows: Tensor) -> None:
            if begun.get(index) == self._versions[index]:  # else the weights changed while they were under way
                self._store(index, self._layout.subset(rows, 1, self._degree))

        return keep


def build_secondary(mesh: Mesh, primary: Rows, spec: BlockSpec | None) -> Secondary:
    """The secondary copy that a plan asks for.

    Args:
        mesh: holds the route ``(1, secondary)``.
        primary: what forward gathers send.
        spec: the secondary's format; None keeps the model's type.
    """
    layout, plan = primary.layout, primary.layout.plan
    if plan.secondary is None or plan.weights == 1:
        return Secondary(primary)
    route, captured = mesh.route(1, plan.secondary), plan.secondary % plan.weights != 0
    if spec is not None:
        stored = Stored(primary, route, replace(primary.wire, spec=spec))
        if captured:
            return _Captured(stored, layout, plan.secondary)
        return _Cut(stored, layout, layout.subset(primary.rows, plan.weights, plan.secondary))
    plain = replace(primary.wire, spec=cast_to(primary.rows.dtype))
    if captured:
        own = primary.rows.new_zeros(layout.shape(plan.secondary))
        return _Captured(replace(primary, route=route, rows=own, wire=plain), layout, plan.secondary)
    rows = layout.subset(primary.rows, plan.weights, plan.secondary)
    return Secondary(replace(primary, route=route, rows=rows, wire=plain))
