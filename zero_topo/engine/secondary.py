# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The copies of parameters from which the backward pass gathers (Note [Which copy is read] in
``weights.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero_topo.engine.buffer import Buffer, Capture, Form, forms_of
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh
from zero_topo.plan import Phase
from zero_topo.quant.operands import View
from zero_topo.quant.ops import quantize
from zero_topo.quant.spec import Format


class Secondary:
    """Copies of another degree than the primary.

    With S a multiple of W, unquantized copies are the primary or rows of it: always fresh.
    Quantized ones are requantized from these rows after each change. With S < W, copies are
    captured from forward gathers, which bring whole parameters.

    Args:
        layout: of the parameters.
        mesh: has the groups ``(1, S)``.
        primary: the rows of the weights ``[N / W, F]``.
        degree: ``S``.
        wires: by parameter, the format: one that quantizes for all, or floats.
        frozen: whether weights do not change: what a forward gather captured, later ones read.

    Attributes:
        buffer: the copies.
        stored: their memory; empty if they are rows of the primary.
        captured: whether the copies are not of this rank's own primary.
        phases: those whose gathers read the copies.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        primary: Tensor,
        degree: int,
        wires: Sequence[Format],
        frozen: bool,
    ) -> None:
        self.stored: list[Tensor] = []
        self.captured = degree % layout.plan.weights != 0
        self.phases: tuple[Phase, ...] = ("gather_backward",)
        if frozen and self.captured:
            self.phases = ("gather_forward", "gather_backward")
        self._layout = layout
        self._degree = degree
        # By parameter: the number of changes of its primary, and that number when its copy was
        # made. The host writes both when it queues the change or the copy; the events of `Weights`
        # order the streams.
        self._versions = [0] * len(wires)
        self._stamps = [-1] * len(wires)
        # By parameter, the rows [N / S, width] of the primary from which copies are quantized,
        # unless captured. Made once: for each copy it would take as long as the launch.
        self._views: list[View] = []
        if self.captured:
            forms = self._allocate(primary, wires)
        else:
            forms = forms_of(layout, layout.subset(primary, layout.plan.weights, degree), wires)
            if wires[0].lossy:
                self._views += [form.view for form in forms]
                forms = self._allocate(primary, wires)
        self.buffer = Buffer(layout, mesh.hierarchy(1, degree), forms, primary.dtype)

    def _allocate(self, like: Tensor, wires: Sequence[Format]) -> list[Form]:
        """Allocate one tensor for all copies, and return its parts, parameter by parameter."""
        height, _ = self._layout.shape(self._degree)
        packed = wires[0].lossy
        sizes = []
        for width, wire in zip(self._layout.widths, wires, strict=True):
            numel = height * width
            sizes.append(wire.nbytes(numel) if packed else numel * like.itemsize)
        stored = like.new_zeros(sum(sizes), dtype=torch.uint8)
        self.stored.append(stored)
        forms = []
        parts = stored.split(sizes)
        for part, width, wire in zip(parts, self._layout.widths, wires, strict=True):
            if packed:
                forms.append(Form(part, wire, block=1))
            else:
                forms.append(Form(part.view(like.dtype).view(height, width), wire))
        return forms

    def is_fresh(self, index: int) -> bool:
        """Return whether a parameter's copy has the current version of the weights.

        Raises:
            RuntimeError: if a copy is stale that :meth:`renew` should have made again.
        """
        fresh = not self.stored or self._stamps[index] == self._versions[index]
        if not fresh and not self.captured:
            raise RuntimeError(
                f"the secondary shard of parameter {index} was not refreshed after the last publish"
            )
        return fresh

    def renew(self, param_indices: Sequence[int]) -> None:
        """Mark copies of some parameters as stale, because their primary shards have changed, and
        make them again if that takes no collective.
        """
        for index in param_indices:
            self._versions[index] += 1
            if self._views:
                self._stamps[index] = self._versions[index]
                form = self.buffer.forms[index]
                quantize([self._views[index]], form.wire, form.data)

    def capture(self, param_indices: Sequence[int]) -> Capture | None:
        """Return a callback that stores what a forward gather brings; None if all copies are
        fresh.
        """
        begun = {i: self._versions[i] for i in param_indices if not self.is_fresh(i)}

        def store(flats: Mapping[int, Tensor]) -> None:
            for index, flat in flats.items():
                # Without those whose weights changed during the gather.
                if begun.get(index) == self._versions[index]:
                    whole = flat.view(self._layout.plan.world_size, -1)
                    self._stamps[index] = self._versions[index]
                    self.buffer.forms[index].store(self._layout.subset(whole, 1, self._degree))

        return store if begun else None
