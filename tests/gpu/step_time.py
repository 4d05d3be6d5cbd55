# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.step_time FOLDER`: steps of a GPT on one rank, stock and zero_topo in turns; overhead in %.

One rank sends nothing, so what differs is our own work: encoding, packing, publishing, Python. On a GPU the model has
1.3 billion parameters.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.training import build_model, engine_of
from benchmarks.training_setup import TrainingSetup
from tests.device import DEVICE, ON_GPU
from tests.gpu.one_rank import ONE, join

SETUP = TrainingSetup(24, 2048, 1024, 4, bucket_numel=500_000_000) if ON_GPU else TrainingSetup(1, 64, 16, 2)
TURNS, MICRO_BATCHES = (12, 2) if ON_GPU else (3, 2)
WARM_UP = 2


def step(engine: Any, tokens: torch.Tensor) -> float:
    """Seconds of one optimizer step, until the device has finished it."""
    wait = torch.cuda.synchronize if ON_GPU else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(MICRO_BATCHES):
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
    wait()
    return time.perf_counter() - began


def main(words: list[str]) -> int:
    """Measure, print and record; 0."""
    join()
    tokens = torch.randint(0, 256, (SETUP.batch, SETUP.context), device=DEVICE)
    topo: dict[str, Any] = {"topology": ONE, "scheme": "topo"}
    fewer_bytes = {"sync": {"mode": "quantized", "bits": 8}, "publish": {"delta": "int8"}}
    blocks = {"stock": None, "topo": topo, "all": {**topo, **fewer_bytes}}
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    with ExitStack() as stack:
        engines = {}
        for name, block in blocks.items():
            config = SETUP.deepspeed(block, MICRO_BATCHES)
            config["zero_optimization"]["overlap_comm"] = ON_GPU
            engines[name] = stack.enter_context(engine_of(build_model(SETUP, 0), config))
        for turn in range(-WARM_UP, TURNS):
            for name, engine in engines.items():
                took = step(engine, tokens)
                if turn >= 0:
                    seconds[name].append(took)
    spreads = {name: records.Spread.of(values) for name, values in seconds.items()}
    overhead = {name: 100 * (spread.median / spreads["stock"].median - 1) for name, spread in spreads.items()}
    for name, spread in spreads.items():
        print(f"{name}: {spread.median:.4f} s a step, {overhead[name]:+.1f}%")
    settings = {"device": str(DEVICE), "parameters": SETUP.parameters, "micro_batches": MICRO_BATCHES}
    results = {"seconds": {name: spread.to_json() for name, spread in spreads.items()}, "overhead_percent": overhead}
    records.write(Path(words[0]) / "gpu-step-time.json", records.record("gpu-step-time", settings, results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
