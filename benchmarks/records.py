# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record: a benchmark's numbers with all that is needed to judge or repeat them.

Every benchmark's record is a JSON object with ``format``, ``benchmark``, ``when``, ``machine``,
``versions`` and ``settings``, and the benchmark's own numbers next to them. Repeated measurements
are given with their spread.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_topo.versions import used

FORMAT = 2  # 1 is from before the scheme topo stored its weights as INT8
Tick = Callable[[str, int], None]
"""Called with a few words on what is under way, and the units of work done since the last call."""
GrowingRecord = Generator[dict[str, Any], None, None]
"""The record so far, whenever something was measured: what is measured is not lost if the rest
fails.
"""


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity, in its unit."""

    median: float
    min: float
    max: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def to_json(self) -> dict[str, Any]:
        """In JSON types."""
        return asdict(self)


def record(
    benchmark: str, settings: Mapping[str, Any], results: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a benchmark that ends now.

    Args:
        benchmark: its name.
        settings: everything that was chosen, in JSON types.
        results: its own keys.
    """
    head = {"format": FORMAT, "benchmark": benchmark, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    versions = {**used(), "commit": commit()}
    return {
        **head,
        "machine": machine(),
        "versions": versions,
        "settings": dict(settings),
        **results,
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record, a list of numbers on one line and with six digits; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = re.sub(r"\[[^][{}\"]*\]", _line_of_numbers, json.dumps(content, indent=2))
    path.write_text(text + "\n", encoding="utf-8")


def _line_of_numbers(found: re.Match[str]) -> str:
    numbers = json.loads(found[0])
    return json.dumps([float(f"{x:.6g}") if isinstance(x, float) else x for x in numbers])


def machine() -> dict[str, Any]:
    """The host: processor, cores this process may use, memory, kernel, and how busy it is."""
    return {
        "processor": _line(Path("/proc/cpuinfo"), "model name")
        or platform.processor()
        or platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "tcp_congestion_control": _content(Path("/proc/sys/net/ipv4/tcp_congestion_control")),
    }


def _line(path: Path, key: str) -> str | None:
    """The value of the first ``key : value`` line of a file."""
    for line in (_content(path) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _content(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def commit() -> str | None:
    """Return the commit of the checkout, with ``+`` if files differ from it, or None."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*here, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changed.strip() else head
