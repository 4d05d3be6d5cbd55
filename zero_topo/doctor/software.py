# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks the installed software: torch, DeepSpeed, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.versions import SUPPORTED, installed, refusal, untried

COMPILE = "compile it now: zero-topo build"


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
