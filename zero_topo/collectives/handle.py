# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A collective under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Work(Protocol):
    """What torch returns for an asynchronous collective."""

    def wait(self) -> object:
        """Block (CPU) or make the current stream wait (GPU) until the collective has finished."""


class Handle(Generic[T]):
    """Owns the buffers of a collective until it is waited for, then finishes it once.

    Args:
        work: torch's work object, or None if nothing had to move.
        buffers: tensors the collective reads or writes; kept alive until :meth:`wait`.
        finish: what turns the received buffers into the result; runs once, in the first :meth:`wait`.
    """

    def __init__(self, work: Work | None, buffers: tuple[object, ...], finish: Callable[[], T]) -> None:
        self._work = work
        self._buffers = buffers
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def then(self, finish: Callable[[T], U]) -> Handle[U]:
        """A handle whose result is that of a function of this one's."""
        return Handle(None, (), lambda: finish(self.wait()))

    def wait(self) -> T:
        """The result; the second and later calls return it again."""
        if self._finish is not None:
            if self._work is not None:
                self._work.wait()
            finish, self._finish = self._finish, None
            self._result = finish()
            self._buffers, self._work = (), None
        return self._result
