# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.two_ranks parity|large FOLDER`: two ranks on one GPU, over NCCL, next to
unmodified ZeRO-3.

NCCL refuses two ranks of one machine on the same GPU, so each rank names a machine of its own
(``NCCL_HOSTID``) and their traffic goes through sockets of this machine. On a CPU gloo serves.

``parity`` trains a small model under each case and compares its losses with unmodified DeepSpeed's.
``large`` trains the example's GPT with a billion parameters: loss, tokens per second, peak memory,
compared with unmodified ZeRO-3.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import zero_topo
from benchmarks import records
from benchmarks.training import build_model, engine_of
from benchmarks.training_setup import TrainingSetup
from tests.device import DEVICE, ON_GPU, device_name
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT
from zero_topo.examples.process import behave

RANKS = 2
STEPS = 6
APART = {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 1}}
"""All traffic crosses nodes: sync, publish, masks."""
PAIR = {"emulated": {"nodes": 1, "gpus_per_node": 1, "gcds_per_gpu": 2}}
"""Gathers and the reduce-scatter have a partner, sync has none."""
PLAIN = {"weights": None, "secondary": None, "gradients": None}
UNQUANTIZED = 3e-3
"""Largest relative difference of a loss in BF16, over a few steps."""
QUANTIZED = 0.1

SMALL = TrainingSetup(
    layers=2, width=128, context=64, batch=4, lr=1e-3, bucket_numel=100_000, prefetch_numel=50_000
)
LARGE = TrainingSetup(
    layers=20 if ON_GPU else 2,
    width=2048 if ON_GPU else 64,
    context=1024 if ON_GPU else 32,
    batch=4,
    bucket_numel=50_000_000,
    prefetch_numel=50_000_000,
)
LARGE_STEPS = 13 if ON_GPU else 4
WARM_UP = 3
"""Steps that are not timed."""
RISING = 10
"""Steps in which the learning rate rises: without them the first ones multiply the loss by 2.7
under every scheme.
"""
LARGE_SCHEMES: dict[str, dict[str, Any] | None] = {
    "unmodified ZeRO-3": None,
    "zero3, unquantized": {"scheme": "zero3", "topology": APART, "quantize": PLAIN},
    "topo, nodes apart": {"scheme": "topo", "topology": APART},
    "topo, quantized sync and publish, nodes apart": {
        "scheme": "topo",
        "topology": APART,
        "sync": {"mode": "quantized"},
    },
    "topo, one node": {"scheme": "topo", "topology": PAIR},
}


class SharedHead(nn.Module):
    """The head runs inside two reentrant checkpoints and once outside: its gradient arrives in
    three parts.
    """

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, computed in three chunks of the batch's positions."""
        gpt = self.gpt
        x = gpt.embed_bytes(tokens) + gpt.embed_positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in gpt.blocks:
            x = block(x)
        first, second, third = gpt.norm(x).tensor_split(3, dim=1)
        logits = [
            checkpoint(gpt.lm_head, first, use_reentrant=True),
            checkpoint(gpt.lm_head, second, use_reentrant=True),
            gpt.lm_head(third),
        ]
        flat = torch.cat(logits, dim=1).flatten(0, 1).float()
        return nn.functional.cross_entropy(flat, targets.flatten())


def plain(config: dict[str, Any]) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Case:
    """A block, what else differs from the plain config, and how near its losses are to unmodified
    ZeRO-3's.

    Attributes:
        name: in the record.
        block: ``zero_topo``'s.
        bound: largest relative difference of a loss.
        wrap: the model around the GPT; unmodified DeepSpeed trains the same unless that refuses it.
        change: changes the DeepSpeed config in place, for both.
    """

    name: str
    block: Mapping[str, Any]
    bound: float = QUANTIZED
    wrap: Callable[[GPT], nn.Module] = lambda gpt: gpt
    change: Callable[[dict[str, Any]], None] = plain


def adams(config: dict[str, Any]) -> None:
    """SCAPE's optimizer, which is ours; unmodified ZeRO-3 keeps AdamW."""
    if "zero_topo" in config:
        config["optimizer"] = {"type": "AdamS", "params": {"lr": 1e-3, "weight_decay": 0.01}}


def deepspeeds_adam(config: dict[str, Any]) -> None:
    """What users get by default: DeepSpeed's FusedAdam, compiled at first use."""
    config["optimizer"]["params"].pop("torch_adam")


def offloaded(config: dict[str, Any]) -> None:
    """DeepSpeed's CPUAdam, on masters in host memory."""
    deepspeeds_adam(config)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": ON_GPU}


def muon(config: dict[str, Any]) -> None:
    """Unclipped, as DeepSpeed clips Muon's updates."""
    config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    config["gradient_clipping"] = 0.0
    config["zero_optimization"]["reduce_scatter"] = False


