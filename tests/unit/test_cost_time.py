# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Times of groups: by hand on small machines, never slower on faster links, refused where nothing
is known.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plans import rates_on
from zero_topo.cost.job import Job
from zero_topo.cost.model_files import load_model
from zero_topo.cost.network import Network
from zero_topo.cost.planner import Request
from zero_topo.strict import read, to_json
from zero_topo.topology import Link, Topology, emulated, load_preset
from zero_topo.topology.presets import load_machine, preset_names
from zero_topo.topology.rates import Rates

RATES = Rates(1e12, 1.0, 1e12, 1.0)
GPU, NODE, WORLD = Link(1000.0, 0.5), Link(100.0, 1.0), Link(10.0, 2.0)
TREE = Topology("tree", 3, 2, 2, links={"gpu": GPU, "node": NODE, "world": WORLD})


def seconds(lo: int, hi: int, sent: float, pattern: str, rates: Rates = RATES) -> float:
    return Network(TREE, rates).stage_time(lo, hi, sent, pattern).seconds


# What of a rank's message keeps which links busy for how long, and the latency. A ring of twelve
# ranks leaves a node once; of its steps 6 stay in a GPU, 3 go between GPUs and 3 between nodes, and
# a message makes eleven of them.
ROUND = (6 * 0.5 + 3 * 1.0 + 3 * 2.0) * 11 / 12
STAGES: dict[str, tuple[tuple[int, int, float, str], dict[str, float], float]] = {
    "two GCDs take the latency and one message": ((1, 2, 3000, "ring"), {"gpu": 3}, 0.5),
    "and no other time for a direct one": ((1, 2, 3000, "direct"), {"gpu": 3}, 0.5),
    "1 of 3 direct messages goes to the other die": (
        (1, 4, 300, "direct"),
        {"gpu": 0.1, "node": 200 / 100},
        1.0,
    ),
    "a ring's rank has the whole uplink": (
        (1, 12, 1200, "ring"),
        {"gpu": 1.2, "node": 12, "world": 1200 / 40},
        ROUND,
    ),
    "a ring's latencies add up": ((1, 12, 0, "ring"), {"gpu": 0, "node": 0, "world": 0}, ROUND),
    "rings next to each other share the uplink": (
        (4, 12, 200, "ring"),
        {"world": 200 / 10},
        2 * 2.0,
    ),
}


@pytest.mark.parametrize(("group", "busy", "latency"), STAGES.values(), ids=STAGES)
def test_groups_take_the_links_of_their_domains(
    group: tuple[int, int, float, str], busy: dict[str, float], latency: float
) -> None:
    found = Network(TREE, RATES).stage_time(*group)
    assert found.busy == pytest.approx(busy) and found.latency == pytest.approx(latency)
    assert found.seconds == pytest.approx(latency + max(busy.values()))


def test_links_between_gpus_belong_to_each_rank_unless_they_are_pooled() -> None:
    pooled = Network(TREE, replace(RATES, shared=("node", "world"))).stage_time(
        1, 12, 1200.0, "ring"
    )
    assert pooled.busy == pytest.approx({"gpu": 1.2, "node": 1200 / (2 * 100), "world": 1200 / 40})


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "single-node"])
def test_every_rate_of_a_preset_has_a_source(name: str) -> None:
    machine = load_machine(name)
    assert (
        machine.rates is not None and read(Rates, "rates", to_json(machine.rates)) == machine.rates
    )
    named = {key.removeprefix("rates.") for key in machine.sources if key.startswith("rates.")}
    assert {"peak_flops", "memory_bandwidth", "link_efficiency", "shared"} <= named
    assert (
        machine.ranks_per_node
        and rates_on(load_preset(name, machine.ranks_per_node)) == machine.rates
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"peak_flops": 0}, "peak_flops: must be .*, got 0"),
        ({"compute_efficiency": 1.5}, "from 1e-9 to 1, got 1.5"),
        ({"gather": "rings"}, '"rings" is not one of'),
        ({"shared": ["worlds"]}, "did you mean 'world'"),
        ({"link_efficiency": {"nod": 1}}, "did you mean 'node'"),
        ({"host_codec": 1}, "must be true or false"),
        ({"peak": 1}, "did you mean 'peak_flops'"),
    ],
)
def test_wrong_rates_are_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(Rates, "rates", {**to_json(RATES), **change})


def test_measured_rings_count_only_over_the_links_they_were_measured_on() -> None:
    """Who states a link of their own, on a known machine or an unknown one, gets its rate and not
    Frontier's ring.
    """
    frontier = load_preset("frontier", 16)
    faster = replace(frontier, links={**frontier.links, "world": Link(50e9, 1e-6)})
    assert set(rates_on(frontier).rings["gather"]) == {"node", "world"}
    assert set(rates_on(faster).rings["gather"]) == {"node"}
    times = [
        Network(machine, rates_on(machine)).stage_time(8, 16, 1e9, "ring").seconds
        for machine in (frontier, faster)
    ]
    assert times[1] == pytest.approx(1e9 / (50e9 * 0.8) + 1e-6) and times[1] < times[0]
    own = replace(faster, name="mine")
    job = Job(load_model("gpt2"), 1, 1)
    assert set(Request(own, job).rates.rings["gather"]) == {"node"}
    assert Request(emulated(2, 4, 2), job).rates == rates_on(frontier)
