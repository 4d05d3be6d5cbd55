# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One rank of a pretended world whose peers all send what it sends to itself: sparse modes at any
number of peers.

In `fake_world` nothing comes, and a mode that goes on with what came would stop. Here what comes is
of the right size and in the right region, so that a mode makes all of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.harness import fake_world
from tests.ranks.sync_cases import mode_of
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import World
from zero_topo.collectives import backends
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.sync import selection


class Mirrored(Group):
    """Peers that send what this rank sends to itself."""

    def _all_gather(self, x: Tensor, counts: Sequence[int] = ()) -> Handle[Tensor]:
        if not counts:
            return Handle(torch.stack([x] * self.size))
        received = torch.cat([x] * self.size)
        assert len(received) == sum(counts)
        return Handle(received)

    def _all_to_all(
        self, x: Tensor, counts: Sequence[int] = (), expected: Sequence[int] = ()
    ) -> Handle[Tensor]:
        if not counts:
            return Handle(x[self.index].expand_as(x).contiguous())
        assert sum(counts) == len(x)
        begin = sum(counts[: self.index])
        own = x[begin : begin + counts[self.index]]
        # Where nothing stays here (a tree), a message of zeros comes: an element that is zero.
        zeros = self._room(expected, x).zero_()
        received = torch.cat([own] * self.size) if len(own) else zeros
        assert len(received) == sum(expected)
        return Handle(received)


@contextmanager
def mirrored(size: int) -> Iterator[None]:
    """This process is rank 0 of a world whose other ranks send what it sends; sums take the path of
    a GPU.
    """
    with (
        fake_world(size),
        patch.object(backends, "transport", lambda: Mirrored),
        patch.object(selection, "_on_cpu", lambda x: False),
    ):
        yield


def steps(w: World, count: int, around: Callable[[int], Any]) -> None:
    """Steps of rank 0; ``around(step)`` gives what is entered while the mode reduces, and again
    while it commits.
    """
    trainer = Trainer(w, 0)
    mode = mode_of(trainer.engine)
    entered: list[Any] = []

    def entering(call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any) -> Any:
            with entered[-1]():
                result = call(*args)
            if isinstance(result, Handle):
                wait = entering(result.wait)
                return Handle().then(lambda _: wait())
            return result

        return within

    for name in ("start", "commit"):
        setattr(mode, name, entering(getattr(mode, name)))
    for step in range(count):
        entered.append(around(step))
        trainer.update(trainer.sync(step), lambda group: 0.02)
        trainer.engine.end_step(skipped=False)
