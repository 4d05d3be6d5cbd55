# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.beside_stock FOLDER`: steps of unquantized `zero3` next to unmodified
ZeRO-3's, on two ranks that share the GPU; what NCCL, our kernels and others did in traced steps.

It decides why `zero3` was 6 to 20% slower when it exchanged gradients itself. If NCCL's
reduce-scatter is as fast as stock, the transport was the reason; if a larger chunk of NCCL's sends
is, the chunk. If neither, the time without NCCL says whether the host or a kernel is. Stock and
`zero3` run twice: their spread.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import records
from tests.gpu import two_ranks
from tests.gpu.traces import traced
from tests.gpu.two_ranks import DEVICE, LARGE, LARGE_SCHEMES, ON_GPU
from zero_topo.config import resolve

STEPS, WARM_UP, TRACED = (8, 2, 3) if ON_GPU else (2, 1, 1)
LIMIT_S = 330.0
"""Seconds after which no other variant begins."""


@dataclass(frozen=True)
class Variant:
    """A scheme of :mod:`tests.gpu.two_ranks`, variables of the environment, and whether our
    exchange takes the place of NCCL's reduce-scatter.
    """

    scheme: str
    env: Mapping[str, str] = field(default_factory=dict)
    exchange: bool = False


STOCK, ZERO3 = "unmodified ZeRO-3", "zero3, unquantized"
CHUNKS = {"NCCL_P2P_NET_CHUNKSIZE": "524288"}
VARIANTS = {
    "stock": Variant(STOCK),
    "zero3": Variant(ZERO3),
    "zero3, our exchange": Variant(ZERO3, exchange=True),
    "zero3, our exchange, chunks of 512 KiB": Variant(ZERO3, CHUNKS, exchange=True),
    "stock again": Variant(STOCK),
    "zero3 again": Variant(ZERO3),
}


def measured(variant: Variant, corpus: Any, folder: Path) -> dict[str, Any]:
    """Seconds of a step, losses, and what the device did in steps that are traced."""
    if variant.exchange:
        resolve.BACKEND_ADDS = 1  # no group is small enough
    with DEVICE:
        model = two_ranks.build_model(LARGE, 0)
    config = two_ranks.config_of(LARGE, LARGE_SCHEMES[variant.scheme])
    seconds, curve = [], []
    with two_ranks.engine_of(model, config, two_ranks.warm_up) as engine:

        def step(number: int) -> None:
            shape = LARGE.batch, LARGE.context
            loss, took = two_ranks.timed_step(engine, corpus.train, shape, number)
            curve.append(loss)
            seconds.append(took)

        for number in range(STEPS):
            step(number)
        timed = records.Spread.of(seconds[WARM_UP:])
        kinds = [ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]
        with profile(activities=kinds) as seen:
            for number in range(STEPS, STEPS + TRACED):
                step(number)
    path = folder / f"trace-{dist.get_rank()}.json"
    seen.export_chrome_trace(str(path))
    found = traced(path)
    path.unlink()
    return {"step_seconds": timed.to_json(), "losses": curve, "traced": found}


def rank(folder: Path, name: str) -> None:
    """Run one variant as a rank and add it to the record."""
    import deepspeed

    two_ranks.behave()
    backend = "nccl" if ON_GPU else "gloo"
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    corpus = two_ranks.Corpus.load(None, LARGE.context)
    result = measured(VARIANTS[name], corpus, folder)
    if dist.get_rank() == 0:
        print(name, {key: value for key, value in result.items() if key != "losses"}, flush=True)
        path = folder / "gpu-beside-stock.json"
        before = {} if name == next(iter(VARIANTS)) else json.loads(path.read_text())["variants"]
        two_ranks.save(folder, "beside-stock", {"variants": {**before, name: result}})
    dist.destroy_process_group()


def main(words: list[str]) -> int:
    """Run as a rank, or start the ranks of each variant."""
    if "RANK" in os.environ:
        rank(Path(words[0]), words[1])
        return 0
    began, failed = time.monotonic(), 0
    for name, variant in VARIANTS.items():
        if time.monotonic() - began > LIMIT_S:
            print(f"no time for {name}", flush=True)
            continue
        ranks = [words[0], name]
        failed |= two_ranks.start_ranks(ranks, "tests.gpu.beside_stock", variant.env)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
