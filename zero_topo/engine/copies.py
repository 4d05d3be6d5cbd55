# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Copies of parameters, sharded over a group: how one is gathered, and the secondary one of the
backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle, OrderedQueue, on_gpu
from zero_topo.collectives.transport import all_gather, as_bytes
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Hierarchy, Mesh
from zero_topo.plan import Phase
from zero_topo.quant.operands import DTYPES, FLOATS, View, view_of
from zero_topo.quant.ops import cast_to, dequantize, quantize
from zero_topo.quant.spec import Cast, Format
from zero_topo.units import format_bytes

T = TypeVar("T")
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
        group = first.hierarchy.groups[-1]
        buffer = group.allocate(sum(sizes), dtype=torch.uint8, device=first.data.device)
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
    return quantize(views, first.wire, out, allocate=first.hierarchy.groups[-1].allocate)


def gather(
    copies: Sequence[Copy],
    param_indices: Sequence[int],
    layout: Layout,
    like: Tensor,
    phase: Phase,
    capture: Capture | None = None,
    message: Tensor | None = None,
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
        message: this rank's parts, packed, if they are; else the data of the copies are packed.

    Returns:
        On ``wait``: one flat tensor ``[numel]`` per parameter.
    """
    hierarchy = copies[param_indices[0]].hierarchy
    # Every rank stores all rows: nothing is sent, and nothing is quantized
    if hierarchy.size == 1 and message is None:
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

    if message is None:
        message = pack(copies, messages, sizes)
    return all_gather(hierarchy.metered(phase), message).then(finish)


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
    """The copies of some parameters from which the backward pass gathers (Note [Which copy is read]
    in ``weights.py``).

    There are three kinds. With S a multiple of W, unquantized copies are the primary or rows of it:
    always fresh. Quantized ones are requantized from these rows after each change; "on the host"
    they are not stored, and each gather quantizes the rows. With S < W, copies are captured from
    forward gathers, which bring whole parameters; copies of frozen parameters are stored when these
    change.

    Note [Copies in host memory]
        A captured copy on the host is stored as gathers send it. The gathers' stream packs a
        forward gather's rows into a staging buffer; the stream of ``copying`` then copies this to
        the host. Before a backward gather, that stream copies the parts to the device. It runs its
        copies in order, so a load never overtakes the store before it. A staging buffer is freed
        once the stream that packs the next one has waited for its copy; a loaded buffer, once the
        reader has waited for its gather. Both are then reused in stream order: the host waits for
        nothing, and no more than one gather's parts are staged.

    Args:
        layout: of all parameters.
        mesh: has the groups ``(1, S)``.
        shards: the primary, as forward gathers send it.
        param_indices: the parameters, consecutive.
        degree: ``S``; None if the backward pass gathers from the primary.
        wires: by parameter, the format: one that quantizes for all, or floats.
        copying: the queue of copies to and from the host; None stores the copies on the device.

    Attributes:
        copies: by parameter; those of ``param_indices`` are the secondary ones.
        tensors: storage of the copies on the device in addition to the primary.
        shared: those of ``tensors`` that are bit-identical on all ranks that replicate them.
        host: storage of the copies on the host, uint8, page-locked on a GPU; None on the device.
        captured: whether the copies are not of this rank's own primary.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        shards: Sequence[Copy],
        param_indices: range,
        degree: int | None,
        wires: Sequence[Format],
        copying: OrderedQueue | None = None,
    ) -> None:
        self.copies = list(shards)
        self.tensors = self.shared = tuple[Tensor, ...]()
        self.host: Tensor | None = None
        self._layout = layout
        # By parameter: the number of changes of its primary, and that number when its copy was
        # made. The host writes both when it queues the change or the copy; the events of `Weights`
        # order the streams.
        self._versions = [0] * len(layout.numels)
        self._stamps = [-1] * len(layout.numels)
        # By parameter, the rows [N / S, width] of the primary from which its copy is quantized;
        # empty if captured.
        self._cut: dict[int, Tensor] = {}
        self.captured = (
            degree is not None and len(param_indices) > 0 and degree % layout.plan.weights != 0
        )
        # The last copy to the host: its handle keeps the staging buffer.
        self._stored: Handle[None] | None = None
        if degree is None or not param_indices:
            return
        self._degree = degree
        self._copying = copying
        self._like = shards[param_indices[0]].data
        hierarchy = mesh.hierarchy(1, degree)
        if not self.captured:
            rows = {
                param_index: layout.subset(shards[param_index].data, layout.plan.weights, degree)
                for param_index in param_indices
            }
            # Unquantized: the copy is rows of the primary. On the host: they are quantized for each
            # gather.
            if not wires[param_indices[0]].lossy or copying is not None:
                for param_index, row in rows.items():
                    self.copies[param_index] = Copy(hierarchy, row, wires[param_index])
                return
            self._cut = rows
        self._store_packed(hierarchy, param_indices, wires)

    def _store_packed(
        self,
        hierarchy: Hierarchy,
        param_indices: range,
        wires: Sequence[Format],
    ) -> None:
        """Allocate one tensor for all copies, cut parameter by parameter."""
        on_device = self._copying is None
        # A copy on the host is stored as it is sent, so that no launch follows a load.
        packs = wires[param_indices[0]].lossy or not on_device
        height, _ = self._layout.shape(self._degree)
        sizes = []
        for param_index in param_indices:
            numel = height * self._layout.widths[param_index]
            plain = numel * self._like.itemsize
            sizes.append(wires[param_index].nbytes(numel) if packs else plain)
        # Page-locked on the host, so that copies to and from it do not stop the host.
        if on_device:
            stored = self._like.new_zeros(sum(sizes), dtype=torch.uint8)
            self.tensors = (stored,)
            self.shared = () if self.captured else self.tensors
        else:
            stored = self.host = on_host(sum(sizes), self._like.device)
        for param_index, part in zip(param_indices, stored.split(sizes), strict=True):
            data = part
            if not packs:
                data = part.view(self._like.dtype).view(height, self._layout.widths[param_index])
            self.copies[param_index] = Copy(hierarchy, data, wires[param_index], packed=packs)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies on the device."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def is_fresh(self, param_index: int) -> bool:
        """Return whether a parameter's copy has the current version of the weights.

        Raises:
            RuntimeError: if a copy is stale that :meth:`refresh` should have renewed.
        """
        fresh = (
            not (self.captured or self._cut)
            or self._stamps[param_index] == self._versions[param_index]
        )
        if not fresh and self._cut:
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
        if self._cut:
            self._store({param_index: self._cut[param_index] for param_index in param_indices})

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

    def settle(self) -> None:
        """Make the current stream wait for the last copy to the host, and free its staging
        buffer.
        """
        if self._stored is not None:
            self._stored.wait()
            self._stored = None

    def store_now(self, param_index: int, rows: Tensor) -> None:
        """Store a copy from its rows ``[N / S, width]``; the current stream waits for it."""
        self._store({param_index: rows})
        self.settle()

    def load(self, param_indices: Sequence[int]) -> Handle[Tensor]:
        """Begin to copy some parameters' parts from the host to one buffer on the device, in
        order.
        """
        parts = [self.copies[param_index].data for param_index in param_indices]

        def copied() -> Handle[Tensor]:
            sizes = [part.numel() for part in parts]
            loaded = torch.empty(sum(sizes), dtype=torch.uint8, device=self._like.device)
            for part, place in zip(parts, loaded.split(sizes), strict=True):
                place.copy_(part, non_blocking=True)
            return Handle(loaded)

        assert self._copying is not None
        return self._copying.run(copied)

    def _store(self, rows: Mapping[int, Tensor]) -> None:
        for param_index in rows:
            self._stamps[param_index] = self._versions[param_index]
        if self.host is None:
            for param_index, part in rows.items():
                self.copies[param_index].store(part)
            return
        self.settle()  # at most one staging buffer at a time
        places = [self.copies[param_index].data for param_index in rows]
        staged = [quantize(part, self.copies[i].wire) for i, part in rows.items()]

        def copied() -> Handle[None]:
            for place, part in zip(places, staged, strict=True):
                place.copy_(part, non_blocking=True)
            return Handle()

        assert self._copying is not None
        self._stored = self._copying.run(copied).then(partial(_keep, staged))


def _keep(owned: object, result: T) -> T:
    """Return the result of a handle that owns something until it is waited for."""
    return result


def kept_until(handle: Handle[T], owned: object) -> Handle[T]:
    """Return a handle that owns something until its reader's stream has waited for it."""
    return handle.then(partial(_keep, owned))


def on_host(nbytes: int, device: torch.device) -> Tensor:
    """Return zeros in the host's memory, uint8 ``[nbytes]``, page-locked if ``device`` is a GPU.

    CUDA's driver page-locks memory of any size in place; ``pin_memory`` rounds the size up to a
    power of two.

    Raises:
        RuntimeError: if the driver refuses.
    """
    if device.type != "cuda" or not nbytes:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu(device))
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    runtime = cast(Any, torch.cuda.cudart())
    if status := int(runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 0)):
        raise RuntimeError(
            f'zero_topo.secondary_on = "host": the driver cannot page-lock {format_bytes(nbytes)} '
            "of host memory "
            f"(error {status}); raise the limit of locked memory (ulimit -l), or store the copy on "
            "the device"
        )
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer
