# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Slurm's host lists, tasks per node and distributions put every rank on the host on which Slurm starts it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.topology import discover
from zero_topo.topology.probes import slurm

SIZES = st.integers(1, 6)


def step(hosts: list[str], per_node: int, distribution: str | None = "block", **more: str) -> dict[str, str]:
    """The variables of an srun step, without those of a single task."""
    env = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": ",".join(hosts),
        "SLURM_STEP_NUM_NODES": str(len(hosts)),
        "SLURM_STEP_NUM_TASKS": str(len(hosts) * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{len(hosts)})",
        "SLURM_DISTRIBUTION": distribution or "",
    }
    return {**env, **more}


def hosts_of(env: dict[str, str]) -> list[str]:
    """The host of each rank according to the discovered topology."""
    topology = discover(env)
    assert topology.hosts is not None
    return [topology.hosts[topology.coordinates(rank)[0]] for rank in range(topology.world_size)]


def deal(hosts: list[str], per_node: int, plane: int) -> list[str]:
    """Slurm's documented plane distribution, dealt task by task: ``plane`` tasks to each host with room, in turn."""
    room = dict.fromkeys(hosts, per_node)
    tasks: list[str] = []
    while any(room.values()):
        for host in hosts:
            count = min(plane, room[host])
            tasks += [host] * count
            room[host] -= count
    return tasks


NAMES = st.integers(1, 6).map(lambda n: [f"node{i:03d}" for i in range(1, n + 1)])


@given(
    NAMES, SIZES, st.sampled_from([None, "block", "*", "block:cyclic", "block:block:cyclic", "block,NoPack", "*:block"])
)
def test_block_fills_host_after_host(hosts: list[str], per_node: int, distribution: str | None) -> None:
    env = step(hosts, per_node, distribution)
    assert hosts_of(env) == [host for host in hosts for _ in range(per_node)]
    assert discover(env).order is None


@given(NAMES, SIZES, st.sampled_from(["cyclic", "cyclic:block", "cyclic:cyclic:fcyclic", "Cyclic,Pack"]))
def test_cyclic_deals_single_tasks(hosts: list[str], per_node: int, distribution: str) -> None:
    env = step(hosts, per_node, distribution)
    assert hosts_of(env) == [hosts[rank % len(hosts)] for rank in range(len(hosts) * per_node)]


@given(NAMES, SIZES, st.integers(1, 8), st.booleans())
def test_plane_deals_blocks_of_its_size(hosts: list[str], per_node: int, plane: int, separate: bool) -> None:
    env = step(hosts, per_node, "plane" if separate else f"plane={plane}", SLURM_DIST_PLANESIZE=str(plane))
    assert hosts_of(env) == deal(hosts, per_node, plane)


@given(NAMES, SIZES, st.data())
def test_arbitrary_follows_the_list_of_tasks(hosts: list[str], per_node: int, data: st.DataObject) -> None:
    tasks = data.draw(st.permutations([host for host in hosts for _ in range(per_node)]))
    env = step(hosts, per_node, "arbitrary", SLURM_ARBITRARY_NODELIST=",".join(tasks))
    assert hosts_of(env) == tasks


@given(SIZES, SIZES, st.integers(1, 8))
def test_placements_are_permutations_that_keep_ranks_ascending_on_a_node(nodes: int, per_node: int, plane: int) -> None:
    order = slurm.placement(nodes, per_node, plane)
    assert sorted(order) == list(range(nodes * per_node))
    for node in range(nodes):
        ranks = sorted(range(len(order)), key=order.__getitem__)[node * per_node : (node + 1) * per_node]
        assert ranks == sorted(ranks)


def test_a_plane_that_does_not_divide_leaves_a_small_last_round() -> None:
    assert slurm.placement(2, 3, 2) == (0, 1, 3, 4, 2, 5)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=5))
def test_tasks_per_node_are_expanded(parts: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in parts)
    expected = [count for count, times in parts for _ in range(times)]
    assert slurm.expand_tasks_per_node(text, "T") == expected


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=30, unique=True).map(sorted))
def test_host_lists_are_expanded_in_order(numbers: list[int]) -> None:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges = ",".join(f"{run[0]:05d}-{run[-1]:05d}" if len(run) > 1 else f"{run[0]:05d}" for run in runs)
    assert slurm.expand_hosts(f"nid[{ranges}],login1", "L") == [*(f"nid{n:05d}" for n in numbers), "login1"]


