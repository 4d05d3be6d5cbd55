# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Known machines have the published shape and rates, and refuse a number of ranks that does not
fill their nodes.
"""

from __future__ import annotations

import pytest

from tests.steps import shape
from zero_topo.topology import load_preset, preset_names
from zero_topo.topology.presets import Machine, load_machine, machine_of_cluster


@pytest.mark.parametrize("name", preset_names())
def test_every_fact_of_a_preset_has_a_source(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert_sourced(machine)


def assert_sourced(machine: Machine) -> None:
    """Each fact of a machine says where it was published, or that it is assumed."""
    assert machine.sources["shape"]
    assert {f"links.{domain}" for domain in machine.links} <= set(machine.sources)
    assert ("memory_per_rank" in machine.sources) == (machine.memory_per_rank is not None)
    assert "assumed" in machine.sources.get("latency", "assumed")


def test_a_single_node_takes_any_number_of_ranks() -> None:
    topology = load_preset("single-node", 7)
    assert shape(topology) == (1, 7, 1)
    assert "memory_per_rank" not in topology.sources


def test_clusters_lead_to_their_machine() -> None:
    clusters = {"Frontier": "frontier", "lumi": "lumi-g", "clariden": "alps", "elsewhere": None}
    found = {cluster: machine_of_cluster(cluster) for cluster in clusters}
    assert {cluster: machine and machine.name for cluster, machine in found.items()} == clusters
