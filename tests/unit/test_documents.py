# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What ``--json`` prints is what ``schema --of`` describes: every key, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Run
from tests.launching import ROOT
from zero_topo.cli.schema import document, documents

FRONTIER = ("--machine", "frontier", "--nodes", "2")
CONFIGS = sorted((ROOT / "configs").glob("*.json"))
COMMANDS = [
    ("topology", "--from", "frontier", "--world-size", "16"),
    ("plan", "--params", "1B", *FRONTIER),
    ("plan", "--params", "1B"),
    ("plan", "--params", "400B", *FRONTIER, "--tensor-parallel", "2"),
    ("migrate", str(ROOT / "configs/topo.json")),
    ("migrate", str(ROOT / "configs/zero3.json"), *FRONTIER),
    ("check", str(ROOT / "configs/dgx-h100.json"), "--params", "7B"),
    ("doctor",),
    *(
        ("check", str(path), "--world-size", "8")
        for path in CONFIGS
        if path.stem not in ("frontier", "dgx-h100")
    ),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:4])[-50:])
def test_what_a_command_prints_is_what_its_schema_describes(
    words: tuple[str, ...], run: Run
) -> None:
    status, out, err = run(*words, "--json")
    assert status in (0, 1) if words[0] == "doctor" else status == 0, err
    document(words[0]).validate_json(out)


@pytest.mark.parametrize("command", documents())
def test_each_schema_is_printed(command: str, run: Run, tmp_path: Path) -> None:
    status, out, err = run("schema", "--of", command)
    assert (status, err) == (0, "") and json.loads(out)


def test_a_command_without_json_has_no_schema(run: Run) -> None:
    status, _, err = run("schema", "--of", "launch")
    assert status == 2 and "choose one of topology, plan" in err
