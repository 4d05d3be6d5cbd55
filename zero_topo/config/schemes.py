# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the named schemes: each is a block of defaults that any key of the user's block
overrides.

Sources: ZeRO-3 (arXiv 1910.02054), ZeRO++ (2306.10209), HSDP (PyTorch FSDP's hybrid
sharding), ZeRO-topo ("Scaling Large Language Model Training on Frontier with Low-Bandwidth
Partitioning"). ``topo-zero2`` is topo with the weights of ZeRO-2: every rank stores all of them, in
INT8, so that nothing is gathered. Both reduce-scatter in NF4, which loses less than INT4 in the
same bytes (docs/losses.md); the others keep the formats that they published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAME = "weights"
"""In place of a domain: the role's degree equals that of the weights, which the user may set."""

_ZERO3 = {"weights": "world", "gradients": "world", "optimizer": "world"}
_SENT = {"weights": "int8", "gradients": "int4"}
_PAPER = {"weights": "gpu", "secondary": SAME, "gradients": "node", "optimizer": "world"}
_OURS = {"weights": "int8", "gradients": "nf4", "resident": "int8"}

SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "zero3": _ZERO3,
    "zero++": {**_ZERO3, "secondary": "node", "quantize": _SENT},
    "hsdp": {"weights": "node", "gradients": "node", "optimizer": "node"},
    "paper": {
        **_PAPER,
        "quantize": {**_SENT, "secondary": "int8"},
        "sync": {"reduce": "all_reduce"},
    },
    "topo": {**_PAPER, "quantize": {**_OURS, "secondary": "int8"}},
    "topo-zero2": {"weights": "rank", "gradients": "node", "optimizer": "world", "quantize": _OURS},
}
DEFAULT_SCHEME = "topo"
