# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A run goes from two ranks to eight to four, over other machines and schemes, through DeepSpeed's
conversion.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import LaunchSettings, succeeded

PROGRAM = Path(__file__).parent / "programs" / "universal.py"
TIMEOUT_S = 300.0
Results = dict[str, dict[str, Any]]


STEPS = {"two": slice(0, 2), "eight": slice(2, 4), "four": slice(4, 6)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """By the word for the number of ranks what ran on them."""
    path = tmp_path_factory.mktemp("universal")
    return {verb: run(verb, path, ranks) for verb, ranks in (("two", 2), ("eight", 8), ("four", 4))}


def run(verb: str, path: Path, ranks: int) -> Results:
    """What the program found, launched on some ranks."""
    settings = LaunchSettings(path / f"{verb}_logs", ranks, TIMEOUT_S, forked=True)
    succeeded([str(PROGRAM), verb, str(path)], settings)
    found: Results = json.loads((path / f"{verb}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("ranks", "name"), [("eight", "topo"), ("four", "stock"), ("four", "hsdp")]
)
def test_other_ranks_another_machine_and_plan_go_on_from_it(
    ranks: str, name: str, found: dict[str, Results]
) -> None:
    """The very weights, and the optimizer states with them: losses are those of stock ZeRO-3 that
    never stopped.

    Those on four ranks come of a run that was itself taken up, on eight, of one on two.
    """
    mine = found[ranks][name]
    assert set(mine["different"].values()) == {0.0}
    assert mine["losses"] == pytest.approx(
        found["two"]["unbroken"]["losses"][STEPS[ranks]], abs=1e-5
    )


def test_other_ranks_are_sent_to_the_conversion(found: dict[str, Results]) -> None:
    """All of them, before anything has changed."""
    refused = found["eight"]["refused"]
    assert len(set(refused["lines"])) == 1
    for word in ("saved by 2 ranks", "has 8", "ds_to_universal", "load_universal"):
        assert word in refused["lines"][0]
    assert refused["kept"]


def test_residuals_arrive_on_other_ranks_as_on_their_own(found: dict[str, Results]) -> None:
    """Sent in one step on eight ranks, the losses are those of two ranks that each got its own
    residual back.
    """
    mine, theirs = found["eight"]["sends all"]["losses"], found["two"]["sends all"]["losses"]
    assert mine == pytest.approx(theirs, abs=1e-5)
    # else equal losses would say nothing: a run without residual learns otherwise
    assert abs(mine[1] - found["two"]["unbroken"]["losses"][3]) > 1e-3


def test_weights_alone_go_on_as_in_stock(found: dict[str, Results]) -> None:
    """Without optimizer states, masters are refilled from the weights, on every rank that holds a
    copy.
    """
    mine, theirs = found["four"]["hsdp_weights_only"], found["four"]["stock_weights_only"]
    assert mine["different"] == theirs["different"]
    assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
