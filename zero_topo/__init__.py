# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Adds topology-aware sharding to DeepSpeed ZeRO-3: weights over a GPU's GCDs, gradients over a
node, states over all.

A training script needs only ``import zero_topo``; a ``"zero_topo"`` block in the DeepSpeed JSON
configures it. The import is cheap: torch and DeepSpeed are imported when the script imports them,
and the hook is installed then.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from zero_topo import lazy_hook

__version__ = "0.1.0"  # the build reads it here without importing anything

_LAZY = {
    "AdamS": ("zero_topo.sync", "AdamS"),
    "AgedAdamW": ("zero_topo.sync", "AgedAdamW"),
    "Config": ("zero_topo.config", "ZeroTopoConfig"),
    "Init": ("zero_topo.hook.install", "init_context"),
    "Plan": ("zero_topo.plan", "Plan"),
    "Topology": ("zero_topo.topology", "Topology"),
    "enable": ("zero_topo.hook.install", "enable"),
    "initialize": ("zero_topo.hook.install", "initialize"),
    "leave": ("zero_topo.leaving", "leave"),
    "report": ("zero_topo.hook.stats", "report"),
    "stats": ("zero_topo.hook.stats", "stats"),
}

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zero_topo' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)


# In a checkout on PYTHONPATH, as in GPT-NeoX jobs, `op_builder` is next to this folder; installed,
# it is inside.
__path__.extend(
    str(top)
    for top in Path(__file__).resolve().parents[1:2]
    if (top / "op_builder/jit.py").is_file()
)

lazy_hook.arm()
