# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo topology``: a preset, or a description, as a tree and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from tests.commands import Run
from zero_topo.topology import Topology, load_preset
from zero_topo.topology.render import render_tree


def test_a_preset_is_drawn_with_as_many_nodes_as_ranks_fill(run: Run) -> None:
    for ranks, words in ((8, ()), (16, ("--world-size", "16"))):
        shown = run("topology", "--from", "frontier", *words)[1]
        assert shown == render_tree(load_preset("frontier", ranks)) + "\n"
        assert max(map(len, shown.splitlines())) <= 80


def test_the_json_is_a_description(run: Run, tmp_path: Path) -> None:
    _, out, _ = run("topology", "--from", "gb200-nvl72", "--ranks", "144", "--json")
    assert Topology.from_json(json.loads(out)) == load_preset("gb200-nvl72", 144)
    (tmp_path / "machine.json").write_text(out)
    assert run("topology", "--from", str(tmp_path / "machine.json"), "--json")[1] == out
