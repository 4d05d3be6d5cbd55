# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From block to plan: the scheme tables, what overrides what, and what the user reads.

``tests/data/plans.json`` has blocks, the plan of each on two nodes of two GPUs of two ranks, and
words of the notes that the user reads.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data import table
from tests.plans import resolve
from zero_topo.config import ResolvedConfig
from zero_topo.topology.model import Topology

FLAT = Topology("flat", nodes=2, gpus_per_node=4, ranks_per_gpu=1)
ROWS = table("plans")
FORMATS = ("weights", "secondary", "gradients", "resident")


def described(config: ResolvedConfig) -> dict[str, Any]:
    """The parts of a plan; of a format its name and the values that share a scale."""
    formats = {name: getattr(config, f"{name}_spec") for name in FORMATS}
    return {
        "scheme": config.scheme,
        "degrees": list(config.plan.degrees().values()),
        "formats": {name: f"{spec}" for name, spec in formats.items() if spec},
        "sync": {"mode": config.sync.MODE, **config.sync.model_dump(exclude_defaults=True)},
        "kinds": sorted(config.kinds),
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row["block"]))
def test_a_block_gives_its_plan(row: dict[str, Any]) -> None:
    """Schemes are the rows of their papers; a key of the user overrides the scheme's, also with
    null, and what follows the weights follows. INT8 weights that only the scheme asks for give way
    to a key of the user.
    """
    config = resolve(**row["block"])
    assert described(config) == row["plan"]
    for words in row.get("notes", ()):
        assert [words in note for note in config.notes].count(True) == 1, words


def test_weights_that_every_rank_stores_are_said_unless_they_are_on_purpose() -> None:
    config = resolve(FLAT, scheme="topo")
    reported = (
        'gpu domain has one rank on this machine: every rank stores all weights; set "weights": '
        '"node" to shard them'
    )
    assert described(config)["degrees"] == [1, None, 4, 8] and config.secondary_spec is None
    assert reported in config.notes
    assert any(note.startswith("no secondary copy of the weights") for note in config.notes)
    on_purpose: dict[str, Any] = {"weights": "rank", "secondary": None}
    for block in (on_purpose, {}):
        quiet = resolve(scheme="topo", **block)
        assert not any("every rank stores all weights" in note for note in quiet.notes)
