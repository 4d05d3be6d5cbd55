# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes what a plan costs, bytes sent and bytes stored, in pure functions without torch."""

from __future__ import annotations

from zero_topo.cost.memory import memory_bytes
from zero_topo.cost.volume import Workload, by_domain, step_bytes

__all__ = [
    "Workload",
    "by_domain",
    "memory_bytes",
    "step_bytes",
]