@pytest.mark.parametrize("text", ["nid[1-3", "nid[3-1]", "nid[a]", "nid1]"])
def test_a_broken_host_list_names_its_variable(text: str) -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST is .*no Slurm host list"):
        discover(step([text], 1))


@pytest.mark.parametrize("text", ["8x2", "(x2)", "8(x)", "8,", "a"])
def test_broken_tasks_per_node_name_their_variable(text: str) -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE is .*no list of tasks per node"):
        discover(step(["a"], 1, SLURM_STEP_TASKS_PER_NODE=text))


def test_unequal_hosts_are_refused_by_name() -> None:
    env = step(["a", "b", "c"], 8, SLURM_STEP_NODELIST="n[1-3]", SLURM_STEP_TASKS_PER_NODE="8,7,8")
    with pytest.raises(ValueError, match=r"host 'n2' has 7 tasks but others have 8 \(SLURM_STEP_TASKS_PER_NODE\)"):
        discover(env)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-3]"}, "names 3 hosts but SLURM_STEP_TASKS_PER_NODE has tasks on 2"),
        ({"SLURM_STEP_NUM_TASKS": "9"}, "SLURM_STEP_NUM_TASKS is 9 but SLURM_STEP_TASKS_PER_NODE adds up to 8"),
        ({"SLURM_DISTRIBUTION": "spiral"}, "SLURM_DISTRIBUTION is 'spiral', an unknown distribution"),
        ({"SLURM_DISTRIBUTION": "plane"}, "nor SLURM_DIST_PLANESIZE gives the plane's size"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_ARBITRARY_NODELIST"),
        (
            {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_ARBITRARY_NODELIST": "a,b"},
            "does not put 4 tasks on each of a, b",
        ),
        ({"SLURM_STEP_NUM_TASKS": "eight"}, "SLURM_STEP_NUM_TASKS is 'eight'; it must be a whole number"),
        ({"SLURM_STEP_NUM_TASKS": "-8"}, "SLURM_STEP_NUM_TASKS is '-8'"),
        ({"SLURM_PROCID": "8"}, "rank 8 (slurm: SLURM_PROCID) is out of range"),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "2"}, "rank 5 has local rank 2 (slurm: SLURM_LOCALID)"),
        ({"SLURM_PROCID": "5", "SLURM_NODEID": "0"}, "rank 5 has node 0 (slurm: SLURM_NODEID)"),
    ],
)
def test_contradicting_variables_are_refused(more: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        discover(step(["a", "b"], 4, **more))
    assert complaint in str(error.value)


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
def test_missing_variables_are_made_up_from_the_others(env: dict[str, str], shape: tuple[int, int]) -> None:
    topology = discover(env)
    assert (topology.nodes, topology.ranks_per_node) == shape


def test_totals_that_do_not_spread_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"7 tasks on 2 nodes .* cannot be spread evenly"):
        discover({"SLURM_NTASKS": "7", "SLURM_NNODES": "2"})


@pytest.mark.parametrize(
    ("per_node", "shape", "linked"), [(8, (2, 4, 2), True), (4, (2, 4, 1), False), (16, (2, 16, 1), False)]
)
def test_a_known_cluster_lends_its_packages_if_its_nodes_are_full(
    per_node: int, shape: tuple[int, int, int], linked: bool
) -> None:
    topology = discover(step(["a", "b"], per_node, SLURM_CLUSTER_NAME="frontier"))
    assert (topology.nodes, topology.gpus_per_node, topology.ranks_per_gpu) == shape
    assert bool(topology.links) == linked
    assert "preset frontier" in topology.sources["ranks_per_gpu"]


@pytest.mark.parametrize("distribution", ["block", "cyclic", "plane=2", "plane=3"])
def test_every_rank_discovers_the_same(distribution: str) -> None:
    hosts, per_node = ["a", "b", "c"], 4
    whole: Any = discover(step(hosts, per_node, distribution))
    for rank in range(12):
        node, local = divmod(whole.position(rank), per_node)
        ids = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        assert discover(step(hosts, per_node, distribution, **ids)) == whole
