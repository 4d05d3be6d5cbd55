# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a rank says to the benchmark that started it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any


class Control:
    """A rank's line to its benchmark. That of rank 0 alone leads there: the others' words go
    nowhere.

    Args:
        line: owned by this object; None on the other ranks.
    """

    def __init__(self, line: Connection | None) -> None:
        self._line = line

    def send(self, message: Mapping[str, Any]) -> None:
        """Say something; does not wait for anything."""
        if self._line is not None:
            self._line.send(message)

    def ask(self, message: Mapping[str, Any]) -> Any:
        """Say something and wait for the answer; None on the other ranks.

        Raises:
            ConnectionError: if the benchmark has hung up.
        """
        self.send(message)
        try:
            return None if self._line is None else self._line.recv()
        except EOFError:
            raise ConnectionError("the benchmark that started this rank is gone") from None

    def send_results(
        self, jobs: Iterable[dict[str, Any]], measure: Callable[[dict[str, Any]], Mapping[str, Any]]
    ) -> None:
        """Measure one job after the other and send what comes of each, as ``Ranks.results`` takes
        it.

        A job that is refused ends this, on every rank alike: by its block or its config.
        """
        for job in jobs:
            try:
                result = measure(job)
            except ValueError as error:
                return self.send({"event": "refused", "reason": str(error)})
            self.send({"event": "measured", **result})
