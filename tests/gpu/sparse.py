# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.sparse FOLDER NUMEL`: each sparse mode syncs one large gradient: seconds and
peak memory.

Two ranks, which are threads on the one device. What zero_topo refuses at this size is an answer
too, and recorded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from tests.device import DEVICE, ON_GPU
from tests.harness import run_threads
from tests.ranks.worlds import PLAIN, World, world
from zero_topo.config import SPARSE_MODES
from zero_topo.topology.presets import emulated

STEPS = 2


def main(words: list[str]) -> int:
    """Every mode; 1 if one fails otherwise than by refusing so large a gradient."""
    numel, found = int(words[1]), {}
    for mode in [kind.MODE for kind in SPARSE_MODES]:
        sync = {"mode": mode, **({} if mode == "tagc" else {"density": 0.01})}
        plan = {"weights": "rank", "gradients": "rank", "optimizer": "rank"}
        try:
            w = world(
                {"scheme": "topo", "quantize": PLAIN, **plan, "sync": sync},
                emulated(2, 1, 1),
                (numel,),
            )
        except ValueError as error:
            found[mode] = {"refused": str(error)}
        else:
            found[mode] = measured(w)
        print(mode, numel, found[mode], flush=True)
    content = records.record(
        "gpu-sparse", {"device": str(DEVICE), "numel": numel, "ranks": 2}, {"modes": found}
    )
    records.write(Path(words[0]) / f"gpu-sparse-{numel}.json", content)
    return int(
        any("error" in entry or ("refused" in entry and not ON_GPU) for entry in found.values())
    )


def measured(w: World) -> dict[str, Any]:
    """Seconds of each sync, and the most memory of both ranks."""

    def rank_main(rank: int) -> list[float]:
        engine = w.engine(torch.bfloat16)
        grad = torch.randn(w.numels[0], device=DEVICE, dtype=torch.bfloat16)
        seconds = []
        for _ in range(STEPS):
            wait()
            began = time.perf_counter()
            engine.gradients.scatter([0], [grad], last=True)
            engine.gradients.sync()
            engine.gradients.optimizer_rows()
            wait()
            seconds.append(time.perf_counter() - began)
            engine.end_step(skipped=False)
        return seconds

    wait = torch.cuda.synchronize if ON_GPU else lambda: None
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = run_threads(w.size, rank_main, timeout=300.0)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
