# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How many processes of a benchmark fit into this machine's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zero_topo.units import MB, format_bytes

RANK = 64 * MB
"""Bytes that a forked rank has of its own before it holds a tensor: torch's, Gloo's and
Python's.
"""


def check_room(ranks: int, each: int, root: Path = Path("/")) -> None:
    """Refuse ranks that this machine cannot hold, before the first is started.

    Args:
        ranks: processes to start.
        each: bytes of one, above :data:`RANK`.
        root: of the file system that tells what is available.

    Raises:
        ValueError: naming how many it can hold.
    """
    available = min(_available(root), default=None)
    if available is not None and ranks * (each + RANK) > available:
        raise ValueError(
            f"{ranks:,} ranks of {format_bytes(each + RANK)} each want "
            f"{format_bytes(ranks * (each + RANK))} of memory and {format_bytes(available)} are "
            f"available: take at most {available // (each + RANK):,} ranks, or smaller ones"
        )


def _available(root: Path) -> Iterator[int]:
    """Bytes by the kernel, and by each control group that this process is in; empty if neither is
    known.
    """
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kind, path = line.split(":", 2)
        if kind in ("", "memory"):
            base = root / "sys/fs/cgroup" / kind
            own = base / path.strip("/")
            names = (
                ("memory.max", "memory.current")
                if not kind
                else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            )
            for folder in (own, *own.parents):
                limit, used = (_text(folder / name).strip() for name in names)
                if limit.isdecimal() and used.isdecimal():
                    yield max(0, int(limit) - int(used))
                if folder == base:
                    break


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
