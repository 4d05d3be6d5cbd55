# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the process groups through which a rank exchanges messages, and hierarchical
collectives over them.

Members are counted in tree order. All calls are collective: every member makes the same ones in the
same order. A buffer being sent must not change until its handle has been waited for. The mesh
chooses the class of each group once.

Note [Own reduce-scatter]
    Why not a library reduce-scatter: its sum order and precision depend on the backend (BF16 sums,
    ring order), it cannot carry block-quantized values, and gloo's sends every byte twice. One
    all-to-all sends ``(d - 1) / d`` of the input, as a ring does, and the same code serves INT4,
    INT8, 16-bit and FP32. Where a library's ring is faster than its all-to-all, ``backend`` takes
    it for a group, at that price.

    Each part of a message begins a block, so that it does not share a scale with another, which may
    be a thousand times larger (a matrix next to a norm).

Note [Group order]
    Backends count a group's members by global rank (``Group.group_ranks``). Where that is not the
    tree's order, one copy on the device reorders the buffers that a collective sends and receives,
    by an index that stays on the device. Point-to-point messages need no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.collectives.queue import Handle
from zero_topo.plan import Plan
from zero_topo.quant.operands import DTYPES, View, at_blocks, counted, total_numel
from zero_topo.quant.ops import dequantize, dequantize_reduce, quantize, requantize
from zero_topo.quant.spec import Cast, Format


