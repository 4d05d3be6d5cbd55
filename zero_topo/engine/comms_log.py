# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What zero_topo's exchanges look like in DeepSpeed's comms logger.

DeepSpeed times its own collectives only, and takes every group for the world. Here each exchange gets a record with
DeepSpeed's definitions (nccl-tests' PERFORMANCE.md) and its own group's size. Like DeepSpeed's, timed exchanges block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from zero_topo.collectives.meter import Exchange
from zero_topo.units import GB, format_bytes

NAMES = {"all_gather": "all_gather_into_tensor", "all_to_all": "all_to_all_single"}
"""DeepSpeed's names of the operations, by which ``prof_ops`` may choose."""


class Row(NamedTuple):
    """One record of DeepSpeed's comms logger.

    Attributes:
        name: under which it is summed up: operation, phase and domain.
        size: bytes of the tensor that was passed, as DeepSpeed counts them; 0 if each member's differs, for DeepSpeed
            compares stragglers by size, which all ranks must have in common.
        milliseconds: from call to completion.
        algorithm: gigabits per second of the whole result.
        bus: gigabits per second that this rank sent.
    """

    name: str
    size: int
    milliseconds: float
    algorithm: float
    bus: float


def row(exchange: Exchange, seconds: float) -> Row:
    """The record of an exchange.

    Args:
        exchange: in a group of at least two.
        seconds: how long it took.
    """
    others, sent = exchange.members - 1, exchange.nbytes
    whole = sent * exchange.members // others
    size = sent // others if exchange.op == "all_gather" else whole
    algorithm, bus = (8 * nbytes / GB / max(seconds, 1e-9) for nbytes in (whole, sent))
    name = f"{NAMES[exchange.op]} | zero_topo {exchange.phase} | {exchange.domain}"
    return Row(name, size if exchange.even else 0, 1e3 * seconds, algorithm, bus)


class CommsLog:
    """A meter's listener that tells DeepSpeed's comms logger.

    Args:
        logger: DeepSpeed's; its switches may be turned at any time.
        log: DeepSpeed's, of a line and the ranks that write it.
    """

    def __init__(self, logger: Any, log: Callable[..., None]) -> None:
        self._logger = logger
        self._log = log

    def listens(self, exchange: Exchange) -> bool:
        """What the logger's ``enabled``, ``prof_all`` and ``prof_ops`` say."""
        logger = self._logger
        return bool(logger.enabled and (logger.prof_all or NAMES[exchange.op] in logger.prof_ops))

    @contextmanager
    def timing(self, exchange: Exchange) -> Iterator[None]:
        """Add a record of what happens inside; on an accelerator without what was queued before."""
        _synchronize()
        began = time.perf_counter()
        yield
        _synchronize()
        self._add(row(exchange, time.perf_counter() - began))

    def _add(self, row: Row) -> None:
        sizes = self._logger.comms_dict.setdefault(row.name, {})
        entry = sizes.setdefault(row.size, [0, [], [], []])
        entry[0] += 1
        for values, value in zip(entry[1:], row[2:], strict=True):
            values.append(value)
        if self._logger.verbose:
            self._log(
                f"comm op: {row.name} | time (ms): {row.milliseconds:.2f} | msg size: {format_bytes(row.size)} | "
                f"algbw (Gbps): {row.algorithm:.2f} | busbw (Gbps): {row.bus:.2f}",
                ranks=[0],
            )


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
