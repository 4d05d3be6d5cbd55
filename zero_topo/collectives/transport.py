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
from functools import lru_cache
from operator import itemgetter
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.meter import Key, Meter
from zero_topo.collectives.queue import Handle
from zero_topo.plan import Plan
from zero_topo.quant.operands import DTYPES, View, at_blocks, counted, total_numel
from zero_topo.quant.ops import dequantize, dequantize_reduce, quantize, requantize
from zero_topo.quant.spec import Cast, Format

Op = Literal["all_gather", "all_to_all", "reduce_scatter"]


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
        sums: whether "reduce_scatter" may be begun: the backend's own sends no more than needed.
        done: finished works that are kept alive, see Note [Works that are kept] in
            ``backends.py``.
        meter: counts the exchanges.
        phase: the phase under which they count, one of ``plan.PHASES``; only a group of
            :meth:`metered` has one.
    """

    phase: str
    _key: Key
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
        metered._key = phase, self.domain
        return metered

    def begin(self, op: Op, x: Tensor, *counts: Sequence[int]) -> Handle[Tensor]:
        """Begin an exchange, and count the bytes that this rank sends to the others.

        Args:
            op: "all_gather" sends ``x``, of one shape on all members, to each; the result is
                ``[size, *x.shape]``. "all_to_all" sends entry ``c`` of ``x [size, ...]`` to member
                ``c``; the result has the entries for this rank. "reduce_scatter" sums these, in the
                order of the backend's ring, into ``[1, ...]``; see :attr:`sums`.
            x: the values.
            counts: of values that are rows, in member order. "all_gather" takes the rows of each
                member, and returns all of them. "all_to_all" takes the rows for each member, and
                the rows from each, which it returns.
        """
        if self.size == 1:
            return Handle(x[None] if op == "all_gather" and not counts else x)
        if op == "all_gather":
            sent = (self.size - 1) * x.nbytes
        elif counts:
            sent = x.nbytes - x[: counts[0][self.index]].nbytes
        else:
            sent = (self.size - 1) * (x.nbytes // self.size)
        # Counted when it begins, whether or not it is waited for.
        if sent:
            self.meter.step[self._key] += sent
            self.meter.calls[self.phase] += 1
        exchange: Callable[..., Handle[Tensor]] = getattr(self, f"_{op}")
        return exchange(x, *counts)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather ``x`` and wait; see :meth:`begin`."""
        return self.begin("all_gather", x).wait()

    def all_to_all(self, table: Tensor) -> Tensor:
        """Run an all-to-all and wait; see :meth:`begin`."""
        return self.begin("all_to_all", table).wait()

    # -- torch's collectives, which another transport replaces (Note [Group order]) ----------------

    def _all_gather(self, x: Tensor, counts: Sequence[int] = ()) -> Handle[Tensor]:
        if counts:
            return self._all_gather_rows(x, counts)
        sent = x.contiguous()
        received = sent.new_empty(self.size, *x.shape)
        # torch 2.13 has renamed it, and warns at each call of the old name.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = all_gather(received, sent, group=self.group, async_op=True)
        handle = Handle(received, work.wait, (sent,))
        return handle if self.in_order else handle.then(self._by_member)

    def _all_to_all(
        self,
        x: Tensor,
        counts: Sequence[int] = (),
        expected: Sequence[int] = (),
    ) -> Handle[Tensor]:
        if counts:
            return self._all_to_all_rows(x, counts, expected)
        sent = x.contiguous() if self.in_order else self._in_order(x, self.members)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        handle = Handle(received, work.wait, (sent,))
        return handle if self.in_order else handle.then(self._by_member)

    def _reduce_scatter(self, x: Tensor) -> Handle[Tensor]:
        sent = x.contiguous() if self.in_order else self._in_order(x, self.members)
        received = sent.new_empty(1, *x.shape[1:])
        # Renamed too
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = reduce_scatter(received, sent, group=self.group, async_op=True)
        return Handle(received, work.wait, (sent,))

    def _by_member(self, received: Tensor) -> Tensor:
        """Return what was received in the order of the members."""
        return self._in_order(received, self.group_ranks)

    def _room(self, counts: Sequence[int], rows: Tensor) -> Tensor:
        """Allocate ``[sum(counts), ...]`` for rows like the given ones."""
        return rows.new_empty(sum(counts), *rows.shape[1:])

    def _in_order(self, table: Tensor, order: tuple[int, ...]) -> Tensor:
        """Return a copy with the entries in another order, which may be sent."""
        return table.index_select(0, _index(order, table.device))

    def _all_to_all_rows(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        expected: Sequence[int],
    ) -> Handle[Tensor]:
        """Send ``sizes[c]`` rows of ``[sum(sizes), ...]`` to each member ``c``:
        ``[sum(expected), ...]``.
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

    def _all_gather_rows(self, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
        """All-gather rows ``[sizes[index], ...]`` into ``[sum(sizes), ...]``."""
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
    outer = hierarchy.groups[-1].begin("all_gather", message[None])
    if len(hierarchy.groups) == 1:
        return outer
    inner = hierarchy.groups[0]

    def inside(received: Tensor) -> Handle[Tensor]:
        gathered = inner.begin("all_gather", received[:, 0])
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
    2. per group, the innermost first: one all-to-all to the members that represent destinations,
       which sum the messages of each in tree order (FP32), and encode the sum if a group follows;
    3. the last sums go into ``out``. Why not a library's: Note [Own reduce-scatter].

    Args:
        hierarchy: the members.
        parts: the values for each member, in tree order, to sum.
        spec: the format.
        out: receives this rank's sums; part by part as large as ``parts`` if blocks have scales.
        factor: multiplies the sums.
        accumulate: add the sums to the values of ``out``.
        backend: by group, whether the backend sums, in the order of its ring; see ``Group.sums``.

    Returns:
        A handle with a stage for each group; the last writes. A single member quantizes nothing.
    """
    if hierarchy.size == 1:  # values only move to their place, and are added
        exact = Cast("fp32")
        dequantize(quantize(parts, exact), exact, out, factor, accumulate)
        return Handle()
    out = at_blocks(out, spec.block_size)
    first = hierarchy.groups[0]
    outer = hierarchy.groups[-1]
    numel = total_numel(out)
    nbytes = spec.nbytes(numel)
    send = _empty(first, hierarchy.size, nbytes, out[0].flat.device)
    quantize(at_blocks(parts, spec.block_size), spec, send.transpose(0, 1))
    if any(backend) and spec == Cast("fp16") and factor != 1.0:
        # Sums of many gradients overflow FP16, so they are divided first, as DeepSpeed's are.
        send.view(torch.float16).mul_(factor)
        factor = 1.0

    def forward(received: Tensor) -> Handle[Tensor]:
        send = received.transpose(0, 1)
        if len(received) > 1:
            # The messages of one destination are summed before they leave for the next group.
            send = _empty(outer, received.shape[1], nbytes, received.device)
            requantize(received, spec, send.transpose(0, 1), numel)
        return _start(outer, backend[-1], spec, send)

    def finish(received: Tensor) -> None:
        dequantize_reduce(received, spec, out, factor, accumulate)

    # Two groups: the inner one first, so that each byte crosses nodes once.
    received = _start(first, backend[0], spec, send)
    if outer is not first:
        received = received.then(forward)
    return received.then(finish)


def _start(group: Group, adds: bool, spec: Format, send: Tensor) -> Handle[Tensor]:
    """Start a group's part of a reduce-scatter: one sum by the backend, or the messages to sum."""
    if not adds:
        return group.begin("all_to_all", send)
    assert isinstance(spec, Cast)
    # Of uint8 nothing can be summed.
    sums = group.begin("reduce_scatter", send.view(DTYPES[spec.dtype]))
    return sums.then(lambda values: values.view(torch.uint8))


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
