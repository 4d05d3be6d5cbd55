# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo plan``: the recommendation, the largest models, the picture, and wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.launching import ROOT
from tests.plans import config_file, printed
from zero_topo.config import SCHEMES

FRONTIER = ("--machine", "frontier", "--nodes", "48")


def test_a_recommendation_is_explained_in_text_and_ends_with_the_block(run: Run) -> None:
    status, out, _ = run(
        "plan", "--model", "llama-2-7b", "--machine", "dgx-a100", "--nodes", "4", "--recommend"
    )
    assert status == 0
    table, _, block = out.partition("\n{")
    assert set(json.loads("{" + block)["zero_topo"]) >= {"topology"}
    assert "the runner-up" in table and "it waits " in table
    assert (
        max(len(line) for line in table.splitlines() if not line.startswith("- ")) <= 80
        and "…" not in table
    )


def test_models_come_from_names_and_files(run: Run) -> None:
    yaml = str(ROOT / "neox_configs" / "frontier-20b.yml")
    sizes = [
        printed(run, "plan", *words, *FRONTIER, "--set", "scheme=zero3")["params"]
        for words in (("--model", "gpt-neox-20b"), ("--model", yaml))
    ]
    assert sizes == [pytest.approx(20_554_567_680, rel=1e-3)] * 2


def test_frozen_parameters_have_a_column_and_are_only_gathered(run: Run) -> None:
    """Of 7B with adapters: no optimizer state of them, and what is sent over the world is for the
    adapters alone.
    """
    words = ("--params", "7B", "--set", "trainable=4.2M", *FRONTIER, "--set", "scheme=topo")
    (row,), (whole,) = (
        printed(run, "plan", *words)["schemes"],
        printed(run, "plan", *words[:2], *words[4:])["schemes"],
    )
    (adapters,) = printed(run, "plan", "--params", "4.2M", *words[4:])["schemes"]
    assert {**row["memory"], "frozen": None} == {**adapters["memory"], "frozen": None}
    codes = 1 + 4 / 256  # of 7B on two GCDs, and the exact ones over the world
    assert row["memory"]["frozen"] == pytest.approx((7e9 - 4.2e6) * (codes / 2 + 2 / 384), rel=1e-3)
    assert row["sent_by_domain"]["world"] == adapters["sent_by_domain"]["world"]
    assert row["sent_by_domain"]["gpu"] == pytest.approx(whole["sent_by_domain"]["gpu"], rel=1e-3)
    status, out, _ = run("plan", *words)
    assert status == 0 and "4,200,000 of them trained" in out and "…" not in out
    status, _, err = run("plan", *words, "--recommend")
    assert status != 0 and "--set trainable would not count" in err
    status, _, err = run("plan", "--params", "7B", "--set", "trainable=8B", *FRONTIER)
    assert (
        status != 0 and "trainable 8,000,000,000 is more than the 7,000,000,000 parameters" in err
    )


def test_the_largest_models_are_ordered_as_their_shards(run: Run) -> None:
    report = printed(run, "plan", "--max-params", *FRONTIER)
    found = {name: row["max_params"] for name, row in report["schemes"].items()}
    assert set(found) == set(SCHEMES)
    assert (
        found["zero3"]
        > found["zero++"]
        > found["topo-zero2"]
        > found["paper"]
        > found["mics"]
        > 20e9
    )
    shorter = printed(
        run, "plan", "--max-params", *FRONTIER, "--set", "scheme=topo", "--seq", "512"
    )
    assert shorter["schemes"]["topo"]["max_params"] > found["topo"]
    status, out, _ = run("plan", "--max-params", *FRONTIER)
    assert status == 0 and f"{found['topo']:,}" in out


def test_a_deepspeed_config_brings_its_buckets_and_offload(run: Run, tmp_path: Path) -> None:
    """The largest model grows when the optimizer's states are in the host's memory."""
    path = config_file(
        tmp_path, {}, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}}
    )
    words = ("--max-params", "--machine", "frontier", "--nodes", "2", "--set", "scheme=topo")
    plain, offloaded = (
        printed(run, "plan", *words, *more) for more in ((), ("--set", f"deepspeed-config={path}"))
    )
    most, least = (found["schemes"]["topo"]["max_params"] for found in (offloaded, plain))
    assert most > 1.2 * least


def test_lossless_plans_differ_in_what_their_rows_show(run: Run) -> None:
    """Two plans of equal degrees and sync, of which one goes through the GPU, have rows of other
    words.
    """
    _, out, _ = run(
        "plan", "--model", "gpt-neox-20b", "--machine", "frontier", "--ranks", "64", "--recommend"
    )
    rows = [line.split(" no ") for line in out.splitlines() if line.startswith(" -  ")]
    shown = {(degrees.split()[-1], re.split(r"\s{2,}", rest.strip())[0]) for degrees, rest in rows}
    assert len(shown) == len(rows) == 8 and ("2/-/8/64", "ring, gpu") in shown


def test_the_ten_best_plans_are_drawn(run: Run, tmp_path: Path) -> None:
    """As many rows as plans up to ten, in the table's order; a picture without --recommend is
    refused.
    """
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *words: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *words, **options)

    words = ["plan", "--model", "llama-2-7b", "--machine", "frontier", "--ranks", "64", "--lossy"]
    file = tmp_path / "plans.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        status, out, _ = run(*words, "--recommend", "--plot", str(file))
    assert status == 0 and file.stat().st_size > 10_000 and f"Written: {file}" in out
    seconds, memory = drawn[0].axes
    names = [label.get_text() for label in seconds.get_yticklabels()]
    first = names[0].splitlines()[0]
    assert len({*names}) == len(names) == 10 and first in " ".join(out.split())
    assert len(memory.patches) % 10 == 0
    status, _, err = run(*[word for word in words if word != "--lossy"], "--plot", str(file))
    assert status == 2 and "--plot draws the plans of --recommend" in err


def test_a_wide_terminal_shows_bars(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the seconds, in their ratio; neither in a narrow terminal nor in a file."""
    words = [
        "simulate",
        "--machine",
        "frontier",
        "--ranks",
        "64",
        "--micro-batches",
        "1",
        "--schemes",
        "stock-zero3,topo",
    ]
    monkeypatch.setenv("COLUMNS", "160")
    assert "\N{FULL BLOCK}" not in run(*words)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    bars = [
        line.count("\N{FULL BLOCK}")
        for line in run(*words)[1].splitlines()
        if "\N{FULL BLOCK}" in line
    ]
    assert len(bars) == 2 and bars[0] == 40 and 30 <= bars[1] <= 34
    monkeypatch.setenv("COLUMNS", "75")
    assert "\N{FULL BLOCK}" not in run(*words)[1]
