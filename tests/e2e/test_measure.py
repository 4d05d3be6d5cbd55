# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks in an emulated cluster find its three levels and their rates by talking, wherever they were
put.

Those tests are skipped where no cluster can be built: it needs root, `ip` and `tc`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.emulated_cluster import network
from benchmarks.emulated_cluster.network import EmulatedNetwork
from benchmarks.emulated_cluster.spec import SPECS, Spec
from benchmarks.ranks import Address, Ranks, place
from tests.launching import LaunchSettings, succeeded
from zero_topo.topology import Topology
from zero_topo.topology.render import render_tree

REASON = network.refusal()
needs_cluster = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PORT = 29500
TOLERANCE = 0.15


def measured(spec: Spec, places: Sequence[int]) -> Topology:
    """What the ranks find when rank ``r`` runs at ``places[r]`` of the cluster's tree; they are
    given nothing of it.
    """
    size = spec.world_size
    with EmulatedNetwork(spec) as built:
        address = Address("eth0", spec.address(places[0]), PORT)
        spots = [
            place(rank, size, spec.ranks_per_node, address, built.space(at))
            for rank, at in enumerate(places)
        ]
        with Ranks("tests.e2e.programs.bench_ranks:measured", {}, spots) as ranks:
            (message,) = list(ranks.messages())
    first, *others = message["topologies"]
    assert all(other == first for other in others), "ranks found different machines"
    return Topology.from_json(first)


@pytest.mark.alone
@needs_cluster
def test_the_levels_and_rates_of_a_cluster_are_found() -> None:
    """Shape, placement, and of each level what every rank gets of it when all talk, within 15%."""
    spec = SPECS["t8"]
    places = list(range(spec.world_size))
    random.Random(5).shuffle(places)
    found = measured(spec, places)
    print(render_tree(found))
    assert (found.nodes, found.gpus_per_node, found.ranks_per_gpu) == (2, 2, 2)
    for degree in (2, 4):  # who shares a unit; which unit comes first cannot be known
        for a in range(spec.world_size):
            for b in range(a):
                together = places[a] // degree == places[b] // degree
                assert (found.position(a) // degree == found.position(b) // degree) == together
    sharing = {
        "gpu": ("gcd", 1),
        "node": ("gpu", spec.gcds_per_gpu),
        "world": ("node", spec.ranks_per_node),
    }
    for domain, (level, ranks) in sharing.items():
        right = spec.rates_mbit.bytes_per_s(level) / ranks
        assert found.links[domain].bandwidth == pytest.approx(right, rel=TOLERANCE), domain
        assert 0 <= found.links[domain].latency < 0.05
    assert all(source.startswith("measured") for source in found.sources.values())
    assert found.emulated  # all on this host


def test_the_command_measures_inside_a_job(tmp_path: Path) -> None:
    """``zero-topo topology --measure`` under a launcher: rank 0 prints what ``--from`` reads back,
    others nothing.
    """
    command = ["zero_topo.cli", "topology", "--measure", "--json"]
    done = succeeded(
        command, LaunchSettings(tmp_path, world_size=2, module=True, timeout_s=120, forked=True)
    )
    text = done.log(0)
    found = Topology.from_json(json.loads(text[text.index("{\n") : text.rindex("}\n") + 2]))
    assert found.world_size == 2 and found.links["node"].bandwidth > 0
    assert "measured" not in done.log(1)
