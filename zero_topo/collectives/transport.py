# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The process groups through which a rank exchanges messages, and the hierarchical routes made of them.

Members are counted in tree order. All calls are collective: every member makes the same ones in the same order. What is
sent must not change until its handle has been waited for. The mesh chooses the class of each group once.

Note [Point to point on gloo]
    gloo sends its collectives in rounds: with two ranks an all-to-all reaches half of a link's rate, an all-gather a
    little more, and its reduce-scatter sends every byte twice. There, whole messages go by ``isend`` and ``irecv``
    instead, all at once. Other backends use their own collectives.

Note [Group order]
    Backends count a group's members by global rank (``Group.slots``). Where that is not the tree's order, what a
    collective sends and receives is reordered by one copy on the device, by an index that stays there; messages from
    point to point need none.

Note [Works that are kept]
    Who destroys a work of gloo spins until gloo's thread has let go of it. Where ranks have no two cores each that may
    wait for the scheduler: among four ranks on two cores a byte took 2.9 ms, and takes 1.3 where works that are done
    are kept until a later exchange of the same group is waited for. They hold their messages: long ones go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted, Exchange

KEPT = 1 << 22  # bytes


class Group:
    """This rank's process group of one hop (see Note [Hops] in ``plan.py``); a subclass says how it exchanges messages.

    Attributes:
        lo: degree of the larger shard.
        hi: degree of the smaller shard.
        size: number of members.
        index: this rank's place among the members, in tree order.
        slots: ``slots[c]`` is the group rank of member ``c``: torch sorts a group by global rank, the tree may not.
        members: the member that each group rank is.
        domain: smallest domain that holds the group.
        group: the process group; None for a group of one.
        done: works that an exchange has waited for, see Note [Works that are kept].
        counted: meter and phase of a group that :meth:`metered` returned.
    """

    def __init__(
        self, lo: int, hi: int, index: int, slots: tuple[int, ...], domain: str, group: dist.ProcessGroup | None
    ) -> None:
        self.lo, self.hi, self.size, self.index = lo, hi, hi // lo, index
        self.slots, self.domain, self.group = slots, domain, group
        self.members = tuple(sorted(range(len(slots)), key=slots.__getitem__))
        self.in_order = slots == tuple(range(len(slots)))
        self.done: list[dist.Work] = []
        self.counted: Counted
        self._metered: dict[Counted, Self] = {}

    def metered(self, counted: Counted) -> Self:
        """This group with its exchanges counted by a meter and a phase; made once for each."""
        if counted not in self._metered:
            made = self._metered[counted] = copy(self)
            made.counted = counted
        return self._metered[counted]

    def gather_later(self, x: Tensor) -> Handle[Tensor]:
        """``x``, of one shape on all members, from each: ``[size, *x.shape]``."""
        if self.size == 1:
            return Handle(None, (), lambda: x[None])
        shape = self.size, *x.shape
        came = self._begin("all_gather", (self.size - 1) * x.nbytes, True, self._all_gather, as_bytes(x))
        return came if x.dtype == torch.uint8 and x.dim() == 1 else came.then(lambda b: b.view(x.dtype).view(shape))

    def gather(self, x: Tensor) -> Tensor:
        """As :meth:`gather_later`, waited for."""
        return self.gather_later(x).wait()

    def scatter_later(self, table: Tensor) -> Handle[Tensor]:
        """Entry ``c`` of ``table`` goes to member ``c``; what each member sent here.

        Args:
            table: ``[size, ...]``, contiguous, of one shape on all members.
        """
        if self.size == 1:
            return Handle(None, (), lambda: table)
        nbytes = (self.size - 1) * (table.nbytes // self.size)
        return self._begin("all_to_all", nbytes, True, self._all_to_all, table)

    def scatter(self, table: Tensor) -> Tensor:
        """As :meth:`scatter_later`, of any type, waited for."""
        came = self.scatter_later(as_bytes(table).view(self.size, -1)).wait()
        return came.view(-1).view(table.dtype).view(table.shape)

    def gather_known(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """``rows`` (``[sizes[index], ...]``) of each, where all members know how many: ``[sum(sizes), ...]``."""
        return self._uneven(rows, (self.size - 1) * rows.nbytes, self._all_gather_uneven, sizes)

    def scatter_known(self, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Tensor:
        """The next ``sizes[c]`` rows go to member ``c``; what each member sent here, one after the other.

        Args:
            rows: ``[sum(sizes), ...]``, contiguous.
            sizes: on the host.
            expected: rows that come from each member, who say the same.
        """
        nbytes = (len(rows) - sizes[self.index]) * rows.shape[1:].numel() * rows.itemsize
        return self._uneven(rows, nbytes, self._all_to_all_uneven, sizes, expected)

    def _uneven(self, rows: Tensor, nbytes: int, begin: Any, *sizes: Sequence[int]) -> Tensor:
        """What comes, as rows like those given."""
        if self.size == 1:
            return rows
        table = rows.view(torch.uint8).view(len(rows), rows.shape[1:].numel() * rows.itemsize)
        came = self._begin("all_to_all", nbytes, False, begin, table, *sizes).wait()
        return came.view(-1).view(rows.dtype).view(len(came), *rows.shape[1:])

    def _begin(
        self,
        op: Literal["all_gather", "all_to_all"],
        nbytes: int,
        even: bool,
        begin: Callable[..., Handle[Tensor]],
        *arguments: Any,
    ) -> Handle[Tensor]:
        meter, phase = self.counted.meter, self.counted.phase
        return meter.exchange(Exchange(op, phase, self.domain, self.size, nbytes, even), begin, *arguments)

    # -- what a transport implements -------------------------------------------------------------------------------

    def _all_gather(self, message: Tensor) -> Handle[Tensor]:
        """``message`` (1-D, contiguous, as long on every member) to every member: ``[size, numel]``."""
        raise NotImplementedError

    def _all_to_all(self, table: Tensor) -> Handle[Tensor]:
        """Entry ``c`` of ``table`` (``[size, ...]``, contiguous) to member ``c``; what came, in the same shape."""
        raise NotImplementedError

    def _all_to_all_uneven(self, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Handle[Tensor]:
        """The next ``sizes[c]`` rows of uint8 ``[sum(sizes), width]`` to member ``c``: ``[sum(expected), width]``."""
        raise NotImplementedError

    def _all_gather_uneven(self, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
        """Rows of uint8 ``[sizes[index], width]`` to every member: ``[sum(sizes), width]``."""
        return self._all_to_all_uneven(rows.repeat(self.size, 1), [len(rows)] * self.size, sizes)


class Torch(Group):
    """Exchanges by the collectives of torch's backend; Note [Group order]."""

    def _all_gather(self, message: Tensor) -> Handle[Tensor]:
        received = message.new_empty(self.size, message.numel())
        work = dist.all_gather_into_tensor(received.view(-1), message, group=self.group, async_op=True)
        return self._ended(work, message, received)

    def _all_to_all(self, table: Tensor) -> Handle[Tensor]:
        send = table if self.in_order else table[_index(self.members, table.device)]
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=self.group, async_op=True)
        return self._ended(work, send, received)

    def _ended(self, work: dist.Work, sent: Tensor, received: Tensor) -> Handle[Tensor]:
        """On ``wait``, what came in the order of the members."""
        in_order = self.in_order
        return Handle(work, (sent,), lambda: received if in_order else received[_index(self.slots, received.device)])

    def _all_to_all_uneven(self, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Handle[Tensor]:
        received = rows.new_empty(sum(expected), rows.shape[1])
        if self.in_order:
            work = dist.all_to_all_single(received, rows, list(expected), list(sizes), group=self.group, async_op=True)
            return Handle(work, (rows,), lambda: received)
        cpu = torch.device("cpu")
        members, lengths = _index(self.members, cpu), torch.tensor(sizes)
        due, send = torch.tensor(expected)[members], _regrouped(rows, lengths, members)
        lists = due.tolist(), lengths[members].tolist()
        work = dist.all_to_all_single(received, send, *lists, group=self.group, async_op=True)
        return Handle(work, (send,), lambda: _regrouped(received, due, _index(self.slots, cpu)))


class Gloo(Group):
    """Exchanges from point to point; see the notes of this module."""

    def _all_gather(self, message: Tensor) -> Handle[Tensor]:
        received = message.new_empty(self.size, message.numel())
        return self._swap([message] * self.size, received, received)

    def _all_to_all(self, table: Tensor) -> Handle[Tensor]:
        received = torch.empty_like(table)
        return self._swap(table, received, received)

    def _all_to_all_uneven(self, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Handle[Tensor]:
        received = rows.new_empty(sum(expected), rows.shape[1])
        return self._swap(rows.split(list(sizes)), received.split(list(expected)), received)

    def _all_gather_uneven(self, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
        received = rows.new_empty(sum(sizes), rows.shape[1])
        return self._swap([rows] * self.size, received.split(list(sizes)), received)

    def _swap(
        self, parts: Sequence[Tensor] | Tensor, places: Sequence[Tensor] | Tensor, received: Tensor
    ) -> Handle[Tensor]:
        """Send a part to each other member and receive one from each; nearest neighbours in the ring first.

        Empty messages are not sent.
        """
        members, size, own = self.members, self.size, self.slots[self.index]
        places[self.index].copy_(parts[self.index])
        works: list[dist.Work | None] = []
        nbytes = 0
        for distance in range(1, size):
            source, target = (own - distance) % size, (own + distance) % size
            if (place := places[members[source]]).numel():
                nbytes += place.nbytes
                works.append(dist.irecv(place, group=self.group, group_src=source))
            if (part := parts[members[target]]).numel():
                nbytes += part.nbytes
                works.append(dist.isend(part, group=self.group, group_dst=target))
        done = self.done if nbytes <= KEPT else []
        return Handle(Works([work for work in works if work is not None], done), (parts, received), lambda: received)


class Works:
    """Several works as one, which takes the place of another when it is done; Note [Works that are kept]."""

    def __init__(self, works: Sequence[dist.Work], done: list[dist.Work]) -> None:
        self._works, self._done = works, done

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._done[:], self._works = self._works, ()


class Mpi(Group):
    """Exchanges over MPI, by way of the host: the same bits, another way.

    For machines whose MPI knows the network better than torch's backends do, and for a job that ``mpirun`` or ``srun``
    started.

    Args:
        like: the group.
        comm: of MPI, its members in tree order.
    """

    def __init__(self, like: Group, comm: Any) -> None:
        super().__init__(like.lo, like.hi, like.index, like.slots, like.domain, like.group)
        self._comm = comm

    def _all_gather(self, message: Tensor) -> Handle[Tensor]:
        sent, received = message.cpu(), torch.empty(self.size, message.numel(), dtype=message.dtype)
        work = _Request(self._comm.Iallgather(_buffer(sent), _buffer(received)))
        return Handle(work, (sent,), lambda: received.to(message.device))

    def _all_to_all(self, table: Tensor) -> Handle[Tensor]:
        sent, received = table.cpu(), torch.empty_like(table, device="cpu")
        work = _Request(self._comm.Ialltoall(_buffer(sent), _buffer(received)))
        return Handle(work, (sent,), lambda: received.to(table.device))

    def _all_to_all_uneven(self, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Handle[Tensor]:
        """Blocks."""
        received, width = torch.empty(sum(expected), rows.shape[1], dtype=rows.dtype), rows.shape[1]
        lengths, due = (width * torch.tensor(counts, dtype=torch.int64).numpy() for counts in (sizes, expected))
        self._comm.Alltoallv([rows.cpu().numpy(), lengths], [received.numpy(), due])
        return Handle(None, (), lambda: received.to(rows.device))

    def _all_gather_uneven(self, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
        """Blocks."""
        received, width = torch.empty(sum(sizes), rows.shape[1], dtype=rows.dtype), rows.shape[1]
        self._comm.Allgatherv(rows.cpu().numpy(), [received.numpy(), width * torch.tensor(sizes).numpy()])
        return Handle(None, (), lambda: received.to(rows.device))


class _Request:
    """A request of MPI as the work of a handle."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()


def transport() -> type[Group]:
    """How groups of the world's backend exchange messages."""
    return Gloo if dist.get_backend() == "gloo" else Torch


@dataclass(frozen=True)
class Route:
    """This rank's way through a hop ``(lo, hi)`` (see Note [Routes] in ``plan.py``).

    Attributes:
        hops: innermost first, ``(lo, a), (a, hi)``, or ``(lo, hi)`` alone.
        lo: degree of the larger shard.
        hi: degree of the smaller shard.
        size: number of members.
        index: this rank's place among the members, in tree order.
    """

    hops: tuple[Group, ...]
    lo: int = field(init=False)
    hi: int = field(init=False)
    size: int = field(init=False)
    index: int = field(init=False)

    def __post_init__(self) -> None:
        lo, hi, index, step = self.hops[0].lo, self.hops[-1].hi, 0, 1
        for hop in self.hops:
            index, step = index + step * hop.index, step * hop.size
        self.__dict__.update(lo=lo, hi=hi, size=hi // lo, index=index)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor as uint8, 1-D."""
    return x.contiguous().view(-1).view(torch.uint8)


def _buffer(x: Tensor) -> Any:
    """What mpi4py takes, of any dtype."""
    return x.view(torch.uint8).numpy()


@lru_cache(maxsize=64)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    """An order as an index that stays on a device."""
    return torch.tensor(order, device=device)


def _regrouped(rows: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    """Consecutive groups of rows in another order; ``sizes`` are the rows of each (int64, on the host)."""
    lengths, begins = sizes[order], (sizes.cumsum(0) - sizes)[order]
    shifts, counts = begins - (lengths.cumsum(0) - lengths), lengths.to(rows.device, non_blocking=True)
    shifts = shifts.to(rows.device, non_blocking=True).repeat_interleave(counts, output_size=rows.shape[0])
    return rows[torch.arange(rows.shape[0], device=rows.device) + shifts]
