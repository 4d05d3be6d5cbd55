# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Known machines have the published shape and rates, and refuse a number of ranks that does not
fill their nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.steps import shape
from zero_topo.topology import load_preset, preset_names
from zero_topo.topology.presets import Machine, emulated_from_json, load_machine, machine_of_cluster


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


frontier = partial(load_preset, "frontier")
PER_NODE = "of preset 'frontier', which has 8 ranks per node.*emulated"  # the way out
SHAPE = {"nodes": 2, "gpus_per_node": 2}


@pytest.mark.parametrize(
    ("make", "given", "complaint"),
    [
        (frontier, 4, "world size 4 is less than one node " + PER_NODE),
        (frontier, 12, "world size 12 does not fill whole nodes " + PER_NODE),
        (frontier, 0, "world size: .*, got 0"),
        (load_machine, "fronter", "unknown machine 'fronter'; did you mean 'frontier"),
        (load_machine, "dgx", "unknown machine 'dgx'; did you mean 'dgx-a100"),
        (load_machine, "LUMI", "unknown machine 'LUMI'; did you mean 'lumi-g"),
        (load_machine, "", r"unknown machine '' \(known: "),
        (emulated_from_json, SHAPE, "missing key 'gcds_per_gpu'"),
        (emulated_from_json, SHAPE | {"ranks_per_gpu": 2}, "did you mean 'gcds_per_gpu'"),
        (
            emulated_from_json,
            SHAPE | {"gpus_per_node": -2, "gcds_per_gpu": 2},
            "gpus_per_node: .*, got -2",
        ),
    ],
)
def test_what_is_no_machine_is_refused(
    make: Callable[[Any], object], given: Any, complaint: str
) -> None:
    """Ranks that do not fill nodes, with the way out; an unknown name, with the nearest; a wrong
    emulation.
    """
    with pytest.raises(ValueError, match=complaint):
        make(given)


def test_clusters_lead_to_their_machine() -> None:
    clusters = {"Frontier": "frontier", "lumi": "lumi-g", "clariden": "alps", "elsewhere": None}
    found = {cluster: machine_of_cluster(cluster) for cluster in clusters}
    assert {cluster: machine and machine.name for cluster, machine in found.items()} == clusters
