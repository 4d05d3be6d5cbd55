# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the named schemes: each is a set of defaults for the engine that any key of the block overrides.

Sources: ZeRO-3 (arXiv 1910.02054), ZeRO++ (2306.10209), MiCS (2205.00119), HSDP (PyTorch FSDP's hybrid sharding),
ZeRO-topo ("Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning"). ``topo-zero2`` is topo
with the weights of ZeRO-2: every rank stores all of them, in INT8, so that nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_topo.config.parts import QuantizeConfig
from zero_topo.config.sync_config import DenseSync, SyncSettings

SAME = "weights"
"""The place of a role whose degree equals that of the weights."""

Place = str | int | None
_PLAIN = QuantizeConfig()
_STRAIGHT = DenseSync()


@dataclass(frozen=True)
class Scheme:
    """Holds the defaults of a named scheme.

    Attributes:
        weights, secondary, gradients, optimizer: domain of each role, or :data:`SAME`, or None for no secondary.
        quantize: what is quantized.
        sync: how gradient shards are reduced across gradient domains.
    """

    weights: Place
    secondary: Place
    gradients: Place
    optimizer: Place
    quantize: QuantizeConfig = _PLAIN
    sync: SyncSettings = _STRAIGHT


_PAPER_BITS = QuantizeConfig(weights="int8", secondary="int8", gradients="int4")
_CODES = QuantizeConfig(weights="int8", gradients="int4", resident="int8")

SCHEMES: Mapping[str, Scheme] = {
    "zero3": Scheme("world", None, "world", "world"),
    "zero++": Scheme("world", "node", "world", "world", QuantizeConfig(weights="int8", gradients="int4")),
    "mics": Scheme("node", None, SAME, SAME),
    "hsdp": Scheme("node", None, "node", "node"),
    "paper": Scheme("gpu", SAME, "node", "world", _PAPER_BITS, DenseSync(reduce="all_reduce")),
    "topo": Scheme("gpu", SAME, "node", "world", _PAPER_BITS.model_copy(update={"resident": "int8"})),
    "topo-zero2": Scheme("rank", None, "node", "world", _CODES),
}
DEFAULT_SCHEME = "topo"
FREE_FORM = Scheme(None, None, None, None)
