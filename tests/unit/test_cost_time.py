# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Times of hops: by hand on small machines, never slower on faster links, refused where nothing is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.cost.time import Network, rates_of
from zero_topo.strict import read, to_json
from zero_topo.topology import Link, Topology, emulated, load_preset
from zero_topo.topology.presets import load_machine, preset_names
from zero_topo.topology.rates import Rates

RATES = Rates(1e12, 1.0, 1e12, 1.0)
GPU, NODE, WORLD = Link(1000.0, 0.5), Link(100.0, 1.0), Link(10.0, 2.0)
TREE = Topology("tree", 3, 2, 2, links={"gpu": GPU, "node": NODE, "world": WORLD})


def seconds(lo: int, hi: int, sent: float, pattern: str, rates: Rates = RATES) -> float:
    return Network(TREE, rates).hop(lo, hi, sent, pattern).seconds


@pytest.mark.parametrize("pattern", ["ring", "direct"])
def test_two_dies_take_the_latency_and_one_message(pattern: str) -> None:
    assert seconds(1, 2, 3000.0, pattern) == pytest.approx(0.5 + 3)


def test_direct_messages_use_the_link_of_the_smallest_domain_that_holds_both_ends() -> None:
    # Four ranks of a node: 1 message to the other die, 2 to the other GPU, of 100 bytes each.
    hop = Network(TREE, RATES).hop(1, 4, 300.0, "direct")
    assert hop.busy == pytest.approx({"gpu": 100 / 1000, "node": 200 / 100})
    assert (hop.latency, hop.domain) == (1.0, "node")
    assert hop.seconds == pytest.approx(3.0)


def test_a_ring_leaves_a_node_once_so_its_rank_has_the_whole_uplink() -> None:
    # Twelve ranks, four of a node in the ring: its rank may use the uplink's 4 * 10 bytes/s.
    hop = Network(TREE, RATES).hop(1, 12, 1200.0, "ring")
    assert hop.busy["world"] == pytest.approx(1200 / (4 * 10))
    assert hop.busy["node"] == pytest.approx(1200 / 100), "links between GPUs belong to each rank"
    pooled = Network(TREE, replace(RATES, shared=("node", "world"))).hop(1, 12, 1200.0, "ring")
    assert pooled.busy["node"] == pytest.approx(1200 / (2 * 100))


def test_rings_across_nodes_that_run_beside_each_other_share_the_uplink() -> None:
    hop = Network(TREE, RATES).hop(4, 12, 200.0, "ring")
    assert hop.busy == pytest.approx({"world": 200 / 10})
    assert hop.latency == pytest.approx(2 * 2.0), "two of the ring's three steps"


def test_latencies_add_up_around_a_ring() -> None:
    # Of the twelve steps 6 stay in a GPU, 3 go between GPUs and 3 between nodes; a message makes eleven of them.
    assert Network(TREE, RATES).hop(1, 12, 0.0, "ring").latency == pytest.approx(
        (6 * 0.5 + 3 * 1.0 + 3 * 2.0) * 11 / 12
    )


@given(
    pattern=st.sampled_from(["ring", "direct"]),
    pair=st.sampled_from([(1, 2), (1, 4), (2, 4), (1, 12), (2, 12), (4, 12)]),
    sent=st.floats(0, 1e9),
    domain=st.sampled_from(["gpu", "node", "world"]),
    faster=st.floats(1, 100),
)
def test_a_faster_link_and_a_smaller_message_are_never_slower(
    pattern: str, pair: tuple[int, int], sent: float, domain: str, faster: float
) -> None:
    before = seconds(*pair, sent, pattern)
    after = seconds(*pair, sent, pattern, replace(RATES, link_efficiency={domain: faster}))
    assert after <= before * (1 + 1e-9)
    assert seconds(*pair, sent / 2, pattern) <= before


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "single-node"])
def test_every_rate_of_a_preset_has_a_source(name: str) -> None:
    machine = load_machine(name)
    assert machine.rates is not None and read(Rates, "rates", to_json(machine.rates)) == machine.rates
    named = {key.removeprefix("rates.") for key in machine.sources if key.startswith("rates.")}
    assert {"peak_flops", "memory_bandwidth", "link_efficiency", "shared"} <= named
    assert rates_of(load_preset(name, 8)) == machine.rates


def test_a_machine_without_links_or_rates_is_refused_with_the_way_out() -> None:
    bare = emulated(2, 2, 2)
    with pytest.raises(ValueError, match="says nothing of the 'gpu' link"):
        Network(bare, RATES).hop(1, 2, 1.0, "ring")
    with pytest.raises(ValueError, match="how fast a rank of 'emulated' computes is not known; take a preset"):
        rates_of(bare)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"peak_flops": 0}, "peak_flops is 0"),
        ({"compute_efficiency": 1.5}, "at most 1"),
        ({"gather": "rings"}, "choose one of"),
        ({"shared": ["worlds"]}, "did you mean 'world'"),
        ({"link_efficiency": {"nod": 1}}, "did you mean 'node'"),
        ({"host_codec": 1}, "must be true or false"),
        ({"peak": 1}, "did you mean 'peak_flops'"),
    ],
)
def test_wrong_rates_are_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(Rates, "rates", {**to_json(RATES), **change})
