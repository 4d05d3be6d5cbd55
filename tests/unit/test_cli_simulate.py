# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo simulate``: its table, its JSON, its files, its fit to a record, and its one-line
errors.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Run
from tests.plans import printed
from zero_topo.cost.step import STEP_PARTS

SMALL = (
    "simulate",
    "--model",
    "gpt2",
    "--gcds",
    "16,64",
    "--micro-batches",
    "1,2",
    "--schemes",
    "zero3,topo",
)


def test_json_holds_every_combination_and_what_follows_from_them(run: Run) -> None:
    found = printed(run, *SMALL)
    assert [(r["scheme"], r["ranks"], r["micro_batches"]) for r in found["results"]] == [
        (scheme, ranks, count)
        for scheme in ("zero3", "topo")
        for ranks in (16, 64)
        for count in (1, 2)
    ]
    for row in found["results"]:
        assert set(row["breakdown"]) == set(STEP_PARTS)
        assert sum(row["breakdown"].values()) == pytest.approx(row["seconds"])
        assert row["tflops_per_gpu"] > 0


def test_the_table_fits_80_columns(run: Run) -> None:
    """A wider one, of all plans on all of Frontier, is printed wider rather than cut."""
    status, out, _ = run("simulate", "--gcds", "75264")
    assert status == 0 and "75,264" in out
    table = [line.rstrip() for line in out.splitlines() if not line.startswith("- ")]
    assert max(map(len, table)) <= 80 and "…" not in out
    assert (
        "…"
        not in run(
            "plan", "--params", "1B", "--machine", "frontier", "--ranks", "75264", "--recommend"
        )[1]
    )


def test_rates_may_be_given_in_part_and_as_a_fit_prints_them(run: Run, tmp_path: Path) -> None:
    words = ("simulate", "--gcds", "64", "--schemes", "zero3", "--micro-batches", "1")
    preset, slow = (
        printed(run, *words, *more)
        for more in ((), ("--set", 'rates={"link_efficiency": {"world": 0.1}}'))
    )
    assert slow["results"][0]["seconds"] > preset["results"][0]["seconds"]
    assert slow["rates"] == {
        **preset["rates"],
        "link_efficiency": {**preset["rates"]["link_efficiency"], "world": 0.1},
    }
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(slow["rates"]))
    assert printed(run, *words, "--set", f"rates={file}") == slow


def test_a_machine_may_be_described(run: Run, tmp_path: Path) -> None:
    """A file or an object as the errors offer them; its own ranks count; rates that are not known
    are Frontier's.
    """
    described = printed(run, "topology", "--from", "frontier", "--world-size", "32")
    file, words = (
        tmp_path / "own.json",
        ("--schemes", "zero3", "--micro-batches", "1", "--overlap", "0"),
    )
    file.write_text(json.dumps(described))
    usual = printed(run, "simulate", "--machine", "frontier", "--gcds", "32", *words)
    assert printed(run, "simulate", "--machine", str(file), *words)["results"] == usual["results"]
    unknown = json.dumps({**described, "name": "mine"})
    assumed = printed(run, "simulate", "--machine", unknown, *words)
    assert assumed["results"] == usual["results"]
    assert assumed["notes"] == [
        "how fast a rank of mine computes is not known: frontier's is assumed"
    ]
    rates = ("--set", f"rates={json.dumps(usual['rates'])}")
    assert (
        printed(run, "simulate", "--machine", unknown, *rates, *words)["results"]
        == usual["results"]
    )


def test_the_figure_has_a_colour_a_scheme_ticks_at_the_ranks_and_names_what_is_assumed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before it is drawn: lines, ticks, legend, the notes under it."""
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_args, **_kwargs: seen.append(self))
    assert run(*SMALL, "--machine", "lumi-g", "--plot", str(tmp_path / "x.png"))[0] == 0
    job = (
        "gpt2 (124M parameters); ranks: {}; micro-batches (K) per optimizer step: {}, each of 1 "
        "x 1,024 tokens"
    )
    assert (
        job.format("16, 64", "1, 2") in seen[0].get_supxlabel()
        and "--overlap 0" in seen[0].get_supxlabel()
    )
    (axes,) = seen[0].axes
    lines = [line for line in axes.get_lines() if line.get_linestyle() != "None"]
    assert (
        len({line.get_color() for line in lines}) == 2
        and len({line.get_linestyle() for line in lines}) == 2
    )
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["16", "64"]
    legend = axes.get_legend()
    assert legend and [text.get_text() for text in legend.get_texts()] == [
        "zero3",
        "topo",
        "K = 1",
        "K = 2",
    ]
    assert (
        "assumed for lumi-g: latency" in seen[0].get_supxlabel()
        and "rings" in seen[0].get_supxlabel()
    )
