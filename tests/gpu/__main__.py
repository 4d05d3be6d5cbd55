# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu [STAGE...]`: every stage's commands, one after the other; what failed, at
the end.

Without a GPU each stage runs a stand-in: less of the same on the CPU, threads or gloo in place of
NCCL, emulated kernels. That shows that the commands work, nothing about a GPU, and nothing of it is
recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from op_builder.builder import GPUBuilder
from tests.launching import ROOT

RECORDS = ROOT / "benchmarks" / "records"
PATIENCE_S = 1200.0  # of a stand-in
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
FEW = "wave32 and (large or any_number or codes_have or uploaded)"
"""Of the emulated kernels' tests, those that reach each kernel in little time."""
KERNELS = (*PYTEST, "tests/kernels/test_golden.py", "-k")
SANITIZER = ("compute-sanitizer", "--error-exitcode", "1", "--kernel-name", "kns=zt_")
"""Only our kernels: with torch's, two tests took more than three minutes."""
SANITIZED = "native and (codes_have or roundings or limited or sparse)"
"""Of the native kernels' tests, those that run under it."""
SOME_FORMATS = "triton and ((test_operations and bf16) or roundings)"
"""Of Triton's tests: each took 18 s on an H100, most of it to compile."""


@dataclass(frozen=True)
class Stage:
    """What a stage is about, the seconds it may take on a GPU, and what is known when it
    succeeds.
    """

    title: str
    limit_s: float
    proves: str


STAGES = {
    1: Stage(
        "kernels: the reference's bits, and times next to a copy",
        240,
        "the native kernels compile, give the reference's bits, and have times in the record",
    ),
    2: Stage(
        "zero3 next to stock; kernels next to other people's",
        420,
        "where the time of unquantized zero3 goes; kernels run at 0.8 of a copy, ahead of others",
    ),
    3: Stage(
        "one rank of 384: overlap", 60, "no overlap changes a bit; the host waits once in a step"
    ),
    4: Stage(
        "two ranks over NCCL",
        150,
        "schemes and sync modes train as unmodified ZeRO-3 over real NCCL",
    ),
    5: Stage(
        "one rank of 384: times",
        90,
        "what zero_topo adds to a step is in the record, and what of it is hidden",
    ),
    6: Stage(
        "a billion parameters",
        180,
        "loss, tokens per second and peak memory are next to unmodified ZeRO-3's",
    ),
    7: Stage(
        "the rest",
        180,
        "Triton, the sanitizer, offload, FP16 and a billion sparse gradients agree too",
    ),
}
"""22 minutes, of which 1 and 2 take 11. The order is by what a minute proves; calls of at most 9
minutes run 1, 2, 3 to 5, and 6 and 7.
"""


