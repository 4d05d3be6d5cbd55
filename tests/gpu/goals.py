# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.goals RECORD`: whether a record of `python -m benchmarks quantizers` on a
GPU meets the goals.

0.8 of a copy of as many bytes, and ahead of every other quantizer in the record, for each of our
best backend's kernels; DeepSpeed's must be in the record. The stand-in's record is read and shown,
but compared with nothing.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

GOAL = 0.8
OURS = ("native", "triton")


def main(words: list[str]) -> int:
    """One line for each kernel and format; 1 if one of them misses a goal on a GPU."""
    content = json.loads(Path(words[0]).read_text())
    formats: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for entry in content["results"]:
        kernel = tuple(entry[key] for key in ("op", "dtype", "bits", "block_size"))
        formats[kernel][entry["backend"]] = entry["memcpy_ratio"]
    compared = any("deepspeed" in ratios for ratios in formats.values())
    missed = int(not compared)
    print(
        "next to DeepSpeed's"
        if compared
        else f"NOT compared with DeepSpeed's: {content['skipped'].get('deepspeed')}"
    )
    for kernel, ratios in formats.items():
        own = max((ratios[name] for name in OURS if name in ratios), default=0.0)
        others = max(
            (ratio for name, ratio in ratios.items() if name not in (*OURS, "reference")),
            default=0.0,
        )
        short = own < GOAL or own < others
        missed += short
        print(*kernel, f"{own:.2f} of a copy; others {others:.2f}{'  MISSED' if short else ''}")
    return int(content["device"] is not None and missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
