# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Mistakes in a block, a plan or a machine: each is an error of one line that names its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.plans import resolve
from zero_topo.config import ZeroTopoConfig
from zero_topo.plan import Plan
from zero_topo.topology import load_preset, resolve_topology
from zero_topo.topology.model import Link, Topology
from zero_topo.topology.presets import emulated_from_json, load_machine

BLOCKS: list[tuple[Any, list[str]]] = [
    ({"sync": {"mode": "tagc", "density": 0.1}}, ["density", "theta"]),
    ({"sync": {"mode": "tagc", "ratio": 3}}, ["ratio", "3", "2, 4 or 10"]),
    ({"sync": {"mode": "tagc", "theta": 1.0}}, ["theta", "1.0"]),
    ({"shceme": "topo"}, ["zero_topo.shceme", "'scheme'"]),
    ({"quantize": {"weigths": "int8"}}, ["zero_topo.quantize.weigths", "'weights'"]),
    ({"scheme": "tpo"}, ['zero_topo.scheme: "tpo"', "'topo'", "'zero3'"]),
    ({"sync": {"mode": "dens"}}, ['zero_topo.sync.mode: "dens"', "'dense'"]),
    ({"sync": {"reduce": "all"}}, ["zero_topo.sync.reduce", "'all_reduce'"]),
    ({"quantize": {"gradients": "nf8"}}, ["zero_topo.quantize.gradients", "'nf4'"]),
    ({"weights": "gpus"}, ['zero_topo.weights: "gpus"', "'gpu'"]),
    ({"weights": 2.0}, ["zero_topo.weights: 2.0"]),
    ({"optimizer": "2"}, ['zero_topo.optimizer: "2"']),
    ({"topology": 3}, ["zero_topo.topology", "3"]),
    ([1], ["zero_topo", "[1]"]),
    ({"weights": "gpu", "gradients": "node"}, ["optimizer missing"]),
    ({"report": -1, "overlap": 2}, ["zero_topo.report", "zero_topo.overlap"]),
]
UNRESOLVED: list[tuple[dict[str, Any], list[str]]] = [
    ({"weights": "node", "gradients": "gpu", "optimizer": "world"}, ["gradients degree 2"]),
    ({"scheme": "topo", "optimizer": "gpu"}, ["optimizer degree 2"]),
    ({"scheme": "topo", "weights": 3}, ["weights degree 3", "8"]),
    ({"scheme": "zero3", "secondary": 16}, ["secondary degree 16"]),
]
PLANS: list[tuple[tuple[Any, ...], list[str]]] = [
    ((8, 2, None, 4, 3), ["optimizer degree 3", "8"]),
    ((8, 4, None, 2, 8), ["weights degree 4", "gradients degree 2"]),
    ((8, 2, None, 8, 4), ["gradients degree 8", "optimizer degree 4"]),
    ((8, 0, None, 8, 8), ["weights degree 0"]),
    ((12, 6, 4, 12, 12), ["secondary degree 4", "weights degree 6"]),
    ((0, 1, None, 1, 1), ["world size 0"]),
    ((8, 2, None, 4, 8, None, 3), ["inner degree 3"]),
    ((17, 1, None, 1, 17, (0,) * 17), ["order [0, 0"]),
]
TREES: list[tuple[dict[str, Any], list[str]]] = [
    ({"nodes": 0}, ["0"]),
    ({"memory_per_rank": -1}, ["memory_per_rank"]),
    ({"order": (0, 1)}, ["2", "16 ranks"]),
    ({"order": (*range(15), 16)}, ["order[15] is 16"]),
    ({"order": (*range(15), 3)}, ["3 and 15"]),
    ({"hosts": ("a",)}, ["1 hosts", "2 nodes"]),
    ({"hosts": ("a", "a")}, ["'a'"]),
    ({"links": {"noed": Link(1.0, 0.0)}}, ["'node'"]),
]
LINKS = [(0, 0), (-1, 0), (float("inf"), 0), (float("nan"), 0), (1, -1), (1, float("nan"))]
SHAPE = {"nodes": 2, "gpus_per_node": 4, "ranks_per_gpu": 2}
JSON: list[tuple[dict[str, Any], list[str]]] = [
    ({"nodes": 2, "gpus_per_node": 4, "gcds_per_gpu": 2}, ["'ranks_per_gpu'"]),
    (SHAPE | {"nodes": "2"}, ['"2"']),
    (SHAPE | {"links": {"node": {"bandwith": 1, "latency": 0}}}, ["'bandwidth'"]),
    (SHAPE | {"hosts": "ab"}, ["hosts"]),
    (SHAPE | {"sources": {"nodes": 1}}, ["sources.nodes", "1"]),
]
SETTINGS: list[tuple[Any, list[str]]] = [
    ({"emulated": {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}}, ["8 ranks", "4"]),
    ("frontire", ["frontire", "frontier"]),
    ({"nodes": 1, "gpus_per_node": 4, "ranks_per_gpu": 1, "hosts_per_node": 3}, ["3"]),
    (None, ["None", "'auto'"]),
]
RANKS: list[tuple[int, list[str]]] = [
    (4, ["4", "8 ranks per node", "emulated"]),
    (12, ["12", "emulated"]),
    (0, ["0"]),
]
MACHINES = [
    ("fronter", ["'fronter'", "'frontier"]),
    ("LUMI", ["'LUMI'", "'lumi-g"]),
    ("", ["''", "known"]),
]
EMULATED: list[tuple[dict[str, int], list[str]]] = [
    ({"nodes": 2, "gpus_per_node": 2}, ["'gcds_per_gpu'"]),
    (SHAPE, ["'gcds_per_gpu'"]),
    ({"nodes": 2, "gpus_per_node": -2, "gcds_per_gpu": 2}, ["gpus_per_node", "-2"]),
]


def tree(fields: dict[str, Any]) -> Topology:
    """A machine of 16 ranks with these fields."""
    return Topology(**{"name": "test", **SHAPE, **fields})


MAKERS: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "block": (ZeroTopoConfig.parse, BLOCKS),
    "resolved": (lambda block: resolve(**block), UNRESOLVED),
    "plan": (lambda degrees: Plan(*degrees), PLANS),
    "tree": (tree, TREES),
    "link": (lambda rates: Link(*rates), [(rates, ["Link"]) for rates in LINKS]),
    "description": (Topology.from_json, JSON),
    "setting": (lambda setting: resolve_topology(setting, 4), SETTINGS),
    "ranks": (lambda ranks: load_preset("frontier", ranks), RANKS),
    "machine": (load_machine, MACHINES),
    "emulated": (emulated_from_json, EMULATED),
}
CASES = [(make, *row) for make, rows in MAKERS.values() for row in rows]
NAMES = [f"{name} {row[0]}" for name, (_, rows) in MAKERS.items() for row in rows]


@pytest.mark.parametrize(("make", "given", "words"), CASES, ids=NAMES)
def test_a_mistake_is_one_line_that_names_it(
    make: Callable[[Any], object], given: Any, words: list[str]
) -> None:
    """With the value, and the nearest right one where there is one."""
    with pytest.raises(ValueError) as caught:
        make(given)
    line = str(caught.value)
    assert [word for word in words if word not in line] == []
    assert "\n" not in line or make in (tree, MAKERS["link"][0])  # pydantic's own
