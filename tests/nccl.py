# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""NCCL's rules for ranks that are threads: what gloo and the threads' own group forgive, and a GPU
would not.

What is stored
    On each communicator all ranks make the same calls in the same order: operation, type, sizes.
    Nothing goes point to point. Buffers are contiguous, of types that NCCL knows. What is received
    is garbage until the work is waited for, what is sent must not change until then, and every work
    is waited for. A call meets those of the other ranks when it is made, as kernels do that fill a
    device: communicators in another order on another rank are a hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives import transport

KNOWN = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)


class RuleError(Exception):
    """What NCCL would answer with a hang or garbage."""


class _Work:
    """A collective under way: its result is there once it has been waited for."""

    def __init__(self, rules: Rules, what: str, sent: Tensor, received: Tensor) -> None:
        self._rules, self._what = rules, what
        self._sent, self._received = sent, received
        self._copy, self.result = sent.clone(), torch.empty_like(received)
        received.view(-1).view(torch.uint8).fill_(255)  # NaN, or a large number

    def wait(self) -> None:
        """Deliver."""
        if not torch.equal(
            self._copy.view(-1).view(torch.uint8), self._sent.view(-1).view(torch.uint8)
        ):
            raise RuleError(f"what {self._what} sends was changed before it was waited for")
        self._received.copy_(self.result)
        self._rules.open.pop(id(self), None)


class Rules:
    """In place of ``torch.distributed`` in ``collectives/transport.py``.

    Attributes:
        open: collectives that nobody has waited for.
        calls: by communicator and place in its order: what the first rank that came said.
    """

    def __init__(self) -> None:
        self.open: dict[int, tuple[str, _Work]] = {}
        self.calls: dict[tuple[tuple[int, ...], int], str] = {}
        self._count: dict[tuple[int, tuple[int, ...]], int] = {}
        self._splits: dict[tuple[tuple[int, ...], int, int, int], int] = {}

    def get_backend(self, group: Any = None) -> str:
        """As on a GPU."""
        return "nccl"

    def isend(self, *args: Any, **kwargs: Any) -> None:
        """Not where a collective is meant."""
        raise RuleError("a message from point to point")

    irecv = isend

    def all_gather_into_tensor(
        self, received: Tensor, sent: Tensor, group: Any, async_op: bool
    ) -> _Work:
        """See torch."""
        assert async_op
        if received.numel() != sent.numel() * dist.get_world_size(group):
            raise RuleError(f"an all-gather of {sent.numel()} elements into {received.numel()}")
        work = self._begin("all-gather", f"{sent.numel()}", sent, received, group)
        dist.all_gather_into_tensor(work.result, sent, group=group)
        return work

    def all_to_all_single(
        self,
        received: Tensor,
        sent: Tensor,
        expected: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        *,
        group: Any,
        async_op: bool,
    ) -> _Work:
        """See torch."""
        assert async_op
        even = expected is None or sizes is None
        work = self._begin(
            "all-to-all", f"{sent.numel()}" if even else "uneven", sent, received, group
        )
        if expected is not None and sizes is not None:
            self._check_splits(sizes, expected, group)
        dist.all_to_all_single(work.result, sent, expected, sizes, group=group)
        return work

    def reduce_scatter_tensor(
        self, received: Tensor, sent: Tensor, group: Any, async_op: bool
    ) -> _Work:
        """See torch; added in the order of the group's ranks."""
        assert async_op
        if sent.numel() != received.numel() * dist.get_world_size(group):
            raise RuleError(f"a reduce-scatter of {sent.numel()} elements into {received.numel()}")
        work = self._begin("reduce-scatter", f"{sent.numel()}", sent, received, group)
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts, sent, group=group)
        work.result.copy_(parts.view(-1, *received.shape[1:]).sum(0, keepdim=True))
        return work

    all_gather_single = all_gather_into_tensor
    reduce_scatter_single = reduce_scatter_tensor

    def all_to_all(
        self, places: Sequence[Tensor], parts: Sequence[Tensor], group: Any, async_op: bool
    ) -> _Work:
        """See torch; all parts are the same memory, and the places lie one behind the other in the
        order of members.
        """
        assert async_op and len({part.data_ptr() for part in parts}) == 1
        first = min(places, key=lambda place: int(place.storage_offset()))
        received = first.as_strided((sum(map(len, places)), first.shape[1]), first.stride())
        work = self._begin("all-to-all", "uneven", parts[0], received, group)
        self._check_splits([len(part) for part in parts], [len(place) for place in places], group)
        begins = [
            int(place.storage_offset() - first.storage_offset()) // max(1, place.shape[1])
            for place in places
        ]
        into = [
            work.result[begin : begin + len(place)]
            for begin, place in zip(begins, places, strict=True)
        ]
        dist.all_to_all(into, list(parts), group=group)
        return work

    def _begin(self, name: str, size: str, sent: Tensor, received: Tensor, group: Any) -> _Work:
        what = f"{name} of {size} x {sent.dtype}"
        if not (sent.is_contiguous() and received.is_contiguous()):
            raise RuleError(f"{what}: strides {sent.stride()} and {received.stride()}")
        if sent.dtype not in KNOWN or received.dtype != sent.dtype:
            raise RuleError(f"{what} into {received.dtype}")
        ranks, number = self._next(group)
        first = self.calls.setdefault((ranks, number), what)
        if first != what:
            raise RuleError(f"call {number} on ranks {ranks}: one says {first}, another {what}")
        work = _Work(self, what, sent, received)
        self.open[id(work)] = what, work
        return work

    def _next(self, group: Any) -> tuple[tuple[int, ...], int]:
        """The communicator, and the place of this rank's call in its order."""
        ranks = tuple(dist.get_process_group_ranks(group))
        number = self._count[get_ident(), ranks] = self._count.get((get_ident(), ranks), 0) + 1
        return ranks, number

    def _check_splits(self, sizes: Sequence[int], expected: Sequence[int], group: Any) -> None:
        """What one rank says that it sends is what the other expects."""
        ranks, me = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
        number = self._count[get_ident(), ranks]
        for other, (out, come) in enumerate(zip(sizes, expected, strict=True)):
            for source, target, rows in ((me, other, out), (other, me, come)):
                if self._splits.setdefault((ranks, number, source, target), rows) != rows:
                    raise RuleError(
                        f"call {number} on ranks {ranks}: {source} and {target} disagree about "
                        f"{rows} rows"
                    )


@contextmanager
def nccl_rules() -> Iterator[Rules]:
    """Raises RuleError where an exchange within it breaks the rules, and at its end if one was not
    waited for.
    """
    rules = Rules()
    with patch.object(transport, "dist", rules):
        yield rules
    if rules.open:
        raise RuleError(f"never waited for: {sorted({what for what, _ in rules.open.values()})}")
