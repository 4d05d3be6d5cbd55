# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Plans for the tests that only calculate."""

from __future__ import annotations

from typing import Any

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.step import rates_of
from zero_topo.topology import Topology
from zero_topo.topology.rates import Rates

TREE = Topology("tree", nodes=2, gpus_per_node=2, ranks_per_gpu=2)


def resolve(topology: Topology = TREE, **block: Any) -> ResolvedConfig:
    """The plan of a block with these keys."""
    return resolve_config(ZeroTopoConfig.parse(block), topology)


def rates_on(topology: Topology) -> Rates:
    """The rates of a rank of a preset."""
    rates = rates_of(topology)
    assert rates is not None
    return rates
