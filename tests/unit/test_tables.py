# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What README and docs promise of records and keys."""

from __future__ import annotations

import re

import pytest

import zero_topo
from tests.documents import record, tables
from tests.launching import ROOT
from tests.tables import HELD_BY_TESTS, TABLES
from zero_topo.config import ZeroTopoConfig
from zero_topo.topology import preset_names

RECORDS = [
    *("formats-defaults", "formats-sync", "long", "sparse-800", "sparse-papers", "sparse-lost"),
    *(f"sparse-nodes-{nodes}" for nodes in (8, 16, 32, 48)),
]


@pytest.mark.parametrize("name", RECORDS)
def test_every_loss_is_compared_with_stocks(name: str) -> None:
    """With AdamW's, at the benchmark's rate, whatever the scheme's own are: never with a baseline
    of its own.
    """
    content = record(name)
    stock = [job for job in content["settings"]["jobs"] if job["scheme"] == "stock"]
    assert {job.get("optimizer", "AdamW") for job in stock} == {"AdamW"}  # older records name none
    assert not any("lr" in job for job in stock)
    baseline, *others = content["results"]
    for result in others:
        if result["scheme"] == "chaos":
            continue  # the floor may have fewer seeds
        for measure in ("last", "evaluation"):
            difference = result[measure]["difference"]
            assert difference["by_seed"].keys() == baseline[measure]["difference"]["by_seed"].keys()
            share = result[measure]["loss"] / baseline[measure]["loss"] - 1
            assert difference["mean"] == pytest.approx(share, abs=2e-3)


def test_the_table_of_keys_names_every_key() -> None:
    """Each key of the block and each preset is explained, and none that does not exist."""
    section = (
        (ROOT / "docs/keys.md").read_text().partition("These are all keys")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \|", section, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(ZeroTopoConfig.model_fields)
    assert {name for name in preset_names() if f"`{name}`" in section} == set(preset_names())


def test_the_api_page_has_every_public_name() -> None:
    """Each name that ``zero_topo`` offers has its section, and no other has one."""
    named = re.findall(r"^ +heading: zero_topo\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(named) == sorted(name for name in zero_topo.__all__ if name != "__version__")


def test_every_table_of_the_documents_has_its_rows() -> None:
    """A table whose comment names no rows would never be brought up to date."""
    assert sorted(tables()) == sorted([*TABLES, *HELD_BY_TESTS])