CASES = (
    Case("zero3", {"scheme": "zero3", "topology": APART, "quantize": PLAIN}, UNQUANTIZED),
    Case(
        "topo, unquantized, one node",
        {"scheme": "topo", "topology": PAIR, "quantize": PLAIN},
        UNQUANTIZED,
    ),
    Case("topo, one node", {"scheme": "topo", "topology": PAIR}),
    Case("topo, nodes apart", {"scheme": "topo", "topology": APART}),
    Case("paper, one node", {"scheme": "paper", "topology": PAIR}),
    Case("zero++", {"scheme": "zero++", "topology": APART}),
    Case(
        "quantized sync and publish",
        {
            "scheme": "topo",
            "topology": APART,
            "sync": {"mode": "quantized"},
        },
    ),
    Case("ternary", {"scheme": "topo", "topology": APART, "sync": {"mode": "ternary"}}, 0.3),
    Case(
        "SCAPE by parameter",
        {
            "scheme": "topo",
            "topology": APART,
            "sync": {"mode": "scape", "warmup": 0, "select": "parameter"},
        },
        0.5,
        change=adams,
    ),
    Case(
        "Ok-Topk",
        {"scheme": "topo", "topology": APART, "sync": {"mode": "oktopk", "density": 0.1}},
        0.5,
    ),
    Case(
        "a head in reentrant checkpoints",
        {"scheme": "topo", "topology": PAIR, "quantize": PLAIN},
        UNQUANTIZED,
        wrap=SharedHead,
    ),
    Case(
        "FusedAdam",
        {"scheme": "topo", "topology": APART, "quantize": PLAIN},
        UNQUANTIZED,
        change=deepspeeds_adam,
    ),
    Case("FusedAdam, INT8 weights", {"scheme": "topo", "topology": APART}, change=deepspeeds_adam),
    Case(
        "CPUAdam",
        {"scheme": "topo", "topology": APART, "quantize": PLAIN},
        UNQUANTIZED,
        change=offloaded,
    ),
    Case(
        "Muon", {"scheme": "topo", "topology": APART, "quantize": PLAIN}, UNQUANTIZED, change=muon
    ),
)
ON_GPU_ALONE = ("CPUAdam", "FusedAdam", "FusedAdam, INT8 weights", "Muon")
"""Their ops compile for minutes, which the launches of the test suite do not need."""


def config_of(
    setup: TrainingSetup, block: Mapping[str, Any] | None, case: Case | None = None
) -> dict[str, Any]:
    """Return the DeepSpeed config of a block, None for unmodified ZeRO-3; replicas are compared
    after each step.
    """
    checked = None if block is None else {"debug_checks": case is not None, **block}
    config = setup.deepspeed(checked, 1)
    config["zero_optimization"]["overlap_comm"] = ON_GPU
    if case is not None:
        case.change(config)
    return config


def losses(
    setup: TrainingSetup, case: Case, block: Mapping[str, Any] | None, corpus: Corpus
) -> list[float]:
    """Train; return this rank's loss at each step."""
    with DEVICE:
        model = case.wrap(build_model(setup, 0))
    found = []
    with engine_of(model, config_of(setup, block, case)) as engine, sdpa_kernel(SDPBackend.MATH):  # type: ignore[arg-type]
        for step in range(STEPS):
            tokens, targets = batch(
                corpus.train, (setup.batch, setup.context), 0, step, dist.get_rank()
            )
            loss = engine(tokens.to(DEVICE), targets.to(DEVICE))
            engine.backward(loss)
            engine.step()
            found.append(loss.detach())
    return [float(loss) for loss in found]


def parity(folder: Path, corpus: Corpus) -> int:
    """Return 1 if a case's losses leave their bound around unmodified ZeRO-3's, on the same
    ranks.
    """
    results: list[dict[str, Any]] = []
    stock: dict[str, list[float]] = {}
    for case in CASES:
        if case.name in ON_GPU_ALONE and not ON_GPU:
            continue
        began = time.perf_counter()
        # Unmodified ZeRO-3 asserts on a gradient that arrives in parts, so that case's reference is
        # the plain model's.
        key = case.change.__name__
        if key not in stock:
            stock[key] = losses(SMALL, Case("stock", {}, change=case.change), None, corpus)
        try:
            own = losses(SMALL, case, case.block, corpus)
            pairs = zip(own, stock[key], strict=True)
            difference = max(abs(a - b) / b for a, b in pairs)
            result: dict[str, Any] = {
                "losses": own,
                "difference": difference,
                "right": difference <= case.bound,
            }
        except Exception as error:  # the next case is worth its minute of the GPU too
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "right": False}
        result |= {
            "case": case.name,
            "bound": case.bound,
            "seconds": round(time.perf_counter() - began, 1),
        }
        results.append(result)
        if dist.get_rank() == 0:
            shown = {name: value for name, value in result.items() if name != "losses"}
            print("ok   " if result["right"] else "WRONG", shown, flush=True)
    save(folder, "parity", {"unmodified ZeRO-3": stock, "cases": results})
    return int(not all(result["right"] for result in results))


