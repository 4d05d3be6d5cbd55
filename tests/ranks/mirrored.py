# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One rank of a pretended world whose peers all send what it sends to itself: sparse modes at any number of peers.

In `fake_world` nothing comes, and a mode that goes on with what came would stop. Here what comes is of the right size
and in the right region, so that a mode makes all of its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import fake_world
from tests.ranks.test_sparse_modes import mode_of
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import World
from zero_topo.collectives import transport
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.quant import ops
from zero_topo.sync import picks

_VIEWS = (
    "view as_strided slice select split detach _unsafe_view transpose t permute unsqueeze expand alias unbind squeeze "
    "split_with_sizes narrow view_as unflatten empty empty_strided new_empty empty_like new_empty_strided lift_fresh "
    "_local_scalar_dense"
)
VIEWS = frozenset(_VIEWS.split())
"""Operators that queue nothing on a device."""
WAITS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive"})
"""Operators for which the host waits."""


class Mirrored(Group):
    """Peers that send what this rank sends to itself."""

    def _all_gather(self, message: Tensor) -> Handle[Tensor]:
        received = message.expand(self.size, -1).contiguous()
        return Handle(None, (), lambda: received)

    def _all_to_all(self, table: Tensor) -> Handle[Tensor]:
        received = table[self.index].expand_as(table).contiguous()
        return Handle(None, (), lambda: received)

    def _all_to_all_uneven(self, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Handle[Tensor]:
        assert sum(sizes) == len(rows)
        begin = sum(sizes[: self.index])
        own = rows[begin : begin + sizes[self.index]]
        # Where nothing stays here (a tree), a message of zeros comes: an element that is zero.
        received = own.repeat(self.size, 1) if len(own) else rows.new_zeros(sum(expected), rows.shape[1])
        assert len(received) == sum(expected)
        return Handle(None, (), lambda: received)

    def _all_gather_uneven(self, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
        received = rows.repeat(self.size, 1)
        assert len(received) == sum(sizes)
        return Handle(None, (), lambda: received)


@contextmanager
def mirrored(size: int) -> Iterator[None]:
    """This process is rank 0 of a world whose other ranks send what it sends; sums take the path of a GPU."""
    with (
        fake_world(size),
        patch.object(transport, "transport", lambda: Mirrored),
        patch.object(picks, "_on_cpu", lambda x: False),
    ):
        yield


class Queued(TorchDispatchMode):
    """Counts what is queued on a device, and how often the host waits for it.

    Attributes:
        calls: operators that are no views, by name, and calls of kernels.
        waits: by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS and func.namespace == "aten":
            self.calls[name] += 1
        by_mask = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in WAITS or by_mask or unsized:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Also lists made of tensors, and calls of the kernels."""

        def counted(owner: Any, name: str, counter: Counter[str]) -> Any:
            call = getattr(owner, name)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                counter[name] += 1
                return call(*args, **kwargs)

            return patch.object(owner, name, wrapped)

        with self, counted(Tensor, "tolist", self.waits), counted(ops, "sketch", self.calls):
            yield


def steps(w: World, count: int, around: Callable[[int], Any]) -> None:
    """Steps of rank 0; ``around(step)`` gives what is entered while the mode reduces, and again while it commits."""
    trainer = Trainer(w, 0)
    mode = mode_of(trainer.engine)
    entered: list[Any] = []

    def entering(call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any) -> Any:
            with entered[-1]():
                result = call(*args)
            return Handle(None, (), entering(result.wait)) if isinstance(result, Handle) else result

        return within

    for name in ("start", "commit"):
        setattr(mode, name, entering(getattr(mode, name)))
    for step in range(count):
        entered.append(around(step))
        trainer.update(trainer.sync(step), lambda group: 0.02)
        trainer.engine.end_step(skipped=False)