class Group:
    """One process group of this rank (Note [Process groups] in ``plan.py``), with the collectives
    of torch's backend.

    Attributes:
        lo: degree of the larger shard.
        hi: degree of the smaller shard.
        size: number of members.
        index: this rank's place among the members, in tree order.
        group_ranks: ``group_ranks[c]`` is the group rank of member ``c``: torch sorts a group by
            global rank, the tree may not.
        members: ``members[r]`` is the member with group rank ``r``.
        domain: smallest domain that holds the group.
        group: the process group; None for a group of one.
        sums: whether :meth:`sum_later` may be called: the backend's own reduce-scatter sends no
            more than needed.
        done: finished works that are kept alive, see Note [Works that are kept] in
            ``backends.py``.
        meter: counts the exchanges.
        phase: the phase under which they count, one of ``plan.PHASES``; only a group of
            :meth:`metered` has one.
    """

    phase: str
    sums = True

    def __init__(
        self,
        lo: int,
        hi: int,
        index: int,
        group_ranks: tuple[int, ...],
        domain: str,
        group: dist.ProcessGroup | None,
        meter: Meter,
    ) -> None:
        self.lo = lo
        self.hi = hi
        self.size = hi // lo
        self.index = index
        self.group_ranks = group_ranks
        self.domain = domain
        self.group = group
        self.meter = meter
        self.members = tuple(sorted(range(len(group_ranks)), key=group_ranks.__getitem__))
        self.in_order = group_ranks == tuple(range(len(group_ranks)))
        # Shared by all copies of the group, since they share its process group.
        self.done: list[dist.Work] = []

    def metered(self, phase: str) -> Self:
        """Return a copy of this group whose exchanges are counted for a phase."""
        metered = copy(self)
        metered.phase = phase
        return metered

    def gather_later(self, x: Tensor) -> Handle[Tensor]:
        """Start an all-gather of ``x``, of one shape on all members; the result is
        ``[size, *x.shape]``.
        """
        if self.size == 1:
            return Handle(x[None])
        shape = self.size, *x.shape
        nbytes = (self.size - 1) * x.nbytes
        received = self._begin("all_gather", nbytes, True, self._all_gather, as_bytes(x))
        if x.dtype == torch.uint8 and x.dim() == 1:
            return received
        return received.then(lambda b: b.view(x.dtype).view(shape))

    def gather(self, x: Tensor) -> Tensor:
        """All-gather ``x`` and wait; see :meth:`gather_later`."""
        return self.gather_later(x).wait()

    def all_to_all_later(self, table: Tensor) -> Handle[Tensor]:
        """Start an all-to-all: entry ``c`` of ``table`` goes to member ``c``; the result has the
        entries for this rank.

        Args:
            table: ``[size, ...]`` of any dtype, contiguous, of one shape on all members.
        """
        if self.size == 1:
            return Handle(table)
        if table.dtype != torch.uint8:
            dtype = table.dtype
            shape = table.shape
            received = self.all_to_all_later(as_bytes(table).view(self.size, -1))
            return received.then(lambda message: message.view(-1).view(dtype).view(shape))
        nbytes = (self.size - 1) * (table.nbytes // self.size)
        return self._begin("all_to_all", nbytes, True, self._all_to_all, table)

    def all_to_all(self, table: Tensor) -> Tensor:
        """Run an all-to-all and wait; see :meth:`all_to_all_later`."""
        return self.all_to_all_later(table).wait()

    def sum_later(self, table: Tensor, dtype: torch.dtype) -> Handle[Tensor]:
        """Start the backend's reduce-scatter: the sum of all members' entries for this rank, in the
        order of its ring.

        Args:
            table: ``[size, ...]`` of uint8, contiguous, of one shape on all members; entry ``c`` is
                for member ``c``.
            dtype: the type of the values that it has, in which they are added.

        Returns:
            ``[1, ...]`` of uint8 on ``wait``.
        """
        nbytes = (self.size - 1) * (table.nbytes // self.size)
        return self._begin("reduce_scatter", nbytes, True, self._reduce_scatter, table.view(dtype))

    def gather_known(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """All-gather ``rows`` (``[sizes[index], ...]``) of known sizes into
        ``[sum(sizes), ...]``.
        """
        nbytes = (self.size - 1) * rows.nbytes
        return self._uneven(rows, nbytes, self._all_gather_uneven, sizes)

    def all_to_all_known(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        expected: Sequence[int],
    ) -> Tensor:
        """Send the next ``sizes[c]`` rows to each member ``c``, and return the rows received, in
        member order.

        Args:
            rows: ``[sum(sizes), ...]``, contiguous.
            sizes: rows for each member, on the host.
            expected: rows received from each member, equal to that member's entry of ``sizes`` for
                this rank.
        """
        sent = len(rows) - sizes[self.index]
        nbytes = sent * rows.shape[1:].numel() * rows.itemsize
        return self._uneven(rows, nbytes, self._all_to_all_uneven, sizes, expected)

    def _uneven(self, rows: Tensor, nbytes: int, begin: Any, *sizes: Sequence[int]) -> Tensor:
        """Run an exchange of rows, and return the received rows in the shape and dtype of those
        given.
        """
        if self.size == 1:
            return rows
        row = rows.shape[1:]
        width = row.numel() * rows.itemsize
        table = rows.view(torch.uint8).view(len(rows), width)
        received = self._begin("all_to_all", nbytes, False, begin, table, *sizes).wait()
        values = received.view(-1).view(rows.dtype)
        return values.view(len(received), *row)

    def _begin(
        self,
        op: Literal["all_gather", "all_to_all", "reduce_scatter"],
        nbytes: int,
        even: bool,
        begin: Callable[..., Handle[Tensor]],
        *arguments: Any,
    ) -> Handle[Tensor]:
        """Begin and count an exchange; if the meter's listener times it, also finish it."""
        # Counted when it begins, whether or not it is waited for.
        self.meter.record(self.phase, self.domain, nbytes)
        listener = self.meter.listener
        timing = listener and listener(self, op, nbytes, even)
        if timing is None:
            return begin(*arguments)
        with timing:
            handle = begin(*arguments)
            handle.wait()
        return handle

    # -- torch's collectives, which another transport replaces (Note [Group order]) ----------------

    def _all_gather(self, message: Tensor) -> Handle[Tensor]:
        """All-gather ``message`` (1-D, contiguous, of one length on all members) into
        ``[size, numel]``.
        """
        shape = self.size, message.numel()
        received = torch.empty(shape, dtype=message.dtype, device=message.device)
        work = dist.all_gather_into_tensor(received, message, group=self.group, async_op=True)
        return self._ended(work, message, received)

    def _all_to_all(self, table: Tensor) -> Handle[Tensor]:
        """Send entry ``c`` of ``table`` (``[size, ...]``, contiguous) to member ``c``; the result
        has that shape.
        """
        send = table if self.in_order else self._in_order(table, self.members)
        received = torch.empty(table.shape, dtype=table.dtype, device=table.device)
        work = dist.all_to_all_single(received, send, group=self.group, async_op=True)
        return self._ended(work, send, received)

    def _reduce_scatter(self, table: Tensor) -> Handle[Tensor]:
        """Sum entry ``index`` of the members' tables (``[size, ...]``, contiguous) into
        ``[1, ...]``, as uint8.
        """
        send = table if self.in_order else self._in_order(table, self.members)
        # Of uint8 nothing can be summed: the caller has viewed the table as values.
        received = torch.empty(1, *table.shape[1:], dtype=table.dtype, device=table.device)
        # torch 2.13 has renamed reduce_scatter_tensor.
        old: Any = getattr(dist, "reduce_scatter_tensor", None)
        reduce_scatter = getattr(dist, "reduce_scatter_single", old)
        work = reduce_scatter(received, send, group=self.group, async_op=True)
        return Handle(received.view(torch.uint8), work.wait, (send,))

    def _ended(self, work: dist.Work, sent: Tensor, received: Tensor) -> Handle[Tensor]:
        """Return a handle whose ``wait`` gives the received buffer in the order of the members."""
        ended = Handle(received, work.wait, (sent,))
        return ended if self.in_order else ended.then(lambda r: self._in_order(r, self.group_ranks))

    def _room(self, counts: Sequence[int], rows: Tensor) -> Tensor:
        """Allocate ``[sum(counts), width]`` for rows like the given ones."""
        width = rows.shape[1]
        return torch.empty(sum(counts), width, dtype=rows.dtype, device=rows.device)

    def _in_order(self, table: Tensor, order: tuple[int, ...]) -> Tensor:
        """Return a copy with the entries in another order, which may be sent."""
        ordered = torch.empty(table.shape, dtype=table.dtype, device=table.device)
        return torch.index_select(table, 0, _index(order, table.device), out=ordered)

    def _all_to_all_uneven(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        expected: Sequence[int],
    ) -> Handle[Tensor]:
        """Send ``sizes[c]`` rows of uint8 ``[sum(sizes), width]`` to each member ``c``:
        ``[sum(expected), width]``.
        """
        received = self._room(expected, rows)
        if self.in_order:
            work = dist.all_to_all_single(
                received, rows, list(expected), list(sizes), group=self.group, async_op=True
            )
            return Handle(received, work.wait, (rows,))
        cpu = torch.device("cpu")
        members = _index(self.members, cpu)
        lengths = host_counts(sizes)
        # torch takes sizes in the order of group ranks, and sends and receives in that order.
        due = host_counts(expected)[members]
        send = _regrouped(rows, lengths, members)
        lists = due.tolist(), lengths[members].tolist()
        work = dist.all_to_all_single(received, send, *lists, group=self.group, async_op=True)
        ended = Handle(received, work.wait, (send,))
        return ended.then(lambda r: _regrouped(r, due, _index(self.group_ranks, cpu)))

    def _all_gather_uneven(self, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
        """All-gather rows of uint8 ``[sizes[index], width]`` into ``[sum(sizes), width]``."""
        received = self._room(sizes, rows)
        places = received.split(list(sizes))
        if not self.in_order:
            places = itemgetter(*self.members)(places)
        # A list of tensors: every rank is sent the same memory, and each message is received where
        # it belongs.
        work = dist.all_to_all(list(places), [rows] * self.size, group=self.group, async_op=True)
        return Handle(received, work.wait, (rows, places))


class Hierarchy:
    """The groups of a collective over ``(lo, hi)`` (Note [Hierarchical collectives] in
    ``plan.py``).

    Attributes:
        groups: innermost first, ``(lo, a), (a, hi)``, or ``(lo, hi)`` alone.
        lo: degree of the larger shard.
        hi: degree of the smaller shard.
        size: number of members.
        index: this rank's place among the members, in tree order.
    """

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.lo = groups[0].lo
        self.hi = groups[-1].hi
        self.size = self.hi // self.lo
        self.index = 0
        for group in groups:
            self.index += group.lo // self.lo * group.index
        # Made once for each phase, so that a training step makes none.
        self._metered: dict[str, Hierarchy] = {}

    def metered(self, phase: str) -> Hierarchy:
        """Return the same groups with their exchanges counted for a phase, as collectives need
        them.
        """
        if phase not in self._metered:
            self._metered[phase] = Hierarchy(tuple(group.metered(phase) for group in self.groups))
        return self._metered[phase]


def members(rows: Tensor, size: int) -> Tensor:
    """Return a view of a degree-``lo`` shard by member of the group ``(lo, lo * size)``.

    Args:
        rows: ``[N / lo, ...]``.
        size: members of the group.

    Returns:
        ``[size, N / (lo * size), ...]``, a view: entry ``c`` is the shard of member ``c``.
    """
    return rows.unflatten(0, (-1, size)).transpose(0, 1)


def rows_of(flat: Tensor, plan: Plan, rank_at: Tensor | None = None) -> Tensor:
    """Return a parameter-shaped tensor as world shards in tree order.

    Args:
        flat: ``[..., numel]``, contiguous.
        plan: gives the world size and the order.
        rank_at: the plan's ``rank_at`` as a tensor on the device of ``flat``, if that exists
            already.

    Returns:
        ``[..., N, ceil(numel / N)]``, zero-padded; a view of ``flat`` if no padding and no
        reordering are needed.
    """
    *stack, numel = flat.shape
    width = plan.shard_numel(numel)
    missing = plan.world_size * width - numel
    if missing:
        flat = torch.cat([flat, flat.new_zeros(*stack, missing)], dim=-1)
    rows = flat.view(*stack, plan.world_size, width)
    if plan.order is None:
        return rows
    if rank_at is None:
        rank_at = torch.tensor(plan.rank_at, dtype=torch.int64, device=flat.device)
    return rows[..., rank_at, :]


def shard_view(flat: Tensor, plan: Plan, degree: int) -> View:
    """Return a parameter's shards of a degree as one view of the whole: no copy, and no elements
    for the padding.

    Args:
        flat: ``[numel]`` in tree order; elements beyond its end read as zero. See
            :meth:`Layout.in_tree_order`.
        plan: gives the world size.
        degree: degree of the shards.

    Returns:
        ``N / degree`` rows of ``ceil(numel / N)`` for each tree position modulo ``degree``.
    """
    width = plan.shard_numel(flat.numel())
    return View(flat, plan.world_size // degree, width, degree * width, degree, width)


def all_gather(hierarchy: Hierarchy, message: Tensor) -> Handle[Tensor]:
    """All-gather one message per member.

    1. send ``message`` to the members of the outermost group, one in each node if there are two
       groups;
    2. if there is an inner group: in a second stage, all-gather the received messages inside the
       node.

    A single member sends nothing and returns the message itself.

    Args:
        hierarchy: the members.
        message: values or wire bytes, 1-D, contiguous, the same size on every member.

    Returns:
        ``[outer, inner, numel]`` on ``wait``, a view: the message of member ``m`` is at
        ``[m // inner, m % inner]``.
    """
    outer = hierarchy.groups[-1].gather_later(message)
    if len(hierarchy.groups) == 1:
        return outer.then(lambda received: received[None])
    inner = hierarchy.groups[0]

    def inside(received: Tensor) -> Handle[Tensor]:
        gathered = inner.gather_later(received)
        return gathered.then(lambda messages: messages.transpose(0, 1))

    return outer.then(inside)


def all_gather_views(
    hierarchy: Hierarchy,
    views: Sequence[View],
    spec: Format,
    message: Tensor | None = None,
    accumulate: bool = False,
    own: bool = False,
) -> Handle[None]:
    """All-gather the values of each member, and write them to the views where they belong.

    1. encode this rank's views into one message; gather;
    2. on ``wait``, decode every other member's message into its views.

    Args:
        hierarchy: the members.
        views: views of all members, in tree order.
        spec: the format.
        message: the message of this rank, if it is encoded already.
        accumulate: add the decoded values to those that the views have.
        own: also decode this rank's own message, so that all members have the same bits of a format
            that rounds.
    """
    if message is None:
        own_views = [view.member(hierarchy.index) for view in views]
        message = quantize(own_views, spec)

    without = -1 if own else hierarchy.index

    def finish(received: Tensor) -> None:
        dequantize(received, spec, views, accumulate=accumulate, without=without)

    return all_gather(hierarchy, message).then(finish)


def all_gather_rows(hierarchy: Hierarchy, rows: Tensor, chunk_numel: int = 1 << 26) -> None:
    """All-gather a degree-``lo`` shard in place from the degree-``hi`` rows of each member; blocks
    until done.

    Args:
        hierarchy: the members.
        rows: ``[N / lo, columns]``; on entry the rows ``j`` with ``j % size == index`` are valid,
            on return all are.
        chunk_numel: elements that one collective may carry.
    """
    if hierarchy.size == 1 or rows.numel() == 0:
        return
    width = max(1, chunk_numel // rows.shape[0])
    for begin in range(0, rows.shape[1], width):
        by_member = members(rows[:, begin : begin + width], hierarchy.size)
        # In pieces, so that no collective needs memory of the shard's size.
        own = by_member[hierarchy.index].contiguous()
        received = all_gather(hierarchy, own.view(-1)).wait()
        places = by_member.unflatten(0, received.shape[:2])
        places.copy_(received.unflatten(2, own.shape))


def reduce_scatter(
    hierarchy: Hierarchy,
    parts: Sequence[View],
    spec: Format,
    out: Sequence[View],
    factor: float = 1.0,
    accumulate: bool = False,
    backend: Sequence[bool] = (False, False),
) -> Handle[None]:
    """Sum over the members of ``hierarchy``; each member keeps its own part.

    1. encode the parts of each member into one message for it; each part begins a block;
    2. per group, the innermost first: one all-to-all sends each message to the member that
       represents its destination, where the messages for one destination are summed in tree order
       (FP32) and, if a group follows, encoded again;
    3. the last sums go into ``out``. Why not a library's: Note [Own reduce-scatter].

    Args:
        hierarchy: the members.
        parts: the values for each member, in tree order, to sum.
        spec: the format.
        out: receives this rank's sums; part by part as large as ``parts`` if blocks have scales.
        factor: multiplies the sums.
        accumulate: add the sums to the values of ``out``.
        backend: for each group, whether the backend sums in it, in the type of an unquantized
            ``spec`` and in the order of its ring; see ``Group.sums``.

    Returns:
        A handle with a stage for each group, the last of which writes the sums. A single member
        sums nothing, and does not quantize.
    """
    if hierarchy.size == 1:
        # One member: values only move to their place, and are added.
        exact = Cast("fp32")
        dequantize(quantize(parts, exact), exact, out, factor, accumulate)
        return Handle()
    out = at_blocks(out, spec.block_size)
    first = hierarchy.groups[0]
    outer = hierarchy.groups[-1]
    numel = total_numel(out)
    begin: Callable[[Tensor], Handle[Tensor]] = first.all_to_all_later
    last: Callable[[Tensor], Handle[Tensor]] = outer.all_to_all_later
    if any(backend):
        assert isinstance(spec, Cast)
        dtype = DTYPES[spec.dtype]
        begin = partial(first.sum_later, dtype=dtype) if backend[0] else begin
        last = partial(outer.sum_later, dtype=dtype) if backend[-1] else last
    nbytes = spec.nbytes(numel)
    send = _empty(first, hierarchy.size, nbytes, out[0].flat.device)
    quantize(at_blocks(parts, spec.block_size), spec, send.transpose(0, 1))
    if any(backend) and dtype == torch.float16 and factor != 1.0:
        # Sums of many gradients overflow FP16, so they are divided first, as DeepSpeed's are.
        send.view(torch.float16).mul_(factor)
        factor = 1.0

    def forward(received: Tensor) -> Handle[Tensor]:
        send = received.transpose(0, 1)
        if len(received) > 1:
            # The messages of one destination are summed before they leave for the next group.
            send = _empty(outer, received.shape[1], nbytes, received.device)
            requantize(received, spec, send.transpose(0, 1), numel)
        return last(send)

    def finish(received: Tensor) -> None:
        dequantize_reduce(received[:, 0], spec, out, factor, accumulate)

    # Two groups: the inner one first, so that each byte crosses nodes once.
    received = begin(send)
    if outer is not first:
        received = received.then(forward)
    return received.then(finish)


def _empty(group: Group, destinations: int, nbytes: int, device: torch.device) -> Tensor:
    """Allocate the messages of a group: ``[members, destinations that each represents, bytes]``."""
    shape = group.size, destinations // group.size, nbytes
    return torch.empty(shape, dtype=torch.uint8, device=device)


def as_bytes(x: Tensor) -> Tensor:
    """Return a tensor as uint8, 1-D and contiguous."""
    x = x.contiguous()
    if x.dtype == torch.uint8 and x.dim() == 1:
        return x
    return x.view(-1).view(torch.uint8)


@lru_cache(maxsize=64)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an order as an index tensor, cached on a device."""
    return torch.tensor(order, dtype=torch.int64, device=device)


def host_counts(counts: Sequence[int]) -> Tensor:
    """Return counts as an int64 tensor on the host."""
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def _regrouped(rows: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    """Reorder consecutive groups of rows; ``sizes`` are the rows of each group (int64, on the
    host).
    """
    lengths = sizes[order]
    # Where a group of rows begins in the old order, less where it begins in the new one.
    begins = (sizes.cumsum(0) - sizes)[order]
    shifts = begins - (lengths.cumsum(0) - lengths)
    counts = lengths.to(rows.device, non_blocking=True)
    shifts = shifts.to(rows.device, non_blocking=True)
    shifts = shifts.repeat_interleave(counts, output_size=len(rows))
    return rows[counted(len(rows), rows) + shifts]
