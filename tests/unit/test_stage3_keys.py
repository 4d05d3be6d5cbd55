# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What `docs/works-with.md` says of every key of DeepSpeed's stage 3 is what happens, in every
supported release.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.data import table
from tests.documents import tables
from tests.launching import ROOT
from tests.unit.test_config_deepspeed import changed
from zero_topo.config import deepspeed_problems
from zero_topo.config.deepspeed_parts import ZERO
from zero_topo.config.stock_keys import IGNORED, KEYS, translate
from zero_topo.cost.job import COUNTS
from zero_topo.versions import SUPPORTED, installed

RECORDED = table("stage3_keys")
PAGE = (ROOT / "docs/works-with.md").read_text()
STATED = {
    key: stated
    for row in tables()["stage3 keys"]
    for stated, keys in [row.strip("| ").split(" | ")]
    for key in re.findall(r"`(\w+)`", keys)
}
VALUES: dict[str, Any] = {"true": True, "false": False, "set": {}, "nvme": {"device": "nvme"}}
ALIASED = "stage3_"


def fields() -> dict[str, Any]:
    """The fields of the installed DeepSpeed."""
    found = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig.model_fields
    return dict(found)


def of(key: str, value: Any) -> dict[str, Any]:
    """A config with a key of stage 3."""
    return changed({f"{ZERO}.{key}": value})


def test_the_table_has_every_key_of_every_supported_release() -> None:
    """And no other; the releases were read from their source, the installed one is asked."""
    assert set(STATED) == set(RECORDED["keys"]) and f"has {len(STATED)} keys" in PAGE
    assert RECORDED["releases"][0] == SUPPORTED["deepspeed"].oldest
    assert RECORDED["releases"][-1] == SUPPORTED["deepspeed"].newest
    version = installed("deepspeed")
    if version in RECORDED["releases"]:
        at = RECORDED["releases"].index(version)
        order = {release: place for place, release in enumerate(RECORDED["releases"])}
        there = {
            key
            for key, (first, last) in RECORDED["keys"].items()
            if order[first] <= at <= order[last]
        }
        assert set(fields()) == there


@pytest.mark.parametrize("key", STATED)
def test_a_key_is_refused_ignored_or_left_as_it_is_as_the_table_says(key: str) -> None:
    """By a problem, by a line in the log, or by neither, with the value of the table."""
    stated = STATED[key]
    refused = re.search(r"rejected if (\w+)(, by DeepSpeed)?", stated)
    ignored = re.search(r"ignored if (\w+)", stated)
    if refused and not refused[2]:
        assert deepspeed_problems(of(key, VALUES[refused[1]]))
    if ignored:
        found = translate(of(key, VALUES[ignored[1]]))
        assert key not in found.config[ZERO] and len(found.lines) == 1 and not found.problems
        for other in ("auto", None):
            assert translate(of(key, other)).config == of(key, other)
    if stated == "block":
        assert key in KEYS
    if stated in ("as stock", "no effect"):
        for value in (True, False):
            assert (
                deepspeed_problems(of(key, value)) == [] and translate(of(key, value)).lines == ()
            )


def test_every_key_that_the_code_treats_is_in_the_table_as_what_it_is() -> None:
    """What is refused or ignored there is not said to be as stock."""
    for key in (*IGNORED, *KEYS):
        assert STATED[key.removeprefix(ALIASED)].split()[0] in ("ignored", "block"), key


def test_both_names_of_a_key_are_treated_alike() -> None:
    """DeepSpeed takes the name of a field as well as its alias."""
    counted = {name for names in COUNTS.values() for name in names}
    for name, field in fields().items():
        if field.alias is None:
            continue
        assert (name in counted) == (field.alias in counted) and (name in IGNORED) == (
            field.alias in IGNORED
        )
        assert bool(deepspeed_problems(of(name, True))) == bool(
            deepspeed_problems(of(field.alias, True))
        ), name
