# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Buffers: parameters that are sharded over a group of ranks, each in a form of its own, and how
they are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import all_gather, as_bytes
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Hierarchy
from zero_topo.plan import Phase
from zero_topo.quant.operands import DTYPES, FLOATS, View, at_blocks, total_numel, view_of
from zero_topo.quant.ops import cast_to, dequantize, quantize
from zero_topo.quant.spec import Cast, Format

FORMATS = {dtype: cast_to(dtype) for dtype in FLOATS}
Capture = Callable[[Mapping[int, Tensor]], None]


class Form:
    """How a rank stores its rows of one parameter, and how it sends them.

    Args:
        data: rows ``[rows, width]`` of floats; or a packed buffer of such rows, uint8, which is
            sent unchanged.
        wire: the format in which the rows are sent.
        block: of a packed buffer: each row is padded to a multiple of this number of elements.

    Attributes:
        nbytes: of the rows in a message.
        sent: the bytes of the data, a view, if a message has these bytes.
        view: the rows as operators read them; not of a packed buffer.
    """

    view: View

    def __init__(self, data: Tensor, wire: Format, block: int | None = None) -> None:
        self.data = data
        self.wire = wire
        self.packed = block is not None
        self._block = block or 1
        self.nbytes = data.numel() if self.packed else wire.nbytes(data.numel())
        unchanged = self.packed or (wire == FORMATS.get(data.dtype) and data.is_contiguous())
        self.sent = as_bytes(data) if unchanged else None
        if not self.packed:
            # Made once: for each gather it would take as long as the launch
            self.view = view_of(data)

    def whole(self) -> Tensor:
        """Return a copy of floats, flat, to which the model may write; rounded if they are sent in
        a lower dtype.
        """
        sent = DTYPES[self.wire.dtype] if isinstance(self.wire, Cast) else self.data.dtype
        rounded = self.data.to(sent, copy=True)
        return rounded.to(self.data.dtype).flatten()

    def store(self, rows: Tensor) -> None:
        """Overwrite the stored values with ``rows [rows, width]``."""
        if self.packed:
            quantize(rows, self.wire, self.data)
        else:
            self.data.copy_(rows)

    def place(self, flat: Tensor, world_size: int, size: int) -> View:
        """Return the places of the rows of ``size`` ranks in the whole parameter
        ``flat [N * width]``.
        """
        width = flat.numel() // world_size  # row r of member m is row m + r * size
        filled = -(-width // self._block) * self._block
        return View(flat, world_size // size, filled, size * width, size, width, width)


def forms_of(layout: Layout, rows: Tensor, wires: Sequence[Format]) -> list[Form]:
    """Return the forms of parameters whose rows are columns of a table ``[rows, F]``."""
    return [Form(layout.parameter(rows, index), wire) for index, wire in enumerate(wires)]


class Message(NamedTuple):
    """Parameters whose rows one launch encodes, and one decodes.

    Attributes:
        indices: the parameters.
        wire: their format.
        sent: the stored bytes, if they are the message.
        views: else the rows, each at the begin of a block.
        nbytes: of the message, as many as messages of single parameters have.
        used: of these, those that have values.
    """

    indices: list[int]
    wire: Format
    sent: Tensor | None
    views: list[View]
    nbytes: int
    used: int


class Buffer:
    """This rank's rows of some parameters.

    Args:
        layout: of the parameters.
        hierarchy: the ranks that store all rows between them.
        forms: by parameter.
        dtype: of whole parameters.
    """

    def __init__(
        self,
        layout: Layout,
        hierarchy: Hierarchy,
        forms: Iterable[Form],
        dtype: torch.dtype,
    ) -> None:
        self.forms = list(forms)
        self._layout = layout
        self._hierarchy = hierarchy
        self._dtype = dtype
        self._cut: dict[tuple[int, ...], tuple[list[Message], list[int]]] = {}

    def gather(
        self,
        param_indices: Sequence[int],
        phase: Phase,
        capture: Capture | None = None,
    ) -> Handle[list[Tensor]]:
        """Gather whole parameters by one collective.

        Each packed buffer is a message of its own. All others share one for each format; in it
        each parameter begins a block.

        Args:
            param_indices: parameters, in the same order on every rank.
            phase: under which the bytes count.
            capture: called with the parameters, flat with padding: ``[N * width]`` each.

        Returns:
            On ``wait``: one flat tensor ``[numel]`` per parameter.
        """
        layout = self._layout
        # Every rank stores all rows: nothing is sent, and nothing is quantized
        if self._hierarchy.size == 1:
            return Handle().then(lambda _: [self._stored(index) for index in param_indices])
        messages, sizes = self._messages(tuple(param_indices))

        def finish(buffers: Tensor) -> list[Tensor]:
            flats = dict[int, Tensor]()
            table = buffers[None]  # of one source: here once for all messages
            # A column of the table is one message of all members, one launch.
            parts = table.split(sizes, dim=-1) if len(sizes) > 1 else (table,)
            for message, part in zip(messages, parts, strict=True):
                self._decode(message, part, flats)
            if capture is not None:
                capture(flats)
            return [layout.flat_of(flats.pop(index), index) for index in param_indices]

        packed = self._pack(messages, sizes)
        return all_gather(self._hierarchy.metered(phase), packed).then(finish)

    def _messages(self, param_indices: tuple[int, ...]) -> tuple[list[Message], list[int]]:
        """Return the messages of a gather, and the bytes of each; made once for each list of
        parameters.
        """
        if param_indices not in self._cut:
            groups: dict[Format | int, list[int]] = {}
            for index in param_indices:
                form = self.forms[index]
                groups.setdefault(index if form.packed else form.wire, []).append(index)
            messages = list(map(self._message, groups.values()))
            # Floats come last, as blocks begin at aligned bytes.
            messages.sort(key=lambda message: not message.wire.lossy)
            self._cut[param_indices] = messages, [message.nbytes for message in messages]
        return self._cut[param_indices]

    def _message(self, indices: list[int]) -> Message:
        forms = [self.forms[index] for index in indices]
        wire = forms[0].wire
        nbytes = sum(form.nbytes for form in forms)
        if len(forms) == 1 and forms[0].sent is not None:
            return Message(indices, wire, forms[0].sent, [], nbytes, nbytes)
        views = at_blocks([form.view for form in forms], wire.block_size)
        return Message(indices, wire, None, views, nbytes, wire.nbytes(total_numel(views)))

    def _pack(self, messages: Sequence[Message], sizes: list[int]) -> Tensor:
        """Pack this rank's rows of some parameters into one buffer, each message at its place."""
        first = messages[0]
        if len(messages) == 1 and first.sent is not None:
            return first.sent
        device = self.forms[first.indices[0]].data.device
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        stored = []
        copies = []
        for message, out in zip(messages, buffer.split(sizes), strict=True):
            if message.sent is None:
                quantize(message.views, message.wire, out[: message.used])
            else:
                stored.append(message.sent)
                copies.append(out)
        if stored:
            torch._foreach_copy_(copies, stored)
        return buffer

    def _decode(self, message: Message, table: Tensor, flats: dict[int, Tensor]) -> None:
        """Decode one message of all members into whole parameters, flat with padding, by index."""
        layout = self._layout
        world_size = layout.plan.world_size
        places = []
        for index in message.indices:
            # Allocated on the stream that decodes, when it decodes: nothing waits in memory.
            flat = table.new_empty(layout.padded_numels[index], dtype=self._dtype)
            flats[index] = flat
            places.append(self.forms[index].place(flat, world_size, self._hierarchy.size))
        if message.wire.lossy and len(places) > 1:
            places = at_blocks(places, message.wire.block_size)
        dequantize(table[..., : message.used], message.wire, places)

    def _stored(self, index: int) -> Tensor:
        """Return a whole parameter of which this rank stores all rows."""
        form = self.forms[index]
        if form.packed:
            flats = dict[int, Tensor]()
            (message,), _ = self._messages((index,))
            self._decode(message, form.data[None, None, None], flats)
            return self._layout.flat_of(flats[index], index)
        return self._layout.flat_of(form.whole(), index)
