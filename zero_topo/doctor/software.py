# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks the installed software: Python, torch, DeepSpeed, kernels, Triton, compilers, backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.doctor.surroundings import Surroundings
from zero_topo.versions import SUPPORTED, refusal, untried

PYTHON = (3, 11)
COMPILE = "compile it now: zero-topo build"
GPU_COMPILERS = (
    ("cuda", "nvcc", "load the CUDA toolkit's module"),
    ("rocm", "hipcc", "load the ROCm module"),
)


def python(seen: Surroundings) -> Iterator[Finding]:
    """Check that this Python is new enough."""
    version = tuple(int(part) for part in seen.python.split(".")[:2])
    wanted = ".".join(map(str, PYTHON))
    if version < PYTHON:
        yield Finding(
            FAIL, "python", f"{seen.python} is too old", f"install Python {wanted} or newer"
        )
    else:
        yield Finding(OK, "python", seen.python)


def packages(seen: Surroundings, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check torch, DeepSpeed and the seam between it and zero_topo, and Triton."""
    missing = [name for name in ("torch", "deepspeed") if seen.version(name) is None]
    for name in missing:
        yield Finding(
            FAIL,
            name,
            "is not installed; only planning works",
            "pip install torch, then pip install zero-topo",
        )
    if missing:
        return
    refused = {
        name: line for name in SUPPORTED if (line := refusal(name, seen.version(name) or ""))
    }
    for name, line in refused.items():
        yield Finding(FAIL, name, line, "install the release that it names")
    if refused:
        return
    if "error" in facts:
        fix = "see stale locks below, then try: python -c 'import torch, deepspeed'"
        yield Finding(FAIL, "torch", f"torch and DeepSpeed do not start: {facts['error']}", fix)
        return
    yield Finding(
        OK, "torch", f"{facts['torch']} for {facts['platform']}, {facts['devices']} devices"
    )
    if facts["seam"] is not None:
        yield Finding(FAIL, "deepspeed", facts["seam"], "install the release that it names")
    else:
        known = SUPPORTED["deepspeed"]
        version = seen.version("deepspeed") or ""
        if newer := untried("deepspeed", version):
            yield Finding(
                WARN,
                "deepspeed",
                newer.removeprefix("warning: "),
                f"if it fails: install {known.pinned}",
            )
        else:
            yield Finding(
                OK,
                "deepspeed",
                f"{version}, as zero_topo expects ({known.oldest} to {known.newest})",
            )


def kernels(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the native kernels are available, or else Triton."""
    for name, state in facts["kernels"].items():
        subject = f"kernels {name}"
        gpu = name == "zt_gpu"
        if state == "built":
            yield Finding(OK, subject, "built")
        elif gpu and facts["platform"] == "xpu":
            yield Finding(OK, subject, "none for Intel GPUs, torch's operations serve them")
        elif gpu and not facts["devices"]:
            yield Finding(OK, subject, "not needed, there is no GPU here")
        elif state == "not compiled":
            yield Finding(
                WARN, subject, "not compiled yet, the first run will wait a minute for it", COMPILE
            )
        else:
            other = "Triton's or the slow reference" if gpu else "the slow reference"
            yield Finding(
                WARN, subject, f"{state}; runs use {other} instead", f"mend that, then {COMPILE}"
            )
    if facts["triton"]:
        yield Finding(OK, "triton", facts["triton"])
    elif facts["devices"] and facts["platform"] != "xpu":
        yield Finding(
            WARN,
            "triton",
            "is not installed, so GPUs depend on the native kernels",
            "pip install triton",
        )
    else:
        yield Finding(OK, "triton", "not installed, and not needed here")


def compilers(seen: Surroundings, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the compilers of the kernels, and of the operations that DeepSpeed compiles at first
    use.
    """
    names = [seen.env["CXX"]] if seen.env.get("CXX") else ["g++", "c++"]
    found = next((path for path in map(seen.which, names) if path), None)
    if found is None:
        why = f"{' and '.join(names)} not found, so what is not compiled yet cannot be"
        yield Finding(WARN, "c++", why, "install g++, or set CXX to a C++17 compiler")
    else:
        yield Finding(OK, "c++", found)
    ninja = seen.which("ninja")
    yield (
        Finding(OK, "ninja", ninja)
        if ninja
        else Finding(WARN, "ninja", "not found", "pip install ninja")
    )
    for platform, name, fix in GPU_COMPILERS:
        path = seen.which(name)
        if path:
            yield Finding(OK, name, path)
        elif facts.get("platform") == platform and facts.get("devices"):
            yield Finding(
                WARN, name, "not found, so GPU kernels that are not compiled yet cannot be", fix
            )


def backends(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the backends through which ranks can communicate."""
    if facts["gloo"]:
        yield Finding(OK, "gloo", "available")
    else:
        yield Finding(
            FAIL, "gloo", "torch was built without gloo", "install a torch from pytorch.org"
        )
    name = {"rocm": "rccl", "xpu": "xccl"}.get(facts["platform"], "nccl")
    if facts["nccl"]:
        yield Finding(OK, name, "available")
    elif facts["devices"]:
        yield Finding(
            FAIL,
            name,
            "torch was built without it, so GPUs cannot talk",
            "install a torch built for the GPU",
        )
    else:
        yield Finding(OK, name, "not available, and not needed without a GPU")
    words = (
        "available"
        if facts["mpi4py"]
        else 'not installed; only mpirun needs it: pip install "zero-topo[mpi]"'
    )
    yield Finding(OK, "mpi4py", words)
