# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo simulate``: its table, its JSON, its files, its fit to a record, and its one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Run
from tests.launching import ROOT
from zero_topo.cost.simulator import PHASES

RECORD = str(ROOT / "benchmarks/records/cluster-t8.json")
SMALL = ("simulate", "--model", "gpt2", "--gcds", "16,64", "--micro-batches", "1,2", "--schemes", "zero3,topo")


def test_json_holds_every_combination_and_what_follows_from_them(run: Run) -> None:
    status, out, _ = run(*SMALL, "--json")
    found = json.loads(out)
    assert status == 0
    assert [(r["scheme"], r["ranks"], r["micro_batches"]) for r in found["results"]] == [
        (scheme, ranks, count) for scheme in ("zero3", "topo") for ranks in (16, 64) for count in (1, 2)
    ]
    for row in found["results"]:
        assert set(row["breakdown"]) == set(PHASES)
        assert sum(row["breakdown"].values()) == pytest.approx(row["step_s"])
        assert row["tflops_per_gpu"] > 0
    scaled = [(r["scheme"], r["ranks"], r["over"]) for r in found["scaling_efficiency"]]
    assert scaled == [(scheme, 64, 16) for scheme in ("zero3", "zero3", "topo", "topo")]
    assert {r["ranks"] for r in found["break_even"]} == {16, 64}


def test_the_table_fits_80_columns(run: Run) -> None:
    status, out, _ = run("simulate", "--gcds", "75264")
    assert status == 0 and "75,264" in out and "paper beats zero++ from" in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_plot_and_trace_are_written(run: Run, tmp_path: Path) -> None:
    plot, trace = tmp_path / "scaling.png", tmp_path / "step.json"
    status, out, _ = run(*SMALL, "--plot", str(plot), "--trace", str(trace))
    assert status == 0 and "Written:" in out
    assert plot.read_bytes().startswith(b"\x89PNG") and (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"zero3", "topo"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {"compute", "gather_forward", "scatter", "sync", "publish"} <= {event["cat"] for event in spans}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)


def test_calibrate_fits_some_schemes_and_predicts_the_others(run: Run) -> None:
    """Every step of the emulated cluster that was measured is predicted within 20 percent."""
    words = ("simulate", "--calibrate", RECORD, "--on", "zero3,topo", "--predict", "paper,zero++")
    status, out, _ = run(*words, "--json")
    found = json.loads(out)
    assert status == 0 and found["rates"]["peak_flops"] > 0
    rows = [(row["scheme"], row["micro_batches"], row["fitted"]) for row in found["results"]]
    fitted = {"zero3": True, "topo": True, "paper": False, "zero++": False}
    assert sorted(rows) == sorted((scheme, count, fitted[scheme]) for scheme in fitted for count in (1, 4, 8))
    assert all(0.8 < row["ratio"] < 1.2 for row in found["results"])
    status, out, _ = run(*words)
    assert status == 0 and "measured" in out and "predicted" in out


def test_rates_may_be_given_in_part_and_as_a_fit_prints_them(run: Run, tmp_path: Path) -> None:
    words = ("simulate", "--gcds", "64", "--schemes", "zero3", "--micro-batches", "1", "--json")
    preset, slow = (
        json.loads(run(*words, *more)[1]) for more in ((), ("--rates", '{"link_efficiency": {"world": 0.1}}'))
    )
    assert slow["results"][0]["step_s"] > preset["results"][0]["step_s"]
    assert slow["rates"] == {**preset["rates"], "link_efficiency": {**preset["rates"]["link_efficiency"], "world": 0.1}}
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(slow["rates"]))
    assert json.loads(run(*words, "--rates", str(file))[1]) == slow
