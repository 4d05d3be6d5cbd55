# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Lists the modes of ``sync``, of which the key ``mode`` selects one. A new mode is added to
:data:`SPARSE_MODES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Discriminator, Tag

from zero_topo.config import sparse_config as sparse
from zero_topo.config.sync_config import DenseSync, QuantizedSync, SyncSettings
from zero_topo.config.tagc_config import TagcSync

SPARSE_MODES: tuple[type[sparse.SparseSync], ...] = (
    sparse.OkTopkSync,
    sparse.RadiusSync,
    sparse.ScapeSync,
    TagcSync,
    sparse.TernarySync,
)
AGED_REFUSED = (
    'it divides what comes by the steps it waited for, and here nothing waits; set it to "AdamW", '
    "or sync.mode to a "
    "sparse one with error_feedback"
)
"""Why AgedAdamW does not work with a mode that keeps no residual, and the way out."""
MUON_REFUSED = (
    "every element of Muon's update depends on all gradients of its matrix, of which a sparse mode "
    "sends a few per "
    'step; set sync.mode to "dense" or "quantized"'
)
"""Why Muon does not work with sparse modes, and the way out."""
MUON_WITH_EXPERTS = (
    "Muon does not work with expert_parallel, whose experts have shards of their "
    "own; use Adam or AdamW"
)
SCAPE_WITH_TENSOR_PARALLEL = (
    'sync.mode = "scape" does not work with tensor parallelism: where parameters are replicated on '
    "tensor-parallel ranks, their momentum would follow masks that differ between these ranks; set "
    'sync.mode to "dense", "quantized" or another sparse one'
)
SYNC_MODES: tuple[type[SyncSettings], ...] = (DenseSync, QuantizedSync, *SPARSE_MODES)


def _mode_of(value: object) -> str | None:
    if isinstance(value, SyncSettings):
        return value.MODE
    return str(value.get("mode", DenseSync.MODE)) if isinstance(value, Mapping) else None


if TYPE_CHECKING:
    SyncConfig = SyncSettings
else:
    SyncConfig = Annotated[
        Union[*(Annotated[cls, Tag(cls.MODE)] for cls in SYNC_MODES)], Discriminator(_mode_of)
    ]
"""A ``sync`` block, validated with the model that its ``mode`` names; a block without ``mode`` is
dense.
"""
