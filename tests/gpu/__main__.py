# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu [STAGE...]`: every stage's commands, one after the other; what failed, at the end.

Without a GPU each stage runs a stand-in: less of the same on the CPU, threads or gloo in place of NCCL, emulated
kernels. That shows that the commands work, nothing about a GPU, and nothing of it is recorded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from tests.launching import ROOT

RECORDS = ROOT / "benchmarks" / "records"
LIMIT_S = 570.0
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
TITLES = {
    1: "kernels give the reference's bits",
    2: "kernels beside a copy and other people's",
    3: "one rank: stock and zero_topo, dtypes, offload, overlap_comm",
    4: "eight ranks on one device: parity of schemes and modes",
    5: "the same with delays at random",
    6: "sparse modes on large gradients",
    7: "a training step: what zero_topo adds",
}


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
    return {1: _kernels, 2: _speed, 3: _one_rank, 4: _ranks, 5: _races, 6: _sparse, 7: _step}[stage](gpu, folder)


def _kernels(gpu: bool, folder: Path) -> list[Command]:
    native, triton = "tests/kernels/test_native.py", "tests/kernels/test_triton.py"
    few = (*PYTEST, native, "-k", "large or any_length or misaligned or codes")
    if not gpu:
        interpreted = (*PYTEST, triton, "-k", "large or misaligned or codes_give")
        emulated = (*PYTEST, "tests/kernels/test_gpu_sizes.py", "tests/kernels/test_gpu_codes.py", "-k", "binding")
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


def _one_rank(gpu: bool, folder: Path) -> list[Command]:
    return [Command((sys.executable, "-m", "tests.gpu.one_rank", str(folder)))]


def _ranks(gpu: bool, folder: Path) -> list[Command]:
    threads = ("tests/ranks/test_weights.py", "tests/ranks/test_gradients.py")
    if not gpu:
        return [Command((*PYTEST, *threads, "-k", "topo or zero3"))]
    launch = ("tests/e2e/test_launcher_suite.py", "--launcher-ranks=8")
    nccl = [Command((*PYTEST, *launch, f"--launcher-k={name}")) for name in ("test_parity", "test_sync")]
    sparse = ("tests/ranks/test_sparse_modes.py", "tests/ranks/test_quantized_sync.py")
    return [Command((*PYTEST, *threads, *sparse)), *nccl]


def _races(gpu: bool, folder: Path) -> list[Command]:
    seeds = [str(seed) for seed in range(3 if gpu else 1)]
    found = [Command(c.words, {"ZERO_TOPO_TEST_NAPS": seed}) for seed in seeds for c in _ranks(gpu, folder)]
    ordered = {"TORCH_CUDA_SANITIZER": "1", "ZERO_TOPO_QUANT": "reference"}
    return [*found, *(Command(c.words, ordered) for c in _one_rank(gpu, folder / "sanitizer") if gpu)]


def _sparse(gpu: bool, folder: Path) -> list[Command]:
    sizes = (str(2**28), str(2**31 + 2**20)) if gpu else (str(2**16),)
    return [Command((sys.executable, "-m", "tests.gpu.sparse", str(folder), size)) for size in sizes]


def _step(gpu: bool, folder: Path) -> list[Command]:
    return [Command((sys.executable, "-m", "tests.gpu.step_time", str(folder)))]


def run(stage: int, gpu: bool, folder: Path) -> list[dict[str, Any]]:
    """Run a stage to its end; what each command did."""
    kind = "" if gpu else " -- STAND-IN on the CPU, says nothing about a GPU"
    print(f"== stage {stage}: {TITLES[stage]}{kind}", flush=True)
    device = "cuda" if gpu else "cpu"
    found = []
    for command in commands(stage, gpu, folder):
        env = {**os.environ, "DS_ACCELERATOR": device, "ZERO_TOPO_TEST_DEVICE": device, **command.env}
        began = time.monotonic()
        try:
            status = subprocess.run(command.words, cwd=ROOT, env=env, check=False, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = 124
        told = " ".join([*(f"{name}={value}" for name, value in command.env.items()), *command.words[1:]])
        found.append({"command": told, "status": status, "seconds": round(time.monotonic() - began, 1)})
        print(f"-- {'ok' if status == 0 else f'FAILED ({status})'} in {found[-1]['seconds']} s: {told}", flush=True)
    return found


def main(words: list[str]) -> int:
    """Run the stages named, or all; 1 if a command of one failed."""
    gpu = torch.cuda.is_available() and os.environ.get("ZERO_TOPO_TEST_DEVICE") != "cpu"
    folder = RECORDS if gpu else ROOT / "runs" / "gpu-check"
    (folder / "sanitizer").mkdir(parents=True, exist_ok=True)
    done = {stage: run(stage, gpu, folder) for stage in map(int, words or map(str, TITLES))}
    failed = [entry["command"] for entries in done.values() for entry in entries if entry["status"]]
    path = folder / "gpu-check.json"
    before = json.loads(path.read_text())["stages"] if path.exists() else {}
    device = torch.cuda.get_device_name() if gpu else "none: stand-ins on the CPU"
    now = {str(stage): {"title": TITLES[stage], "commands": entries} for stage, entries in done.items()}
    records.write(path, records.record("gpu-check", {"device": device}, {"stages": {**before, **now}}))
    print(f"{path}: {len(failed)} commands failed{''.join(f'{chr(10)}  {told}' for told in failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
