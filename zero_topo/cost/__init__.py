# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a plan costs: bytes sent and bytes held, as pure functions without torch."""

from __future__ import annotations

from zero_topo.cost.memory import memory_bytes, padding_bytes, paper_memory_table
from zero_topo.cost.volume import Term, Workload, by_domain, paper_volume_table, step_bytes

__all__ = [
    "Term",
    "Workload",
    "by_domain",
    "memory_bytes",
    "padding_bytes",
    "paper_memory_table",
    "paper_volume_table",
    "step_bytes",
]
