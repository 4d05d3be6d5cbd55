# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the ``"zero_topo"`` block of a DeepSpeed JSON config: models, schemes, and refused
settings around it.
"""

from __future__ import annotations

from zero_topo.config.deepspeed_json import (
    deepspeed_hints,
    deepspeed_problems,
    load_deepspeed_config,
    tensor_parallel_groups,
)
from zero_topo.config.models import AUTO, ZeroTopoConfig
from zero_topo.config.modes import SPARSE_MODES
from zero_topo.config.resolve import ROLES, ResolvedConfig, is_automatic, on_tree, resolve_config
from zero_topo.config.schemes import SCHEMES
from zero_topo.config.sync_config import DenseSync

__all__ = [
    "AUTO",
    "ROLES",
    "SCHEMES",
    "SPARSE_MODES",
    "DenseSync",
    "ResolvedConfig",
    "ZeroTopoConfig",
    "deepspeed_hints",
    "deepspeed_problems",
    "is_automatic",
    "load_deepspeed_config",
    "on_tree",
    "resolve_config",
    "tensor_parallel_groups",
]
