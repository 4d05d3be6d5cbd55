# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo topology``: captured output, several sources, and this machine's devices."""

from __future__ import annotations

import json

import pytest

from tests.commands import Run
from tests.steps import shape
from tests.unit.test_topology_devices import SAMPLES, sample
from zero_topo.cli.topology import this_machine
from zero_topo.topology import Topology, load_preset
from zero_topo.topology.captures import Asked
from zero_topo.topology.render import recommended_order, render_tree


@pytest.fixture
def run(run: Run) -> Run:
    """Runs ``zero-topo topology`` outside of any job; each word is a source unless it is an option
    or its number.
    """

    def call(*words: str) -> tuple[int, str, str]:
        parts = [
            ("--from", word) if not word.startswith("-") and not word.isdecimal() else (word,)
            for word in words
        ]
        return run("topology", *(part for pair in parts for part in pair))

    return call


def path(name: str) -> str:
    return str(SAMPLES / name)


def test_captured_output_is_drawn_with_the_order_of_the_ranks(run: Run) -> None:
    status, out, _ = run(path("frontier_rocm_smi.txt"))
    assert status == 0
    for line in (
        "   `- 4 x gpu      2 ranks  200.00 GB/s per rank, 3.4 us",
        "recommended order of ranks: devices 4,5,2,3,6,7,0,1",
        "  srun --gpu-bind=map_gpu:4,5,2,3,6,7,0,1",
    ):
        assert line in out.splitlines()
    assert "ROCR_VISIBLE_DEVICES=4,5,2,3,6,7,0,1" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_warning_is_shown(run: Run) -> None:
    assert (
        "warning: rocm-smi shows XGMI links but no bandwidths"
        in run(path("frontier_rocm_smi.json"))[1]
    )


def test_the_order_of_sources_does_not_matter_but_their_trust_does(run: Run) -> None:
    names = [path("frontier_amd_smi.json"), path("frontier_rocm_smi.txt")]
    outs = {run(*names)[1], run(*names[::-1])[1]}
    assert len(outs) == 1 and "packages <- amd-smi" in outs.pop()


def test_captures_fill_as_many_nodes_as_there_are_ranks(run: Run) -> None:
    _, out, _ = run(path("frontier_matrix.txt"), "--world-size", "24", "--json")
    topology = Topology.from_json(json.loads(out))
    assert shape(topology) == (3, 4, 2)
    assert set(json.loads(out)["links"]) == {"gpu", "node"}
    status, _, err = run(path("frontier_matrix.txt"), "--world-size", "12")
    assert status == 2 and "12 ranks do not fill nodes of 8 devices" in err


def test_this_node_is_shown_with_its_devices_outside_of_a_job(run: Run) -> None:
    tree = sample("frontier_rocm_smi.txt")
    calls: list[int] = []

    def ask() -> Asked:
        calls.append(1)
        return tree, ("amd-smi skipped: broken",)

    found, (devices, notes) = this_machine(None, ask)
    assert found.ranks_per_gpu == 2 and devices is tree
    assert notes == ("amd-smi skipped: broken",) and len(calls) == 1
    assert this_machine(8, ask)[0].ranks_per_gpu == 2 and len(calls) == 2


def test_a_machine_without_tools_is_drawn_as_before(run: Run) -> None:
    for ranks, words in ((8, ()), (16, ("--world-size", "16"))):
        assert run("frontier", *words)[1] == render_tree(load_preset("frontier", ranks)) + "\n"
    assert run()[1].startswith("one process: 1 rank\n") and "node:" not in run()[1]


def test_the_order_without_numa_nodes_keeps_packages_together() -> None:
    matrix = sample("frontier_matrix.txt")
    assert recommended_order(matrix.select([0, 2, 4, 6, 1, 3, 5, 7])) == (0, 4, 1, 5, 2, 6, 3, 7)
