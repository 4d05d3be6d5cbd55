# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu [STAGE...]`: every stage's commands, one after the other; what failed, at the end.

Without a GPU each stage runs a stand-in: less of the same on the CPU, threads or gloo in place of NCCL, emulated
kernels. That shows that the commands work, nothing about a GPU, and nothing of it is recorded.
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


@dataclass(frozen=True)
class Stage:
    """What a stage is about, the seconds it may take on a GPU, and what is known when it succeeds."""

    title: str
    limit_s: float
    proves: str


STAGES = {
    1: Stage("kernels give the reference's bits", 240, "every kernel of both GPU backends gives the reference's bits"),
    2: Stage("kernels beside a copy and other people's", 240, "kernels run at 0.8 of a copy and ahead of DeepSpeed's"),
    3: Stage(
        "one rank of 384: overlap, offload, dtypes", 180, "no overlap changes a bit; the host waits once in a step"
    ),
    4: Stage("ranks on one device: parity of schemes and modes", 300, "collectives and sync modes agree with stock"),
    5: Stage("the same with delays at random", 180, "no delay on any stream changes a result"),
    6: Stage("sparse modes on large gradients", 150, "each sparse mode syncs a billion elements, or refuses them"),
    7: Stage("one rank of 384: times", 180, "what zero_topo adds to a step is in the record, and what of it is hidden"),
}
"""In pieces of 9 minutes: 1 2, then 3 4, then 5 6 7."""


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
    return {1: _kernels, 2: _speed, 3: _checks, 4: _ranks, 5: _races, 6: _sparse, 7: _times}[stage](gpu, folder)


def _kernels(gpu: bool, folder: Path) -> list[Command]:
    native, triton = "tests/kernels/test_native.py", "tests/kernels/test_triton.py"
    few = (*PYTEST, native, "-k", "large or limited or refuse or codes")
    if not gpu:
        interpreted = (*PYTEST, triton, "-k", "large or misaligned or codes_give")
        emulated = (
            *PYTEST,
            "tests/kernels/test_gpu_sizes.py",
            "tests/kernels/test_gpu_codes.py",
            "-k",
            "mixed or uploaded",
        )
        return [Command(few), Command(interpreted, {"TRITON_INTERPRET": "1"}), Command(emulated)]
    found = [Command((*PYTEST, native)), Command((*PYTEST, triton, "-k", "not Elsewhere"))]
    if shutil.which("compute-sanitizer"):
        found.append(Command(("compute-sanitizer", "--error-exitcode", "1", *few), {"ZERO_TOPO_TEST_SMALL": "1"}))
    return found


def _speed(gpu: bool, folder: Path) -> list[Command]:
    record = str(folder / "quantizers-gpu.json")
    size = ("--device", "cuda", "--size", "2147483648") if gpu else ("--size", "65536", "--repeats", "1")
    fewer = () if gpu else ("--threads", "1", "--dtypes", "bf16", "--blocks", "256")
    bench = (sys.executable, "-m", "benchmarks", "quantizers", *size, *fewer, "--record", record)
    return [
        Command((*bench, "--plots", str(ROOT / "runs" / "gpu-check"))),
        Command((sys.executable, "-m", "tests.gpu.goals", record)),
    ]


def _one_of_many(what: str, folder: Path) -> Command:
    return Command((sys.executable, "-m", "tests.gpu.one_of_many", what, str(folder)))


def _checks(gpu: bool, folder: Path) -> list[Command]:
    return [_one_of_many("checks", folder)]


def _ranks(gpu: bool, folder: Path) -> list[Command]:
    threads = ("tests/ranks/test_weights.py", "tests/ranks/test_gradients.py")
    if not gpu:
        return [Command((*PYTEST, *threads, "-k", "topo or zero3"))]
    sparse = tuple(f"tests/ranks/test_{name}.py" for name in ("sparse_modes", "sparse_steps", "quantized_sync"))
    # Eight processes with one GPU take turns on it: a collective of theirs takes tens of milliseconds.
    launch = ("tests/e2e/test_launcher_suite.py", "--launcher-ranks=8", "--launcher-timeout=150")
    nccl = Command((*PYTEST, *launch, "--launcher-k=test_bf16_losses_equal_stock_zero3 and topo"))
    return [Command((*PYTEST, *threads, *sparse)), nccl]


def _races(gpu: bool, folder: Path) -> list[Command]:
    delayed = [Command(command.words, {"ZERO_TOPO_TEST_NAPS": "0"}) for command in _ranks(gpu, folder)[:1]]
    ordered = {"TORCH_CUDA_SANITIZER": "1", "ZERO_TOPO_QUANT": "reference"}
    return [*delayed, *([replace(_one_of_many("checks", folder / "sanitizer"), env=ordered)] if gpu else [])]


def _sparse(gpu: bool, folder: Path) -> list[Command]:
    # Two ranks of 2^31 elements each take about 86 GB.
    large = 31 if gpu and torch.cuda.is_available() and torch.cuda.get_device_properties().total_memory > 10**11 else 30
    sizes = (str(2**28), str(2**large + 2**20)) if gpu else (str(2**16),)
    return [Command((sys.executable, "-m", "tests.gpu.sparse", str(folder), size)) for size in sizes]


def _times(gpu: bool, folder: Path) -> list[Command]:
    return [_one_of_many("times", folder)]


def run(number: int, gpu: bool, folder: Path) -> list[dict[str, Any]]:
    """Run a stage to its end, or to its time limit on a GPU; what each command did."""
    stage = STAGES[number]
    kind = "" if gpu else " -- STAND-IN on the CPU, says nothing about a GPU"
    print(f"== stage {number}: {stage.title}{kind}", flush=True)
    device = "cuda" if gpu else "cpu"
    found = []
    end = time.monotonic() + (stage.limit_s if gpu else PATIENCE_S)
    for command in commands(number, gpu, folder):
        env = {**os.environ, "DS_ACCELERATOR": device, "ZERO_TOPO_TEST_DEVICE": device, **own_architecture(gpu)}
        began = time.monotonic()
        status = 124
        if began < end:  # a command short enough would end before a limit of no time stopped it
            with contextlib.suppress(subprocess.TimeoutExpired):
                limit, env = end - began, {**env, **command.env}
                status = subprocess.run(command.words, cwd=ROOT, env=env, check=False, timeout=limit).returncode
        told = " ".join([*(f"{name}={value}" for name, value in command.env.items()), *command.words[1:]])
        found.append({"command": told, "status": status, "seconds": round(time.monotonic() - began, 1)})
        print(f"-- {'ok' if status == 0 else f'FAILED ({status})'} in {found[-1]['seconds']} s: {told}", flush=True)
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
    done = {stage: run(stage, gpu, folder) for stage in map(int, words or map(str, STAGES))}
    failed = [entry["command"] for entries in done.values() for entry in entries if entry["status"]]
    path = folder / "gpu-check.json"
    before = json.loads(path.read_text())["stages"] if path.exists() else {}
    device = torch.cuda.get_device_name() if gpu else "none: stand-ins on the CPU"
    now = {str(stage): {"title": STAGES[stage].title, "commands": entries} for stage, entries in done.items()}
    records.write(path, records.record("gpu-check", {"device": device}, {"stages": {**before, **now}}))
    print(f"{path}: {len(failed)} commands failed{''.join(f'{chr(10)}  {told}' for told in failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