def large(folder: Path, corpus: Corpus, name: str) -> int:
    """Train a billion parameters under one scheme and add it to the record; return 0.

    Each scheme has processes of its own: DeepSpeed's caches keep the states of destroyed
    optimizers.
    """
    result = measured(LARGE_SCHEMES[name], corpus)
    if dist.get_rank() == 0:
        shown = {key: value for key, value in result.items() if key != "losses"}
        print(name, shown, f"last loss {result['losses'][-1]:.4f}", flush=True)
        path = folder / "gpu-large.json"
        first = name == next(iter(LARGE_SCHEMES))
        before = {} if first else json.loads(path.read_text())["schemes"]
        save(folder, "large", {"parameters": LARGE.parameters, "schemes": {**before, name: result}})
    return 0


def warm_up(step: int) -> float:
    """The factor of the learning rate at a step."""
    return min(1.0, (step + 1) / RISING)


def timed_step(
    engine: Any, text: Tensor, shape: tuple[int, int], number: int
) -> tuple[float, float]:
    """Take a step, which must not be skipped; return its loss, averaged over ranks, and seconds."""
    tokens, targets = batch(text, shape, 0, number, dist.get_rank())
    began = time.perf_counter()
    loss = engine(tokens.to(DEVICE), targets.to(DEVICE))
    engine.backward(loss)
    engine.step()
    mean = loss.detach().float().clone()
    dist.all_reduce(mean)
    averaged = float(mean) / RANKS
    seconds = time.perf_counter() - began
    assert not getattr(engine.optimizer, "overflow", False), "a step was skipped"
    return averaged, seconds


def measured(block: Mapping[str, Any] | None, corpus: Corpus) -> dict[str, Any]:
    """Return the losses averaged over ranks, seconds of a step with their spread, tokens per
    second, peak bytes.
    """
    with DEVICE:
        model = build_model(LARGE, 0)
    curve = []
    seconds = []
    shape = LARGE.batch, LARGE.context
    with engine_of(model, config_of(LARGE, block), warm_up) as engine:
        for number in range(LARGE_STEPS):
            loss, took = timed_step(engine, corpus.train, shape, number)
            curve.append(loss)
            seconds.append(took)
        predicted = None if block is None else zero_topo.stats(engine).memory
    spread = records.Spread.of(seconds[WARM_UP:])
    peak = torch.cuda.max_memory_allocated() if ON_GPU else None
    speed = RANKS * LARGE.batch * LARGE.context / spread.median
    return {
        "losses": curve,
        "step_seconds": spread.to_json(),
        "tokens_per_s": speed,
        "peak_bytes": peak,
        "memory_formula": predicted,
    }


def save(folder: Path, name: str, results: Mapping[str, Any]) -> None:
    """Write a record, on rank 0."""
    if dist.get_rank() == 0:
        settings = {"device": device_name(), "ranks": RANKS, "backend": dist.get_backend()}
        records.write(folder / f"gpu-{name}.json", records.record(f"gpu-{name}", settings, results))


def start_ranks(
    words: list[str], module: str = "tests.gpu.two_ranks", env: Mapping[str, str] | None = None
) -> int:
    """Start a program on each rank and wait for them; return the first status that is not 0."""
    port = "29533"
    processes = []
    for rank in range(RANKS):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        own |= {
            "LOCAL_RANK": "0",
            "NCCL_HOSTID": str(rank),
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        own |= {"DS_ACCELERATOR": DEVICE.type, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, "-m", module, *words]
        processes.append(subprocess.Popen(command, env={**os.environ, **own, **(env or {})}))
    try:
        statuses = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return next((status for status in statuses if status), 0)


def main(words: list[str]) -> int:
    """Run as a rank, or start the ranks."""
    if "RANK" not in os.environ:
        runs = [[*words, name] for name in LARGE_SCHEMES] if words[0] == "large" else [words]
        return max(start_ranks(run) for run in runs)
    import deepspeed

    behave()
    deepspeed.init_distributed(
        "nccl" if ON_GPU else "gloo", auto_mpi_discovery=False, verbose=False
    )
    corpus = Corpus.load(None, LARGE.context)
    folder = Path(words[1])
    status = large(folder, corpus, words[2]) if words[0] == "large" else parity(folder, corpus)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
