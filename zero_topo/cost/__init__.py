# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a plan costs: bytes sent and bytes held, as pure functions without torch."""

from __future__ import annotations

from zero_topo.cost import scape  # noqa: F401  (registers its formulas)
from zero_topo.cost.memory import (
    ADAM_BYTES,
    ADAM_BYTES_FP32,
    memory_bytes,
    padding_bytes,
    paper_memory_table,
)
from zero_topo.cost.radius import between_bytes, resampling_bytes
from zero_topo.cost.sparse import sent_picks
from zero_topo.cost.tagc import bytes_from_owner, bytes_to_owner
from zero_topo.cost.volume import Term, Workload, by_domain, paper_volume_table, step_bytes

__all__ = [
    "ADAM_BYTES",
    "ADAM_BYTES_FP32",
    "Term",
    "Workload",
    "between_bytes",
    "by_domain",
    "bytes_from_owner",
    "bytes_to_owner",
    "memory_bytes",
    "padding_bytes",
    "paper_memory_table",
    "paper_volume_table",
    "resampling_bytes",
    "sent_picks",
    "step_bytes",
]
