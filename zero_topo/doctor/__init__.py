# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks an installation, a machine and its environment before a run, and reports each problem with
its fix.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_topo.doctor import files, software
from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.doctor.surroundings import Surroundings
from zero_topo.doctor.variables import variables

__all__ = ["FAIL", "OK", "WARN", "Finding", "Surroundings", "examine"]


def examine(seen: Surroundings) -> Iterator[Finding]:
    """Yield the findings of every check, in the order in which they are shown."""
    yield from software.python(seen)
    installed = all(seen.version(name) for name in ("torch", "deepspeed"))
    facts = seen.torch() if installed else {"error": "not installed"}
    yield from software.packages(seen, facts)
    if "error" not in facts:
        yield from software.kernels(facts)
    yield from software.compilers(seen, facts)
    if "error" not in facts:
        yield from software.backends(facts)
    yield from variables(seen)
    yield from files.locks(seen)
    yield from files.shared_memory(seen)
