# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Copies of parameters, sharded over a group: how one is gathered, and the secondary one of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import all_gather, as_bytes
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh, Route
from zero_topo.quant.operands import DTYPES, FLOATS, View, view_of
from zero_topo.quant.ops import cast_to, dequantize, quantize
from zero_topo.quant.spec import Cast, Format

FORMATS = {dtype: cast_to(dtype) for dtype in FLOATS}
Capture = Callable[[int, Tensor], None]


class Copy:
    """This rank's part of one copy of a parameter.

    Args:
        route: the ranks that store the whole copy between them.
        data: rows ``[rows, width]`` of the parameter; or a packed buffer of such rows, which is sent unchanged.
        wire: the format in which it is sent.
        packed: whether the data are a packed buffer, uint8.
        block: each row in a packed buffer is padded to a multiple of this number of elements.

    Attributes:
        nbytes: of the part in a message.
        sent: the bytes of the data, a view, if a message has these bytes.
        view: the data as operators read them; not of a packed buffer.
    """

    view: View

    def __init__(self, route: Route, data: Tensor, wire: Format, packed: bool = False, block: int = 1) -> None:
        self.route, self.data, self.wire, self.packed, self._block = route, data, wire, packed, block
        self.nbytes = data.numel() if packed else wire.nbytes(data.numel())
        unchanged = packed or (wire == FORMATS.get(data.dtype) and data.is_contiguous())
        self.sent = as_bytes(data) if unchanged else None
        if not packed:
            self.view = view_of(data)  # made once: for each gather it would take as long as the launch

    def whole(self) -> Tensor:
        """Return a copy of the data, flat, to which the model may write; rounded if they are sent in a lower dtype."""
        sent = DTYPES[self.wire.dtype] if isinstance(self.wire, Cast) else self.data.dtype
        rounded = self.data.to(sent, copy=True)
        return rounded.to(self.data.dtype).flatten()

    def store(self, rows: Tensor) -> None:
        """Overwrite the stored values with ``rows [rows, width]``."""
        if self.packed:
            quantize(rows, self.wire, self.data)
        else:
            self.data.copy_(rows)

    def received(self, flat: Tensor, world_size: int) -> View:
        """Return the places of all ranks' values in the whole copy ``flat [N * width]``."""
        size, width = self.route.size, flat.numel() // world_size  # row r of member m is row m + r * size
        filled = -(-width // self._block) * self._block
        return View(flat, world_size // size, filled, size * width, size, width, width)


def pack(copies: Sequence[Copy], messages: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
    """Pack this rank's parts of some parameters' copies into one buffer, message by message.

    If all must be encoded, they are encoded directly into the buffer. Otherwise one ``cat`` joins them.
    """
    stored = [copies[message[0]].sent if len(message) == 1 else None for message in messages]
    if len(stored) > 1 and all(part is None for part in stored):
        first = copies[messages[0][0]]
        buffer = first.route.hops[-1].allocate(sum(sizes), dtype=torch.uint8, device=first.data.device)
        for message, out in zip(messages, buffer.split(list(sizes)), strict=True):
            _encode(copies, message, out)
        return buffer
    pairs = zip(messages, stored, strict=True)
    parts = [_encode(copies, message) if part is None else part for message, part in pairs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _encode(copies: Sequence[Copy], message: Sequence[int], out: Tensor | None = None) -> Tensor:
    first = copies[message[0]]
    views = [copies[slot].view for slot in message]
    return quantize(views, first.wire, out, allocate=first.route.hops[-1].allocate)


def gather(
    copies: Sequence[Copy],
    slots: Sequence[int],
    layout: Layout,
    like: Tensor,
    phase: str,
    capture: Capture | None = None,
) -> Handle[list[Tensor]]:
    """Gather whole parameters by one collective.

    Each quantized parameter has a message of its own. All others share one, the last.

    Args:
        copies: of all parameters; those of ``slots`` are gathered over the same process groups.
        slots: parameters, in the same order on every rank.
        layout: of all parameters.
        like: a tensor with the dtype and device of the result.
        phase: under which the bytes count.
        capture: called with each parameter and its rows ``[N, width]``.

    Returns:
        On ``wait``: one flat tensor ``[numel]`` per parameter.
    """
    route, world_size, flats = copies[slots[0]].route, layout.plan.world_size, dict[int, Tensor]()

    def decode(message: Sequence[int], buffers: Tensor) -> None:
        places = []
        for slot in message:
            flats[slot] = flat = like.new_empty(layout.padded_numels[slot])
            places.append(copies[slot].received(flat, world_size))
        dequantize(buffers, copies[message[0]].wire, places)

    def local() -> list[Tensor]:
        for slot in slots:
            if copies[slot].packed:
                decode([slot], copies[slot].data[None, None])
            else:
                flats[slot] = copies[slot].whole()
        return [layout.flat_of(flats.pop(slot), slot) for slot in slots]

    if route.size == 1:  # every rank stores all rows: nothing is sent, and nothing is quantized
        return Handle(None, (), local)
    messages, sizes = _messages(copies, slots)

    def finish(buffers: Tensor) -> list[Tensor]:
        table = buffers[None]  # of one source: here once for all messages
        parts = table.split(sizes, dim=-1) if len(sizes) > 1 else (table,)
        for message, part in zip(messages, parts, strict=True):
            decode(message, part)
        if capture is not None:
            for slot, flat in flats.items():
                capture(slot, flat.view(world_size, -1))
        return [layout.flat_of(flats.pop(slot), slot) for slot in slots]

    return all_gather(route.metered(phase), pack(copies, messages, sizes)).then(finish)


def _messages(copies: Sequence[Copy], slots: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Return the parameters of each message of a gather, and its bytes."""
    messages, exact, sizes, rest = list[list[int]](), list[int](), list[int](), 0
    for slot in slots:
        if copies[slot].wire.lossy:
            messages.append([slot])
            sizes.append(copies[slot].nbytes)
        else:
            exact.append(slot)
            rest += copies[slot].nbytes
    if exact:
        messages.append(exact)
        sizes.append(rest)
    return messages, sizes


class Secondary:
    """The copies from which the backward pass gathers (Note [Which copy is read] in ``weights.py``).

    There are three kinds. Unquantized copies with S a multiple of W are the primary or rows of it: always fresh.
    Quantized ones are requantized from these rows after each change. With S < W, copies are captured from forward
    gathers, which bring whole parameters.

    Args:
        layout: of all parameters.
        mesh: has the groups ``(1, S)``.
        shards: the primary, as forward gathers send it.
        degree: ``S``; None if the backward pass gathers from the primary.
        wires: by parameter, the format: one that quantizes for all, or floats.

    Attributes:
        copies: by parameter.
        tensors: storage of the copies in addition to the primary.
        shared: those of ``tensors`` that are bit-identical on all ranks that replicate them.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        shards: Sequence[Copy],
        degree: int | None,
        wires: Sequence[Format],
    ) -> None:
        self.copies = shards
        self.tensors = self.shared = tuple[Tensor, ...]()
        self._layout = layout
        # By parameter: the number of changes of its primary, and that number when its copy was made. The host writes
        # both when it queues the change or the copy; the events of `Weights` order the streams.
        self._versions = [0] * len(layout.numels)
        self._stamps = [-1] * len(layout.numels)
        # By parameter, the rows [N / S, width] of the primary from which its copy is quantized; empty if captured.
        self._cut: list[Tensor] = []
        if degree is None:
            return
        route, captured = mesh.route(1, degree), degree % layout.plan.weights != 0
        like = shards[0].data
        rows = [] if captured else [layout.subset(shard.data, layout.plan.weights, degree) for shard in shards]
        spec = wires[0]
        if isinstance(spec, Cast):
            stored = like.new_zeros(layout.shape(degree)) if captured else like
            rows = rows or [layout.slot(stored, slot) for slot in range(len(shards))]
            self.copies = [Copy(route, part, wire) for part, wire in zip(rows, wires, strict=True)]
        else:
            height, _ = layout.shape(degree)
            ends = list(accumulate((spec.nbytes(height * width) for width in layout.widths), initial=0))
            stored = torch.zeros(ends[-1], dtype=torch.uint8, device=like.device)
            self.copies = [Copy(route, stored[begin:end], spec, packed=True) for begin, end in pairwise(ends)]
            self._cut = rows
        if captured or spec.lossy:
            self.tensors = (stored,)
            self.shared = () if captured else self.tensors

    def is_fresh(self, slot: int) -> bool:
        """Return whether a parameter's copy has the current version of the weights.

        Raises:
            RuntimeError: if a copy is stale that :meth:`refresh` should have renewed.
        """
        fresh = not self.tensors or self._stamps[slot] == self._versions[slot]
        if not fresh and self._cut:
            raise RuntimeError(f"the secondary shard of parameter {slot} was not refreshed after the last publish")
        return fresh

    def expire(self, slots: Sequence[int]) -> None:
        """Mark copies of some parameters as stale, because their primary shards have changed."""
        for slot in slots:
            self._versions[slot] += 1

    def refresh(self, slots: Sequence[int]) -> None:
        """Renew some parameters' copies from the primary, if that takes no collective."""
        if self._cut:
            for slot in slots:
                self._store(slot, self._cut[slot])

    def capturing(self, slots: Sequence[int]) -> Capture | None:
        """Return a callback that stores a forward gather's rows ``[N, width]``; None if nothing is captured."""
        if not self.tensors or self._cut:
            return None
        begun = {slot: self._versions[slot] for slot in slots if not self.is_fresh(slot)}
        degree = self.copies[0].route.hi

        def capture(slot: int, rows: Tensor) -> None:
            if begun.get(slot) == self._versions[slot]:  # else the weights changed during the gather
                self._store(slot, self._layout.subset(rows, 1, degree))

        return capture

    def _store(self, slot: int, rows: Tensor) -> None:
        self.copies[slot].store(rows)
        self._stamps[slot] = self._versions[slot]
