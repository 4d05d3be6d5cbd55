# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks an installation, a machine and its environment before a run, and reports each problem with
its fix.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_topo.doctor import files, software, variables
from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.doctor.refusals import torch_state

__all__ = ["FAIL", "OK", "WARN", "Finding", "examine"]


def examine(machine: str | None) -> Iterator[Finding]:
    """Yield the findings of every check, in the order in which they are shown.

    Args:
        machine: the machine's preset, or None if it is not a known one.
    """
    yield from software.packages()
    facts = torch_state() if software.usable() else {"error": ""}
    if error := facts.get("error"):
        fix = "try: python -c 'import torch, deepspeed'"
        yield Finding(FAIL, "torch", f"torch and DeepSpeed do not start: {error}", fix)
    elif "error" not in facts:
        yield from software.started(facts)
        yield from software.kernels(facts)
    yield from variables.variables(machine)
    yield from files.shared_memory()
