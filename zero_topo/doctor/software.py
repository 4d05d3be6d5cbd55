# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks the installed software: torch, DeepSpeed, kernels, compilers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.versions import SUPPORTED, installed, refusal, untried

COMPILE = "compile it now: zero-topo build"
GPU_COMPILERS = (
    ("cuda", "nvcc", "load the CUDA toolkit's module"),
    ("rocm", "hipcc", "load the ROCm module"),
)


def usable() -> bool:
    """Return whether torch and DeepSpeed are installed in releases that zero_topo works with."""
    return all(finding.state != FAIL for finding in packages())


def packages() -> Iterator[Finding]:
    """Check the versions of torch and DeepSpeed."""
    for name, known in SUPPORTED.items():
        version = installed(name)
        if version is None:
            fix = "pip install torch, then pip install zero-topo"
            yield Finding(FAIL, name, "is not installed; only planning works", fix)
        elif refused := refusal(name, version):
            yield Finding(FAIL, name, refused, "install the release that it names")
        elif newer := untried(name, version):
            text = newer.removeprefix("warning: ")
            yield Finding(WARN, name, text, f"if it fails: install {known.pinned}")
        else:
            yield Finding(OK, name, f"{version}, of {known.oldest} to {known.newest}")


def started(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the devices that torch sees, and the seam between DeepSpeed and zero_topo."""
    yield Finding(OK, "devices", f"{facts['devices']}, torch is built for {facts['platform']}")
    if facts["seam"] is not None:
        yield Finding(FAIL, "seam", facts["seam"], "install the release that it names")


def kernels(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the native kernels are available."""
    for name, state in facts["kernels"].items():
        subject = f"kernels {name}"
        if state == "built":
            yield Finding(OK, subject, state)
        elif name == "zt_gpu" and (facts["platform"] == "xpu" or not facts["devices"]):
            yield Finding(OK, subject, "not needed here")
        elif state == "not compiled":
            text = "not compiled yet, the first run will wait a minute for it"
            yield Finding(WARN, subject, text, COMPILE)
        else:
            text = f"{state}; runs use slower ones of torch or Triton instead"
            yield Finding(WARN, subject, text, f"fix that, then {COMPILE}")


def compilers(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the compilers of the kernels, and of the operations that DeepSpeed compiles at first
    use.
    """
    own = os.environ.get("CXX")
    names = [own] if own else ["g++", "c++"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        text = f"{' and '.join(names)} not found, so what is not compiled yet cannot be"
        yield Finding(WARN, "c++", text, "install g++, or set CXX to a C++17 compiler")
    else:
        yield Finding(OK, "c++", found)
    if ninja := shutil.which("ninja"):
        yield Finding(OK, "ninja", ninja)
    else:
        yield Finding(WARN, "ninja", "not found", "pip install ninja")
    for platform, name, fix in GPU_COMPILERS:
        if path := shutil.which(name):
            yield Finding(OK, name, path)
        elif facts.get("platform") == platform and facts.get("devices"):
            text = "not found, so GPU kernels that are not compiled yet cannot be"
            yield Finding(WARN, name, text, fix)
