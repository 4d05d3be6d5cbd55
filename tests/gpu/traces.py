# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a trace of torch's profiler says about the device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time in which at least one span lasts."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def kind_of(kernel: str) -> str:
    """Whose kernel it is."""
    if "nccl" in kernel.lower():
        return "nccl"
    return "ours" if "zt_" in kernel else "other"


def traced(path: Path) -> dict[str, Any]:
    """Milliseconds on the device in a trace: of each kind of kernel, of kinds beside
    another, of none, of all but NCCL's.
    """
    events = json.loads(path.read_text())["traceEvents"]
    spans: dict[str, list[tuple[float, float]]] = {"nccl": [], "ours": [], "other": []}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            begin = event["ts"]
            spans[kind_of(event["name"])].append((begin, begin + event["dur"]))
    every = [span for own in spans.values() for span in own] or [(0.0, 0.0)]
    whole = max(end for _, end in every) - min(begin for begin, _ in every)
    return {
        "busy_ms": {kind: covered(own) / 1e3 for kind, own in spans.items()},
        "launches": Counter({kind: len(own) for kind, own in spans.items()}),
        "hidden_ms": (sum(map(covered, spans.values())) - covered(every)) / 1e3,
        "idle_ms": (whole - covered(every)) / 1e3,
        "without_nccl_ms": (whole - covered(spans["nccl"])) / 1e3,
    }
