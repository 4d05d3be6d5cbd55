# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Describes the machine: the tree of nodes, GPUs and ranks, known machines, and where ranks run
(never imports torch).
"""

from zero_topo.topology.discover import resolve_topology
from zero_topo.topology.model import DOMAINS, Link, Topology
from zero_topo.topology.presets import emulated, load_preset, preset_names

__all__ = [
    "DOMAINS",
    "Link",
    "Topology",
    "emulated",
    "load_preset",
    "preset_names",
    "resolve_topology",
]
