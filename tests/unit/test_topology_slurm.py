# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Slurm's host lists, tasks per node and distributions put every rank on the host on which Slurm
starts it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.steps import deal, named, shape, step, task
from zero_topo.topology import discover
from zero_topo.topology.probes import slurm

SIZES = st.integers(1, 6)
WRITTEN = {
    "block": ["", "block", "*", "block:cyclic", "block:block:cyclic", "block,NoPack", "*:block"],
    "cyclic": ["cyclic", "cyclic:block", "cyclic:cyclic:fcyclic", "Cyclic,Pack"],
    "plane": ["plane", "plane={}"],
    "arbitrary": ["arbitrary"],
}


@pytest.mark.parametrize("kind", WRITTEN)
@given(SIZES, SIZES, st.integers(1, 8), st.data())
def test_every_rank_finds_all_tasks_where_slurm_deals_them(
    kind: str, nodes: int, per_node: int, size: int, data: st.DataObject
) -> None:
    """On the host and, in ascending order, at the place there; blocks are the tree's own order."""
    tasks = deal(nodes, per_node, {"cyclic": 1, "plane": size}.get(kind, per_node))
    if kind == "arbitrary":
        tasks = data.draw(st.permutations(tasks))
    more = {"SLURM_DIST_PLANESIZE": str(size), "SLURM_ARBITRARY_NODELIST": named(tasks)}
    env = step(nodes, per_node, data.draw(st.sampled_from(WRITTEN[kind])).format(size), **more)
    topology: Any = discover(env)
    assert topology.hosts == tuple(f"n{node}" for node in range(nodes))
    places = [node * per_node + tasks[:rank].count(node) for rank, node in enumerate(tasks)]
    assert [topology.position(rank) for rank in range(topology.world_size)] == places
    assert kind != "block" or topology.order is None
    assert all(discover(env | task(tasks, rank)) == topology for rank in range(topology.world_size))


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=5))
def test_tasks_per_node_are_expanded(parts: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in parts)
    expected = [count for count, times in parts for _ in range(times)]
    assert slurm.expand_tasks_per_node(text, "T") == expected


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a,,b", ["a", "b"]),
        ("[1-3]", ["1", "2", "3"]),
        ("n[08-10,7]", ["n08", "n09", "n10", "n7"]),
        ("n[1-2]-ib,login", ["n1-ib", "n2-ib", "login"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("b,a,b", ["b", "a"]),
    ],
)
def test_host_lists_keep_order_zeros_and_each_host_once(text: str, hosts: list[str]) -> None:
    assert slurm.expand_hosts(text, "L") == hosts


@pytest.mark.parametrize("text", ["n[1-99][1-99]", "n[1-9999999999]", ",".join(["n[1-600]"] * 2)])
def test_a_list_of_more_hosts_than_there_can_be_is_refused_before_it_is_made(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand here, in place of a million."""
    monkeypatch.setattr(slurm, "MOST_RANKS", 1000)
    with pytest.raises(ValueError, match=r"more than 1,000 hosts"):
        slurm.expand_hosts(text, "L")


HOSTS, TASKS, KIND = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_DISTRIBUTION"
BROKEN_HOSTS = ("nid[1-3", "nid[3-1]", "nid[a]", "nid1]", "nid[1-]", "nid[[1]]", "nid[1,]")
BROKEN_TASKS = ("8x2", "(x2)", "8(x)", "8,", "a", "8(x2")


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        *(
            ({HOSTS: text}, f"{HOSTS} is {text!r}, which is no Slurm host list")
            for text in BROKEN_HOSTS
        ),
        *(
            ({TASKS: text}, f"{TASKS} is {text!r}, which is no list of tasks per node")
            for text in BROKEN_TASKS
        ),
        (
            {HOSTS: "n[1-3]", TASKS: "8,7,8"},
            "host 'n2' has 7 tasks but others have 8 (SLURM_STEP_TASKS_PER_NODE)",
        ),
        ({HOSTS: "n[1-3]"}, "names 3 hosts but SLURM_STEP_TASKS_PER_NODE has tasks on 2"),
        (
            {"SLURM_STEP_NUM_TASKS": "9"},
            "SLURM_STEP_NUM_TASKS is 9 but SLURM_STEP_TASKS_PER_NODE adds up to 8",
        ),
        ({KIND: "spiral"}, "SLURM_DISTRIBUTION is 'spiral', an unknown distribution"),
        ({KIND: "plane"}, "nor SLURM_DIST_PLANESIZE gives the plane's size"),
        ({KIND: "arbitrary"}, "SLURM_ARBITRARY_NODELIST"),
        (
            {KIND: "arbitrary", "SLURM_ARBITRARY_NODELIST": "n0,n1"},
            "does not put 4 tasks on each of n0, n1",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "eight"},
            "SLURM_STEP_NUM_TASKS is 'eight'; it must be a whole number",
        ),
        ({"SLURM_STEP_NUM_TASKS": "-8"}, "SLURM_STEP_NUM_TASKS is '-8'"),
        ({"SLURM_PROCID": "8"}, "rank 8 (slurm: SLURM_PROCID) is out of range"),
        (
            {"SLURM_PROCID": "5", "SLURM_LOCALID": "2"},
            "rank 5 has local rank 2 (slurm: SLURM_LOCALID)",
        ),
        ({"SLURM_PROCID": "5", "SLURM_NODEID": "0"}, "rank 5 has node 0 (slurm: SLURM_NODEID)"),
    ],
)
def test_broken_and_contradicting_variables_are_refused_by_name(
    more: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        discover(step(2, 4, **more))


@pytest.mark.parametrize(
    ("env", "shape"),
    [
        # Older programs and batch scripts see the job's variables only.
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}, (2, 4)),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}, (2, 4)),
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "4"}, (4, 2)),
        ({"SLURM_TASKS_PER_NODE": "3(x2)", "SLURM_NODELIST": "n[1-2]"}, (2, 3)),
        ({"SLURM_NPROCS": "3"}, (1, 3)),
    ],
)
def test_missing_variables_are_made_up_from_the_others(
    env: dict[str, str], shape: tuple[int, int]
) -> None:
    topology = discover(env)
    assert (topology.nodes, topology.ranks_per_node) == shape


def test_totals_that_do_not_spread_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"7 tasks on 2 nodes .* cannot be spread evenly"):
        discover({"SLURM_NTASKS": "7", "SLURM_NNODES": "2"})


@pytest.mark.parametrize(
    ("per_node", "expected", "linked"),
    [(8, (2, 4, 2), True), (4, (2, 4, 1), False), (16, (2, 16, 1), False)],
)
def test_a_known_cluster_lends_its_packages_if_its_nodes_are_full(
    per_node: int, expected: tuple[int, int, int], linked: bool
) -> None:
    topology = discover(step(2, per_node, SLURM_CLUSTER_NAME="frontier"))
    assert shape(topology) == expected
    assert bool(topology.links) == linked
    assert "preset frontier" in topology.sources["ranks_per_gpu"]
