# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the ``"zero_topo"`` block of a DeepSpeed JSON config: models, schemes, and refused settings around it."""

from __future__ import annotations

from zero_topo.config.deepspeed_json import (
    check_deepspeed_config,
    deepspeed_hints,
    deepspeed_problems,
    load_deepspeed_config,
)
from zero_topo.config.models import AUTO, ZeroTopoConfig, json_schema
from zero_topo.config.modes import AGED_REFUSED, MUON_REFUSED, SPARSE_MODES, SYNC_MODES
from zero_topo.config.parts import PublishConfig, QuantizeConfig
from zero_topo.config.resolve import ROLES, ResolvedConfig, is_automatic, resolve_config
from zero_topo.config.schemes import SCHEMES, Scheme
from zero_topo.config.sparse_config import (
    GaussianKSync,
    GTopkSync,
    OkTopkSync,
    RadiusSync,
    ScapeSync,
    SparseSync,
    TernarySync,
    TopkASync,
    TopkDsaSync,
)
from zero_topo.config.sync_config import DenseSync, QuantizedSync, SyncSettings
from zero_topo.config.tagc_config import TagcSync

__all__ = [
    "AGED_REFUSED",
    "AUTO",
    "MUON_REFUSED",
    "ROLES",
    "SCHEMES",
    "SPARSE_MODES",
    "SYNC_MODES",
    "DenseSync",
    "GTopkSync",
    "GaussianKSync",
    "OkTopkSync",
    "PublishConfig",
    "QuantizeConfig",
    "QuantizedSync",
    "RadiusSync",
    "ResolvedConfig",
    "ScapeSync",
    "Scheme",
    "SparseSync",
    "SyncSettings",
    "TagcSync",
    "TernarySync",
    "TopkASync",
    "TopkDsaSync",
    "ZeroTopoConfig",
    "check_deepspeed_config",
    "deepspeed_hints",
    "deepspeed_problems",
    "is_automatic",
    "json_schema",
    "load_deepspeed_config",
    "resolve_config",
]