@dataclass(frozen=True)
class Command:
    """Words to run in the checkout, and variables added to the environment."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def commands(stage: int, gpu: bool, folder: Path) -> list[Command]:
    """What a stage runs.

    Args:
        stage: from 1 to 7.
        gpu: whether there is one.
        folder: for the records.
    """
    made = {1: _kernels, 2: _beside, 3: _checks, 4: _ranks, 5: _times, 6: _large, 7: _rest}
    return made[stage](gpu, folder)


def _kernels(gpu: bool, folder: Path) -> list[Command]:
    times = _module("kernels", str(folder))
    if gpu:
        return [_module("compiled"), times, Command((*KERNELS, "native"))]
    return [times, Command((*KERNELS, FEW, "tests/kernels/test_gpu_sizes.py"))]


def _beside(gpu: bool, folder: Path) -> list[Command]:
    record = str(folder / "quantizers-gpu.json")
    size = (
        ("--device", "cuda", "--size", "2147483648")
        if gpu
        else ("--size", "65536", "--repeats", "1")
    )
    formats = ("--threads", "1", "--dtypes", "bf16", "--blocks", "256")
    bench = (sys.executable, "-m", "benchmarks", "quantizers", *size, *formats, "--record", record)
    return [_module("beside_stock", str(folder)), Command(bench), _module("goals", record)]


def _checks(gpu: bool, folder: Path) -> list[Command]:
    return [_module("one_of_many", "checks", str(folder))]


def _ranks(gpu: bool, folder: Path) -> list[Command]:
    return [_module("two_ranks", "parity", str(folder))]


def _times(gpu: bool, folder: Path) -> list[Command]:
    return [_module("one_of_many", "times", str(folder))]


def _large(gpu: bool, folder: Path) -> list[Command]:
    return [_module("two_ranks", "large", str(folder))]


def _rest(gpu: bool, folder: Path) -> list[Command]:
    if not gpu:
        interpreted = Command((*KERNELS, "large or misaligned"), {"TRITON_INTERPRET": "1"})
        return [
            interpreted,
            _module("one_of_many", "more", str(folder)),
            _module("sparse", str(folder), str(2**16)),
        ]
    commands = [Command((*KERNELS, SOME_FORMATS)), _module("one_of_many", "more", str(folder))]
    commands.append(_module("sparse", str(folder), str(2**28)))
    # The order of streams: torch's sanitizer knows them, but not the allocator's reuse of memory.
    ordered = {"TORCH_CUDA_SANITIZER": "1", "ZERO_TOPO_QUANT": "reference"}
    commands.append(
        replace(_module("one_of_many", "checks", str(folder / "sanitizer")), env=ordered)
    )
    if shutil.which("compute-sanitizer"):
        native = (*SANITIZER, *KERNELS, SANITIZED)
        commands.append(Command(native, {"ZERO_TOPO_TEST_SMALL": "1"}))
    commands.append(_module("sparse", str(folder), str(2**30 + 2**20)))
    return commands


def _module(name: str, *words: str) -> Command:
    """A program of this package."""
    return Command((sys.executable, "-m", f"tests.gpu.{name}", *words))


def run(number: int, gpu: bool, folder: Path) -> list[dict[str, Any]]:
    """Run a stage to its end, or to its time limit on a GPU; what each command did."""
    stage = STAGES[number]
    kind = "" if gpu else " -- STAND-IN on the CPU, says nothing about a GPU"
    print(f"== stage {number}: {stage.title}{kind}", flush=True)
    device = "cuda" if gpu else "cpu"
    found = []
    end = time.monotonic() + (stage.limit_s if gpu else PATIENCE_S)
    for command in commands(number, gpu, folder):
        env = {
            **os.environ,
            "DS_ACCELERATOR": device,
            "ZERO_TOPO_TEST_DEVICE": device,
            **own_architecture(gpu),
        }
        if gpu:  # the reference computes on the host
            env = {**env, "OMP_NUM_THREADS": "8", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        began = time.monotonic()
        status = 124
        if began < end:  # a command short enough would end before a limit of no time stopped it
            with contextlib.suppress(subprocess.TimeoutExpired):
                limit, env = end - began, {**env, **command.env}
                status = subprocess.run(
                    command.words, cwd=ROOT, env=env, check=False, timeout=limit
                ).returncode
        reported = " ".join(
            [*(f"{name}={value}" for name, value in command.env.items()), *command.words[1:]]
        )
        found.append(
            {"command": reported, "status": status, "seconds": round(time.monotonic() - began, 1)}
        )
        print(
            f"-- {'ok' if status == 0 else f'FAILED ({status})'} in {found[-1]['seconds']} s: "
            f"{reported}",
            flush=True,
        )
    proved = gpu and not any(entry["status"] for entry in found)
    print(f"== stage {number} proved: {stage.proves if proved else 'nothing'}", flush=True)
    return found


def own_architecture(gpu: bool) -> dict[str, str]:
    """Kernels are compiled for the GPU that is there alone, DeepSpeed's too."""
    builder = GPUBuilder()
    return {builder._variable(): str(builder._own_architecture())} if gpu else {}


def main(words: list[str]) -> int:
    """Run the stages named, or all; 1 if a command of one failed."""
    gpu = torch.cuda.is_available() and os.environ.get("ZERO_TOPO_TEST_DEVICE") != "cpu"
    folder = RECORDS if gpu else ROOT / "runs" / "gpu-check"
    (folder / "sanitizer").mkdir(parents=True, exist_ok=True)
    path = folder / "gpu-check.json"
    device = torch.cuda.get_device_name() if gpu else "none: stand-ins on the CPU"
    failed = []
    for stage in map(int, words or map(str, STAGES)):
        entries = run(stage, gpu, folder)
        failed += [entry["command"] for entry in entries if entry["status"]]
        stages = json.loads(path.read_text())["stages"] if path.exists() else {}
        stages[str(stage)] = {"title": STAGES[stage].title, "commands": entries}
        # After each stage: a lease of the GPU may end before the last one.
        records.write(path, records.record("gpu-check", {"device": device}, {"stages": stages}))
    print("\n  ".join([f"{path}: {len(failed)} commands failed", *failed]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
