# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint saved under `topo` on eight ranks and converted by DeepSpeed goes on under other plans and on four."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import LaunchSettings, launch

PROGRAM = Path(__file__).parent / "programs" / "universal.py"
TIMEOUT_S = 300.0
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """The unbroken run and those taken up from it on the same ranks; the directory with the universal checkpoint."""
    path = tmp_path_factory.mktemp("universal")
    return path, run("save", path, 8)


@pytest.fixture(scope="module")
def four(eight: tuple[Path, Results]) -> Results:
    """Runs taken up on half the ranks."""
    return run("load", eight[0], 4)


def run(verb: str, path: Path, ranks: int) -> Results:
    """What the program found, launched on some ranks."""
    settings = LaunchSettings(path / f"{verb}_logs", ranks, TIMEOUT_S, forked=["deepspeed", "zero_topo"])
    done = launch([str(PROGRAM), verb, str(path)], settings)
    assert done.returncode == 0, done.tails()
    found: Results = json.loads((path / f"{verb}.json").read_text())
    return found


@pytest.mark.parametrize("name", ["stock", "hsdp", "zero++", "topo"])
def test_another_plan_goes_on_from_it(name: str, eight: tuple[Path, Results]) -> None:
    """The very weights, and the optimizer states with them: losses are those of the unbroken run."""
    _, results = eight
    assert set(results[name]["different"].values()) == {0.0}
    assert results[name]["losses"] == pytest.approx(results["unbroken"]["losses"], abs=1e-5)


@pytest.mark.parametrize("name", ["stock", "hsdp", "topo"])
def test_another_world_size_goes_on_from_it(name: str, eight: tuple[Path, Results], four: Results) -> None:
    """Half the ranks with two micro-batches each, of the same global batch: the same losses."""
    assert set(four[name]["different"].values()) == {0.0}
    assert four[name]["losses"] == pytest.approx(eight[1]["unbroken"]["losses"], abs=1e-5)


def test_what_sparse_sync_owes_goes_along(eight: tuple[Path, Results], four: Results) -> None:
    """To half the ranks: the residuals' sum over all ranks and elements stays, and is not zero."""
    before = eight[1]["sparse"]["owed"]
    assert before != 0 and four["sparse"]["owed"] == pytest.approx(before, rel=1e-5)


def test_weights_alone_go_on_as_in_stock(four: Results) -> None:
    """Without optimizer states, masters are refilled from the weights, on every rank that holds a copy."""
    mine, theirs = four["hsdp_weights_only"], four["stock_weights_only"]
    assert mine["different"] == theirs["different"]
    assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
