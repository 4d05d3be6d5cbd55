# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Copies of parameters, sharded over a group: how one is gathered, and the secondary one of the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import all_gather, as_bytes
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Hierarchy, Mesh
from zero_topo.plan import Phase
from zero_topo.quant.operands import DTYPES, FLOATS, View, view_of
from zero_topo.quant.ops import cast_to, dequantize, quantize
from zero_topo.quant.spec import Cast, Format

FORMATS = {dtype: cast_to(dtype) for dtype in FLOATS}
Capture = Callable[[Mapping[int, Tensor]], None]


class Copy:
    """This rank's part of one copy of a parameter.

    Args:
        hierarchy: the ranks that store the whole copy between them.
        data: rows ``[rows, width]`` of the parameter; or a packed buffer of such rows, which is
            sent unchanged.
        wire: the format in which it is sent.
        packed: whether the data are a packed buffer, uint8.
        block: each row in a packed buffer is padded to a multiple of this number of elements.

    Attributes:
        nbytes: of the part in a message.
        sent: the bytes of the data, a view, if a message has these bytes.
        view: the data as operators read them; not of a packed buffer.
    """

    view: View

    def __init__(
        self,
        hierarchy: Hierarchy,
        data: Tensor,
        wire: Format,
        packed: bool = False,
        block: int = 1,
    ) -> None:
        self.hierarchy = hierarchy
        self.data = data
        self.wire = wire
        self.packed = packed
        self._block = block
        self.nbytes = data.numel() if packed else wire.nbytes(data.numel())
        unchanged = packed or (wire == FORMATS.get(data.dtype) and data.is_contiguous())
        self.sent = as_bytes(data) if unchanged else None
        if not packed:
            # Made once: for each gather it would take as long as the launch
            self.view = view_of(data)

    def whole(self) -> Tensor:
        """Return a copy of the data, flat, to which the model may write; rounded if they are sent
        in a lower dtype.
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

    def received(self, flat: Tensor, world_size: int) -> View:
        """Return the places of all ranks' values in the whole copy ``flat [N * width]``."""
        size = self.hierarchy.size
        width = flat.numel() // world_size  # row r of member m is row m + r * size
        filled = -(-width // self._block) * self._block
        return View(flat, world_size // size, filled, size * width, size, width, width)


def pack(copies: Sequence[Copy], messages: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
    """Pack this rank's parts of some parameters' copies into one buffer, message by message.

    If all must be encoded, they are encoded directly into the buffer. Otherwise one ``cat`` joins
    them.
    """
    stored = {}
    for index, message in enumerate(messages):
        sent = copies[message[0]].sent
        if len(message) == 1 and sent is not None:
            stored[index] = sent
    # Several messages that all must be encoded: each directly at its place in the buffer.
    if len(messages) > 1 and not stored:
        first = copies[messages[0][0]]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=first.data.device)
        for message, out in zip(messages, buffer.split(list(sizes)), strict=True):
            _encode(copies, message, out)
        return buffer
    for index, message in enumerate(messages):
        if index not in stored:
            stored[index] = _encode(copies, message)
    if len(messages) == 1:
        return stored[0]
    return torch.cat([stored[index] for index in range(len(messages))])


def _encode(copies: Sequence[Copy], message: Sequence[int], out: Tensor | None = None) -> Tensor:
    first = copies[message[0]]
    views = [copies[param_index].view for param_index in message]
    return quantize(views, first.wire, out)


def gather(
    copies: Sequence[Copy],
    param_indices: Sequence[int],
    layout: Layout,
    like: Tensor,
    phase: Phase,
    capture: Capture | None = None,
) -> Handle[list[Tensor]]:
    """Gather whole parameters by one collective.

    Each quantized parameter has a message of its own. All others share one, the last.

    Args:
        copies: of all parameters; those of ``param_indices`` are gathered over the same process
            groups.
        param_indices: parameters, in the same order on every rank.
        layout: of all parameters.
        like: a tensor with the dtype and device of the result.
        phase: under which the bytes count.
        capture: called with the parameters, flat with padding: ``[N * width]`` each.

    Returns:
        On ``wait``: one flat tensor ``[numel]`` per parameter.
    """
    hierarchy = copies[param_indices[0]].hierarchy
    # Every rank stores all rows: nothing is sent, and nothing is quantized
    if hierarchy.size == 1:
        return Handle().then(lambda _: _local(copies, param_indices, layout, like))
    messages, sizes = _messages(copies, param_indices)

    def finish(buffers: Tensor) -> list[Tensor]:
        flats = dict[int, Tensor]()
        table = buffers[None]  # of one source: here once for all messages
        # A column of the table is one message of all members, one launch.
        parts = table.split(sizes, dim=-1) if len(sizes) > 1 else (table,)
        for message, part in zip(messages, parts, strict=True):
            flats |= _decode(copies, message, part, layout, like)
        if capture is not None:
            capture(flats)
        return [layout.flat_of(flats.pop(i), i) for i in param_indices]

    packed = pack(copies, messages, sizes)
    return all_gather(hierarchy.metered(phase), packed).then(finish)


def _decode(
    copies: Sequence[Copy],
    message: Sequence[int],
    buffers: Tensor,
    layout: Layout,
    like: Tensor,
) -> dict[int, Tensor]:
    """Decode one message of all members into whole parameters, flat with padding."""
    flats = {}
    places = []
    for param_index in message:
        # Allocated on the stream that decodes, when it decodes: nothing waits in memory.
        flats[param_index] = flat = like.new_empty(layout.padded_numels[param_index])
        places.append(copies[param_index].received(flat, layout.plan.world_size))
    dequantize(buffers, copies[message[0]].wire, places)
    return flats


def _local(
    copies: Sequence[Copy],
    param_indices: Sequence[int],
    layout: Layout,
    like: Tensor,
) -> list[Tensor]:
    """Return whole parameters of which this rank stores all rows."""
    whole = []
    for param_index in param_indices:
        copy = copies[param_index]
        if copy.packed:
            flats = _decode(copies, [param_index], copy.data[None, None], layout, like)
            flat = flats[param_index]
        else:
            flat = copy.whole()
        whole.append(layout.flat_of(flat, param_index))
    return whole


def _messages(
    copies: Sequence[Copy],
    param_indices: Sequence[int],
) -> tuple[list[list[int]], list[int]]:
    """Return the parameters of each message of a gather, and its bytes."""
    messages = list[list[int]]()
    exact = list[int]()
    sizes = list[int]()
    rest = 0
    for param_index in param_indices:
        if copies[param_index].wire.lossy:
            messages.append([param_index])
            sizes.append(copies[param_index].nbytes)
        else:
            exact.append(param_index)
            rest += copies[param_index].nbytes
    if exact:
        messages.append(exact)
        sizes.append(rest)
    return messages, sizes


class Secondary:
    """The copies of parameters from which the backward pass gathers (Note [Which copy is read] in
    ``weights.py``).

    With S a multiple of W, unquantized copies are the primary or rows of it: always fresh.
    Quantized ones are requantized from these rows after each change. With S < W, copies are
    captured from forward gathers, which bring whole parameters.

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
        captured: whether the copies are not of this rank's own primary.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        shards: Sequence[Copy],
        degree: int | None,
        wires: Sequence[Format],
    ) -> None:
        self.copies = list(shards)
        self.tensors = self.shared = tuple[Tensor, ...]()
        self.captured = False
        self._layout = layout
        # By parameter: the number of changes of its primary, and that number when its copy was
        # made. The host writes both when it queues the change or the copy; the events of `Weights`
        # order the streams.
        self._versions = [0] * len(shards)
        self._stamps = [-1] * len(shards)
        # By parameter, the rows [N / S, width] of the primary from which its copy is quantized;
        # empty if captured.
        self._rows: list[Tensor] = []
        if degree is None or not shards:
            return
        hierarchy = mesh.hierarchy(1, degree)
        self._degree = degree
        self.captured = degree % layout.plan.weights != 0
        lossy = wires[0].lossy
        if not self.captured:
            rows = [layout.subset(shard.data, layout.plan.weights, degree) for shard in shards]
            if not lossy:
                # The copy is rows of the primary
                self.copies = [
                    Copy(hierarchy, row, wire) for row, wire in zip(rows, wires, strict=True)
                ]
                return
            self._rows = rows
        self.copies = self._allocate(hierarchy, shards[0].data, wires, lossy)

    def _allocate(
        self,
        hierarchy: Hierarchy,
        like: Tensor,
        wires: Sequence[Format],
        lossy: bool,
    ) -> list[Copy]:
        """Allocate one tensor for all copies, and return its parts, parameter by parameter."""
        height, _ = self._layout.shape(self._degree)
        sizes = []
        for width, wire in zip(self._layout.widths, wires, strict=True):
            numel = height * width
            sizes.append(wire.nbytes(numel) if lossy else numel * like.itemsize)
        stored = like.new_zeros(sum(sizes), dtype=torch.uint8)
        self.tensors = (stored,)
        self.shared = () if self.captured else self.tensors
        copies = []
        for part, width, wire in zip(stored.split(sizes), self._layout.widths, wires, strict=True):
            data = part if lossy else part.view(like.dtype).view(height, width)
            copies.append(Copy(hierarchy, data, wire, packed=lossy))
        return copies

    def is_fresh(self, param_index: int) -> bool:
        """Return whether a parameter's copy has the current version of the weights.

        Raises:
            RuntimeError: if a copy is stale that :meth:`refresh` should have renewed.
        """
        fresh = not self.tensors or self._stamps[param_index] == self._versions[param_index]
        if not fresh and not self.captured:
            raise RuntimeError(
                f"the secondary shard of parameter {param_index} was not refreshed after the last "
                "publish"
            )
        return fresh

    def expire(self, param_indices: Sequence[int]) -> None:
        """Mark copies of some parameters as stale, because their primary shards have changed."""
        for param_index in param_indices:
            self._versions[param_index] += 1

    def refresh(self, param_indices: Sequence[int]) -> None:
        """Renew some parameters' copies from the primary, if that takes no collective."""
        if self._rows:
            self._store({param_index: self._rows[param_index] for param_index in param_indices})

    def capturing(self, param_indices: Sequence[int]) -> Capture | None:
        """Return a callback that stores what a forward gather brings; None if nothing is
        captured.
        """
        if not self.captured:
            return None
        begun = {i: self._versions[i] for i in param_indices if not self.is_fresh(i)}

        def capture(flats: Mapping[int, Tensor]) -> None:
            rows = {}
            for param_index, flat in flats.items():
                # Without those whose weights changed during the gather.
                if begun.get(param_index) == self._versions[param_index]:
                    whole = flat.view(self._layout.plan.world_size, -1)
                    rows[param_index] = self._layout.subset(whole, 1, self._degree)
            self._store(rows)

        return capture if begun else None

    def _store(self, rows: Mapping[int, Tensor]) -> None:
        for param_index, part in rows.items():
            self._stamps[param_index] = self._versions[param_index]
            self.copies[param_index].store(part)
