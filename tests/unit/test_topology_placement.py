# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Device tools and launchers together: every group of the plan is exactly a unit of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.steps import deal, named, shape, step
from tests.unit.test_topology_devices import sample, text
from zero_topo.plan import Plan
from zero_topo.topology import Topology, discover, load_preset, resolve_topology
from zero_topo.topology.captures import Asked, ask_tools
from zero_topo.topology.devices import DeviceTree
from zero_topo.topology.placement import local_devices, reorder
from zero_topo.topology.probes import slurm
from zero_topo.topology.tools import Tool, run_tool

CLOSEST = (4, 5, 2, 3, 6, 7, 0, 1)
Asker = Callable[[], Asked]


def tree(name: str = "frontier_rocm_smi.txt") -> DeviceTree:
    return sample(name)


def says(devices: DeviceTree | None, *notes: str) -> Asker:
    return lambda: (devices, notes)


def never() -> Asked:
    raise AssertionError("a tool was asked though the machine is known")


def visible(devices: str) -> dict[str, str]:
    """The variables of a job of one node, whose local ranks see these devices."""
    ranks = str(devices.count(",") + 1)
    return {"WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "ROCR_VISIBLE_DEVICES": devices}


@given(
    st.integers(1, 4),
    st.sampled_from(["block", "cyclic", "plane=2", "plane=3", "arbitrary"]),
    st.permutations(range(8)),
    st.data(),
)
def test_groups_of_the_plan_hold_exactly_the_ranks_that_share_a_unit(
    nodes: int, distribution: str, bound: list[int], data: st.DataObject
) -> None:
    kind, _, size = distribution.partition("=")
    tasks = deal(nodes, 8, {"block": 8, "cyclic": 1}.get(kind, int(size or 1)))
    if kind == "arbitrary":
        tasks = data.draw(st.permutations(tasks))
    more = {
        "SLURM_GPU_BIND": f"map_gpu:{','.join(map(str, bound))}",
        "SLURM_ARBITRARY_NODELIST": named(tasks),
    }
    topology = discover(step(nodes, 8, distribution, **more), says(tree()))
    assert shape(topology) == (nodes, 4, 2)
    placements = [(node, bound[tasks[:rank].count(node)] // 2) for rank, node in enumerate(tasks)]
    on_gpu = {
        frozenset(rank for rank, placement in enumerate(placements) if placement == gpu)
        for gpu in placements
    }
    on_node = {
        frozenset(rank for rank, on in enumerate(tasks) if on == node) for node in range(nodes)
    }
    plan = Plan.build(topology, ("gpu", None, "node", "world"))
    assert set(map(frozenset, plan.groups(1, topology.degree("gpu")))) == on_gpu
    assert set(map(frozenset, plan.groups(1, topology.degree("node")))) == on_node


def test_closest_on_frontier_binds_in_the_order_of_the_user_guide() -> None:
    topology = discover(step(2, 8, SLURM_GPU_BIND="closest"), says(tree()))
    assert topology.order is None and shape(topology) == (2, 4, 2)
    assert topology.sources["devices"] == "SLURM_GPU_BIND=closest, by NUMA node"


@pytest.mark.parametrize(
    ("text", "per_node", "expected"),
    [
        ("map_gpu:4,5,2,3,6,7,0,1", 8, CLOSEST),
        ("verbose,map:4,5,2,3,6,7,0,1", 8, CLOSEST),
        ("map_gpu:0*2,1", 6, (0, 0, 1, 0, 0, 1)),
        ("per_task:1", 8, None),
        ("none", 8, None),
        ("", 8, None),
        ("closest", 4, None),
        ("closest", 8, CLOSEST),
    ],
)
def test_gpu_binds_of_slurm(text: str, per_node: int, expected: tuple[int, ...] | None) -> None:
    assert slurm.bound_devices({"SLURM_GPU_BIND": text}, per_node, tree().numa or ())[0] == expected


def test_a_broken_map_names_the_variable() -> None:
    with pytest.raises(ValueError, match="SLURM_GPU_BIND=map_gpu:4,x is no list of devices"):
        discover(step(1, 8, SLURM_GPU_BIND="map_gpu:4,x"), says(tree()))


def test_visible_devices_order_local_ranks() -> None:
    """With one entry per local rank, the list is the same for all of them, so it may be used."""
    for listed in ("0,2,1,3", "0000:C1:00.0,C9:00.0,0000:c6:00.0,ce:00.0"):
        topology = discover(visible(listed), says(tree()))
        assert shape(topology) == (1, 2, 2) and topology.order == (0, 2, 1, 3)
        assert topology.sources["devices"] == "ROCR_VISIBLE_DEVICES, one entry per local rank"


def test_a_single_visible_device_says_nothing_of_other_ranks() -> None:
    """With --gpus-per-task=1 each rank sees its own device only; the topology must not depend on
    which.
    """
    found = {
        discover(step(1, 8, ROCR_VISIBLE_DEVICES=str(device)), says(tree())) for device in range(8)
    }
    assert len(found) == 1


def test_nodes_that_use_different_devices_in_one_pattern_agree() -> None:
    for per_node, lists in ((1, ("3", "5")), (4, ("0,1,2,3", "6,7,4,5"))):
        one, other = (
            discover(step(2, per_node, CUDA_VISIBLE_DEVICES=text), says(tree())) for text in lists
        )
        assert one == other and one.sources == other.sources


@pytest.mark.parametrize(
    ("env", "tool", "expected", "note"),
    [
        (visible("0,1,2"), "frontier_rocm_smi.txt", (1, 3, 1), "use only some of its devices"),
        (step(2, 5), "dgx_a100_nvidia_smi.txt", (2, 5, 1), "sees 8 devices but the launcher has 5"),
        (step(2, 5), "old_nvidia_smi.txt", (2, 5, 1), "sees 4 devices but the launcher has 5"),
        (visible("4,5,6,7"), "old_nvidia_smi.txt", (1, 4, 1), "names the devices [4, 5, 6, 7]"),
    ],
    ids=[
        "GCDs that do not fill packages",
        "more devices",
        "fewer devices",
        "visible devices that are not there",
    ],
)
def test_a_tool_that_contradicts_the_launcher_is_noted_and_leaves_every_rank_a_gpu(
    env: dict[str, str], tool: str, expected: tuple[int, int, int], note: str
) -> None:
    topology = discover(env, says(tree(tool)))
    assert (
        shape(topology) == expected
        and not topology.links
        and note in topology.sources["device tools"]
    )


def test_a_node_in_full_use_that_lacks_a_die_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device 6 .* is in a package of 1 where others have 2"):
        discover(step(1, 7), says(tree().select(range(7))))


def test_a_tool_gives_links_and_says_so() -> None:
    topology = resolve_topology("auto", step(2, 8), 16, says(tree("dgx_h100_nvidia_smi.txt")))
    assert shape(topology) == (2, 8, 1) and topology.links["node"].bandwidth == 450e9
    assert (
        topology.sources["links"]
        == "nvidia-smi, NVLink taken for 25 GB/s a link, half of B200's; latency assumed"
    )
    assert topology.sources["nodes"].startswith("ranks (slurm")
    assert Topology.from_json(topology.to_json()) == topology


def test_a_group_without_a_launcher_is_still_asked_for_its_devices() -> None:
    assert shape(resolve_topology("auto", {}, 8, says(tree()))) == (1, 4, 2)


def test_no_tool_runs_where_the_machine_is_known() -> None:
    machine = {"nodes": 2, "gpus_per_node": 4, "ranks_per_gpu": 2}
    for setting in (
        "frontier",
        machine,
        {"emulated": {"nodes": 2, "gpus_per_node": 4, "gcds_per_gpu": 2}},
    ):
        resolve_topology(setting, step(2, 8), 16, never)
    preset = discover(step(2, 8, SLURM_CLUSTER_NAME="frontier"), never)
    assert preset.links == load_preset("frontier", 16).links
    assert discover({}, never).world_size == 1


def test_without_tools_nothing_changes() -> None:
    env = step(2, 8, "cyclic", SLURM_GPU_BIND="closest")
    assert (
        discover(env) == discover(env, says(None)) and "device tools" not in discover(env).sources
    )


@given(st.permutations(range(6)), st.permutations(range(3)))
def test_reordering_keeps_nodes(order: list[int], places: list[int]) -> None:
    moved = reorder(order, 6, places) or tuple(range(6))
    assert sorted(moved) == list(range(6)) and all(
        new // 3 == old // 3 for new, old in zip(moved, order, strict=True)
    )


def test_a_device_for_two_local_ranks_is_not_believed() -> None:
    devices, why = local_devices({"SLURM_GPU_BIND": "map_gpu:0,0,1,1"}, tree(), 4)
    assert devices is None and "[0, 0, 1, 1]" in why


class Runner:
    """Answers commands with captured text, and notes which tools were asked."""

    def __init__(self, **answers: str | Exception) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, command: tuple[str, ...]) -> str | None:
        self.asked.append(command[0].replace("-", "_"))
        answer = self.answers.get(self.asked[-1])
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_first_tool_that_knows_packages_ends_the_questions() -> None:
    run = Runner(amd_smi=text("frontier_amd_smi.json"))
    devices, notes = ask_tools(run, completing=())
    assert (
        devices is not None and devices.tool == "amd-smi" and run.asked == ["amd_smi"] and not notes
    )


def test_a_missing_or_failing_tool_is_passed_over_with_a_note() -> None:
    run = Runner(
        amd_smi=ValueError("`amd-smi` did not answer within 10 s"),
        rocm_smi="GPU0 GPU1\nGPU0 N/A\n",
        nvidia_smi=text("old_nvidia_smi.txt"),
    )
    devices, notes = ask_tools(run, completing=())
    assert devices is not None and devices.count == 4
    assert [note.split(":")[0] for note in notes] == ["amd-smi skipped", "rocm-smi skipped"]
    assert run.asked == ["amd_smi", "rocm_smi", "nvidia_smi"]
    topology = discover(step(1, 4), lambda: (devices, notes))
    assert "did not answer within 10 s" in topology.sources["device tools"]


def test_a_tool_without_packages_is_completed_by_the_next() -> None:
    old = (
        text("frontier_amd_smi_old.json")
        .replace("50000-", "0-")
        .replace("-200000", "-0")
        .replace("-100000", "-0")
    )
    run = Runner(amd_smi=old.replace("-50000", "-0"), rocm_smi=text("frontier_rocm_smi.txt"))
    devices, _ = ask_tools(run, completing=())
    assert devices is not None and devices.shape() == (4, 2) and devices.tool == "amd-smi"


def test_no_tool_is_no_tree_and_no_note() -> None:
    assert ask_tools(Runner()) == (None, ())
    assert ask_tools() == (None, ())


def test_what_completes_is_asked_only_about_devices_that_a_tool_found() -> None:
    extra = Tool("extra", lambda run: replace(tree("frontier_rocm_smi.txt"), tool="extra"))
    assert ask_tools(Runner(), completing=(extra,))[0] is None
    found = ask_tools(Runner(amd_smi=text("frontier_amd_smi.json")), completing=(extra,))[0]
    assert found is not None and found.numa == (3, 3, 1, 1, 0, 0, 2, 2)


def test_programs_are_run_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_tool((sys.executable, "-c", "print('hello')")) == "hello\n"
    assert run_tool(("no-such-tool-anywhere",)) is None
    with pytest.raises(ValueError, match="failed with exit status 3"):
        run_tool((sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr("zero_topo.topology.tools.TIMEOUT", 0.2)
    with pytest.raises(ValueError, match="did not answer within"):
        run_tool((sys.executable, "-c", "import time; time.sleep(60)"))
