# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Messages from point to point: when what gloo has done is let go of."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, patch
from weakref import WeakSet

import torch

from zero_topo.collectives.backends import KEPT, Gloo
from zero_topo.collectives.meter import Meter


class Done:
    """A work of gloo that has ended."""

    def wait(self) -> None:
        """At once."""


def alive_after(group: Gloo, nbytes: int) -> int:
    """How many works are left of an exchange whose messages have so many bytes in all, once it has
    been waited for.
    """
    made: WeakSet[Done] = WeakSet()

    def message(*_: Any, **__: Any) -> Done:
        work = Done()
        made.add(work)
        return work

    with patch("zero_topo.collectives.backends.dist", MagicMock(isend=message, irecv=message)):
        group._all_gather(torch.zeros(nbytes // (2 * (group.size - 1)), dtype=torch.uint8)).wait()
    return len(made)


def test_short_works_are_kept_until_a_later_exchange() -> None:
    """Whoever destroys one at once waits for gloo's thread, which may take a scheduler's tick."""
    group = Gloo(1, 3, 0, (0, 1, 2), "world", None, Meter())
    assert alive_after(group, 400) == 4
    kept = list(group.done)
    assert alive_after(group, 400) == 4 and not set(kept) & set(group.done), (
        "those of the last one take their place"
    )


def test_works_with_long_messages_are_let_go() -> None:
    """They hold the messages, which is memory that no formula has."""
    group = Gloo(1, 2, 0, (0, 1), "world", None, Meter())
    assert alive_after(group, KEPT) == 2
    assert alive_after(group, KEPT + 2) == 0
