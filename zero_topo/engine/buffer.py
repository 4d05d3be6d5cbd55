# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Buffers: parameters that are sharded over a group of ranks, each in a form of its own, and how
they are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

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

    def gather(
        self,
        param_indices: Sequence[int],
        phase: Phase,
        capture: Capture | None = None,
    ) -> Handle[list[Tensor]]:
        """Gather whole parameters by one collective.

        Each packed buffer is a message of its own. All that must be quantized share one, in which
        each parameter begins a block; so do all floats.

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
        messages, sizes = self._messages(param_indices)

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

    def _messages(self, param_indices: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """Return the parameters of each message of a gather, and its bytes."""
        messages = list[list[int]]()
        sizes = list[int]()
        # Floats come last, as blocks begin at aligned bytes.
        shared = list[int](), list[int]()
        nbytes = [0, 0]
        for index in param_indices:
            form = self.forms[index]
            if form.packed:
                messages.append([index])
                sizes.append(form.nbytes)
            else:
                is_float = not form.wire.lossy
                shared[is_float].append(index)
                nbytes[is_float] += form.nbytes
        for message, size in zip(shared, nbytes, strict=True):
            if message:
                messages.append(message)
                sizes.append(size)
        return messages, sizes

    def _pack(self, messages: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
        """Pack this rank's rows of some parameters into one buffer, message by message.

        Packed buffers, and a float parameter alone, are sent as they are stored.
        """
        first = self.forms[messages[0][0]]
        if len(messages) > 1 and not first.packed:
            # Blocks and floats: each directly at its place in the buffer.
            buffer = first.data.new_empty(sum(sizes), dtype=torch.uint8)
            for message, out in zip(messages, buffer.split(list(sizes)), strict=True):
                self._encode(message, out)
            return buffer
        parts = []
        for message, size in zip(messages, sizes, strict=True):
            sent = self.forms[message[0]].sent
            if sent is None or len(message) > 1:
                sent = first.data.new_empty(size, dtype=torch.uint8)
                self._encode(message, sent)
            parts.append(sent)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _encode(self, message: Sequence[int], out: Tensor) -> None:
        forms = map(self.forms.__getitem__, message)
        views = list(map(attrgetter("view"), forms))
        wire = self.forms[message[0]].wire
        if wire.lossy and len(message) > 1:
            # Shorter than messages of single parameters would be: the rest is not read.
            views = at_blocks(views, wire.block_size)
            out = out[: wire.nbytes(total_numel(views))]
        quantize(views, wire, out)

    def _decode(self, message: Sequence[int], table: Tensor, flats: dict[int, Tensor]) -> None:
        """Decode one message of all members into whole parameters, flat with padding, by index."""
        layout = self._layout
        world_size = layout.plan.world_size
        places = []
        for index in message:
            # Allocated on the stream that decodes, when it decodes: nothing waits in memory.
            flat = table.new_empty(layout.padded_numels[index], dtype=self._dtype)
            flats[index] = flat
            places.append(self.forms[index].place(flat, world_size, self._hierarchy.size))
        wire = self.forms[message[0]].wire
        if wire.lossy and len(message) > 1:
            places = at_blocks(places, wire.block_size)
            table = table[..., : wire.nbytes(total_numel(places))]
        dequantize(table, wire, places)

    def _stored(self, index: int) -> Tensor:
        """Return a whole parameter of which this rank stores all rows."""
        form = self.forms[index]
        if form.packed:
            flats = dict[int, Tensor]()
            self._decode([index], form.data[None, None, None], flats)
            return self._layout.flat_of(flats[index], index)
        return self._layout.flat_of(form.whole(), index)
