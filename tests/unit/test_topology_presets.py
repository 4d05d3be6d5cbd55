# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Known machines have the published shape and rates, and refuse a number of ranks that does not fill their nodes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zero_topo.topology import Topology, emulated, load_preset, preset_names
from zero_topo.topology.presets import emulated_from_json, load_machine, machine_of_cluster
from zero_topo.units import GB


def test_the_presets_are_these() -> None:
    assert preset_names() == ["dgx-a100", "dgx-h100", "emulated-t8", "frontier", "lumi-g", "single-node"]


@pytest.mark.parametrize(
    ("name", "gpus", "dies", "memory", "links"),
    [
        ("frontier", 4, 2, 64 * GB, {"gpu": 200 * GB, "node": 50 * GB, "world": 12.5 * GB}),
        ("lumi-g", 4, 2, 64 * GB, {"gpu": 200 * GB, "node": 50 * GB, "world": 12.5 * GB}),
        ("dgx-a100", 8, 1, 80 * GB, {"node": 300 * GB, "world": 25 * GB}),
        ("dgx-h100", 8, 1, 80 * GB, {"node": 450 * GB, "world": 50 * GB}),
    ],
)
def test_a_machine_has_its_published_shape_and_rates(
    name: str, gpus: int, dies: int, memory: int, links: dict[str, float]
) -> None:
    topology = load_preset(name, 16)
    assert (topology.nodes, topology.gpus_per_node, topology.ranks_per_gpu) == (2, gpus, dies)
    assert topology.memory_per_rank == memory
    assert {domain: link.bandwidth for domain, link in topology.links.items()} == links


@pytest.mark.parametrize("name", preset_names())
def test_every_fact_of_a_preset_has_a_source(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name and machine.sources["shape"]
    assert {f"links.{domain}" for domain in machine.links} <= set(machine.sources)
    assert ("memory_per_rank" in machine.sources) == (machine.memory_per_rank is not None)
    assert "assumed" in machine.sources.get("latency", "assumed")


def test_frontier_fits_whole_at_its_real_size() -> None:
    assert load_preset("frontier", 9408 * 8).nodes == 9408


def test_a_single_node_takes_any_number_of_ranks() -> None:
    topology = load_preset("single-node", 7)
    assert (topology.nodes, topology.gpus_per_node, topology.ranks_per_gpu) == (1, 7, 1)
    assert "memory_per_rank" not in topology.sources


@pytest.mark.parametrize(
    ("world_size", "complaint"),
    [
        (4, "world size 4 is less than one node of preset 'frontier', which has 8 ranks per node"),
        (12, "world size 12 does not fill whole nodes of preset 'frontier', which has 8 ranks per node"),
        (0, "world size is 0"),
    ],
)
def test_ranks_that_do_not_fill_nodes_are_refused(world_size: int, complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        load_preset("frontier", world_size)
    assert complaint in str(error.value)
    assert world_size == 0 or "emulated" in str(error.value)


@pytest.mark.parametrize(("name", "near"), [("fronter", "frontier"), ("dgx", "dgx-a100"), ("LUMI", "lumi-g"), ("", "")])
def test_an_unknown_machine_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown machine '{name}'; did you mean '{near}"):
        load_preset(name, 8)


def test_clusters_lead_to_their_machine() -> None:
    frontier, lumi = machine_of_cluster("Frontier"), machine_of_cluster("lumi")
    assert frontier is not None and frontier.name == "frontier"
    assert lumi is not None and lumi.name == "lumi-g"
    assert machine_of_cluster("elsewhere") is None


def test_an_emulated_machine_is_a_tree_whose_hosts_are_not_checked() -> None:
    topology = emulated(2, 3, 4)
    assert (topology.nodes, topology.gpus_per_node, topology.ranks_per_gpu) == (2, 3, 4)
    assert topology.emulated and topology == emulated_from_json({"nodes": 2, "gpus_per_node": 3, "gcds_per_gpu": 4})


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"nodes": 2, "gpus_per_node": 2}, "missing key 'gcds_per_gpu'"),
        ({"nodes": 2, "gpus_per_node": 2, "ranks_per_gpu": 2}, "did you mean 'gcds_per_gpu'"),
        ({"nodes": 2, "gpus_per_node": -2, "gcds_per_gpu": 2}, "gpus_per_node is -2"),
    ],
)
def test_a_wrong_emulation_is_refused(data: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        emulated_from_json(data)
    assert complaint in str(error.value)


def test_presets_survive_json() -> None:
    for name in preset_names():
        topology = load_preset(name, 8)
        assert Topology.from_json(topology.to_json()) == topology


def test_the_topology_room_needs_no_framework() -> None:
    code = "import sys, zero_topo.topology as t; t.load_preset('frontier', 8); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "deepspeed", "numpy"} & set(loaded)
