# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a benchmark and its rank 0 say to each other: one JSON object a line, over a pair of sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any


class Control:
    """One end of the conversation.

    Args:
        end: a connected stream socket; owned by this object.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lines = end.makefile("r", encoding="utf-8")

    def send(self, message: Mapping[str, Any]) -> None:
        """Say something; does not wait for anything."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """What the other end says next, or None if it has hung up.

        Raises:
            TimeoutError: if it says nothing for so long. The conversation is over then.
        """
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            return None
        return dict(json.loads(line)) if line else None

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Say something and wait for the answer.

        Raises:
            ConnectionError: if the other end has hung up.
        """
        self.send(message)
        answer = self.receive()
        if answer is None:
            raise ConnectionError("the benchmark that started this rank is gone")
        return answer

    def close(self) -> None:
        """Hang up."""
        self._lines.close()
        self._socket.close()
