# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reports zero_topo's traffic and times through DeepSpeed: monitors, ``wall_clock_breakdown``, the
comms logger.

After every optimizer step rank 0 writes events about its own work to the monitors that the
DeepSpeed config enables (TensorBoard, W&B, Comet, CSV), at the sample count that DeepSpeed's own
events have.

DeepSpeed's comms logger times only DeepSpeed's collectives, and assumes that every group is the
world. Here each exchange gets a record with DeepSpeed's definitions (nccl-tests' PERFORMANCE.md)
and the size of its own group. Like DeepSpeed's, timed exchanges block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from zero_topo.collectives.transport import Group
from zero_topo.plan import PHASES
from zero_topo.units import GB, format_bytes

Event = tuple[str, float, int]


def step_events(
    sent: Mapping[tuple[str, str], int],
    seconds: Mapping[str, float],
    report: Mapping[str, float],
    peak_bytes: int,
    samples: int,
) -> list[Event]:
    """Return the monitor's events of one optimizer step.

    Args:
        sent: (phase, domain) -> bytes.
        seconds: phase -> seconds of the host.
        report: the report of the mode of sync: densities, norms, counts.
        peak_bytes: the peak of this rank's memory.
        samples: the step's position on the monitor's axis.

    Returns:
        ``zero_topo/bytes_<domain>``, ``zero_topo/ms_<phase>``, ``zero_topo/sync_<name>`` and
        ``zero_topo/peak_bytes``.
    """
    domains: dict[str, int] = {}
    for (_, domain), nbytes in sent.items():
        domains[domain] = domains.get(domain, 0) + nbytes
    values = {f"bytes_{domain}": float(nbytes) for domain, nbytes in domains.items()}
    values |= {f"ms_{phase}": 1e3 * value for phase, value in seconds.items()}
    values |= {f"sync_{name}": value for name, value in report.items()}
    values["peak_bytes"] = float(peak_bytes)
    return [(f"zero_topo/{name}", value, samples) for name, value in sorted(values.items())]


def breakdown(seconds: Mapping[str, float]) -> str:
    """Return one line with the host's time in each phase, in the order of a step."""
    parts = (f"{phase} {1e3 * seconds[phase]:.2f} ms" for phase in PHASES if phase in seconds)
    return f"zero_topo: {', '.join(parts) or 'nothing metered'}"


NAMES = {
    "all_gather": "all_gather_into_tensor",
    "all_to_all": "all_to_all_single",
    "reduce_scatter": "reduce_scatter_tensor",
}
"""Operation -> DeepSpeed's name of it, which ``prof_ops`` may list."""


def record(
    group: Group, op: str, nbytes: int, even: bool, seconds: float
) -> tuple[str, int, tuple[float, ...]]:
    """Return DeepSpeed's record of an exchange.

    Args:
        group: the group of at least two ranks, metered.
        op: a key of :data:`NAMES`.
        nbytes: bytes that this rank sent to the others.
        even: whether every member sent as many.
        seconds: from call to completion.

    Returns:
        The key of its totals: operation, phase and domain. Bytes of the tensor that was passed, by
        DeepSpeed's definition; 0 if sizes differ between ranks, because DeepSpeed compares
        stragglers by size, which must then be equal on all ranks. Milliseconds, and the bandwidth
        of the whole result and of what this rank sent, Gbit/s.
    """
    others = group.size - 1
    whole = nbytes * group.size // others
    size = nbytes // others if op == "all_gather" else whole
    algorithm, bus = (8 * sent / GB / max(seconds, 1e-9) for sent in (whole, nbytes))
    name = f"{NAMES[op]} | zero_topo {group.phase} | {group.domain}"
    return name, size if even else 0, (1e3 * seconds, algorithm, bus)


def comms_timing(
    logger: Any, log: Callable[..., None], group: Group, op: str, nbytes: int, even: bool
) -> AbstractContextManager[None] | None:
    """Return a context that adds a record of an exchange to DeepSpeed's comms logger; None if its
    switches skip it.

    Args:
        logger: DeepSpeed's comms logger; its switches may change at any time.
        log: DeepSpeed's ``log_dist(line, ranks)``.
        group: the group, metered.
        op: a key of :data:`NAMES`.
        nbytes: bytes that this rank sends to the others.
        even: whether every member sends as many.
    """
    selected = logger.enabled and (logger.prof_all or NAMES[op] in logger.prof_ops)
    return _recorded(logger, log, group, op, nbytes, even) if selected else None


@contextmanager
def _recorded(
    logger: Any, log: Callable[..., None], group: Group, op: str, nbytes: int, even: bool
) -> Iterator[None]:
    """Add a record of the exchange inside; an accelerator is synchronized before and after it."""
    _synchronize()
    began = time.perf_counter()
    yield
    _synchronize()
    name, size, values = record(group, op, nbytes, even, time.perf_counter() - began)
    entry = logger.comms_dict.setdefault(name, {}).setdefault(size, [0, [], [], []])
    entry[0] += 1
    for total, value in zip(entry[1:], values, strict=True):
        total.append(value)
    if logger.verbose:
        milliseconds, algorithm, bus = values
        log(
            f"comm op: {name} | time (ms): {milliseconds:.2f} | msg size: {format_bytes(size)} | "
            f"algbw (Gbps): {algorithm:.2f} | busbw (Gbps): {bus:.2f}",
            ranks=[0],
        )


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
