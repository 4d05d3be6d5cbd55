# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Losses in README and docs are those of the records, and each is compared with stock ZeRO-3."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.training_setup import TrainingSetup
from tests.documents import ROOT, record, row
from zero_topo.units import format_bytes


def convergence_rows(name: str = "convergence", baseline: str = "stock") -> list[str]:
    """A table of losses, from the record committed; ``baseline`` is the table's name for what all
    are compared with.
    """
    content = record(name)
    rows = []
    for result in content["results"]:
        cells = [f"{result['evaluation']['loss']:.3f}"]
        for measure in ("last", "evaluation"):
            difference = result[measure]["difference"]
            cells += [f"{100 * difference['mean']:+.2f}%", f"{100 * difference['worst']:+.2f}%"]
        scheme = baseline if result["scheme"] == "stock" else result["scheme"]
        rows.append(f"| `{scheme}` | {' | '.join(cells)} |")
    return rows


def formats_rows() -> list[str]:
    """The table of what ranks send in one format or another; the other records have the baseline of
    the first.
    """
    found = *convergence_rows("formats", "exact"), *convergence_rows("formats-gpu")[1:]
    return [*found, convergence_rows("formats-paper")[-1]]


def defaults_rows() -> list[str]:
    """The table of the formats of schemes, of updated weights, and of sync with feedback, which has
    its own floor.
    """
    ours, sync = (
        convergence_rows("formats-defaults", "exact"),
        convergence_rows("formats-sync", "exact, 8 nodes"),
    )
    return [*ours, sync[0], *sync[2:]]


NODES = (8, 16, 32, 48)


def nodes_rows() -> list[str]:
    """The table of sync by the number of nodes: training loss against stock, and bits of a weight
    in a step.
    """
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    jobs: dict[str, Mapping[str, Any]] = {}
    numel = 0
    for nodes in NODES:
        names = [f"sparse-nodes-{nodes}{part}" for part in ("", "-others", "-scape")]
        for name in [*names, *(["formats-sync"] if nodes == NODES[0] else [])]:
            if not (ROOT / f"benchmarks/records/{name}.json").exists():
                continue
            content = record(name)
            numel = TrainingSetup(**content["settings"]["setup"]).parameters
            jobs |= {job["scheme"]: job for job in content["settings"]["jobs"]}
            for result in content["results"]:
                if result["crossing_bytes"] is not None:
                    found.setdefault(result["scheme"], {})[nodes] = result
    rows = []
    for scheme, by_nodes in found.items():
        cells = [f"`{scheme}`", _sync_cell(jobs[scheme]["block"]), jobs[scheme]["optimizer"]]
        cells += [_gap(by_nodes.get(nodes)) for nodes in NODES]
        bits = [
            f"{8 * by_nodes[nodes]['crossing_bytes'] / numel:.1f}"
            for nodes in (min(by_nodes), max(by_nodes))
        ]
        rows.append(row([*cells, " to ".join(dict.fromkeys(bits))]))
    return rows


def _gap(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "-"
    difference = result["last"]["difference"]
    return f"{100 * difference['mean']:+.2f}% ({len(difference['by_seed'])})"


def beginning_rows() -> list[str]:
    """The table of what a dense beginning and a longer training change, on eight nodes."""
    rows = []
    for name in ("sparse-nodes-8", "sparse-nodes-8-begin", "sparse-nodes-8-long"):
        steps = str(record(name)["settings"]["steps"])
        found = [cells for cells in _trainings(name) if cells[0] != "`chaos`"]
        rows += [row([cells[0], cells[1], steps, *cells[3:5], cells[6]]) for cells in found]
    return rows


def restart_rows() -> list[str]:
    """The table of residuals lost in the middle of a training: training loss against the unbroken
    run of each seed, and one run moved by 1e-6.
    """
    results = {result["scheme"]: result for result in record("sparse-restart")["results"]}
    by_seed = {name: of["last"]["difference"]["by_seed"] for name, of in results.items()}

    def shares(name: str, other: str) -> list[float]:
        unbroken = by_seed[name]
        changed = by_seed[f"{name}-{other}"]
        return [100 * ((1 + value) / (1 + unbroken[seed]) - 1) for seed, value in changed.items()]

    rows = []
    for name in ("ternary-aged", "oktopk-sharded-aged-5", "oktopk-sharded-aged-1"):
        lost = shares(name, "restart")
        (moved,) = shares(name, "changed")
        seeds = f"{min(lost):+.2f} to {max(lost):+.2f}"
        cell = f"{statistics.mean(lost):+.2f}% ({seeds})"
        rows.append(row([f"`{name}`", cell, f"{moved:+.2f}%"]))
    return rows


def resident_rows() -> list[str]:
    """The table of weights stored as INT8, from the record committed: first 100 steps, last tenth,
    evaluation.
    """
    content = record("resident")
    curves, rows = content["curves"], []
    for result in content["results"]:
        own = curves[result["scheme"]]
        early = [
            sum(losses[:100]) / sum(curves["stock"][seed][:100]) - 1 for seed, losses in own.items()
        ]
        cells = [f"`{result['scheme']}`"]
        for shares in (
            early,
            *(
                list(result[key]["difference"]["by_seed"].values())
                for key in ("last", "evaluation")
            ),
        ):
            cells += [
                f"{100 * found(shares):+.2f}%" for found in (statistics.mean, statistics.median)
            ]
            cells += [f"{100 * min(shares):+.2f} to {100 * max(shares):+.2f}%"]
        rows.append(row(cells))
    return rows


def drift_rows(name: str) -> list[str]:
    """The table of one long training, from the record committed: each thousand steps."""
    curves = {scheme: seeds["0"] for scheme, seeds in record(name)["curves"].items()}
    rows = []
    steps = len(curves["stock"])
    for begin in range(0, steps, 1000):
        end = min(begin + 1000, steps)
        stock, *others = (statistics.mean(losses[begin:end]) for losses in curves.values())
        shares = [f"{100 * (other / stock - 1):+.2f}%" for other in others]
        rows.append(row([f"{begin + 1:,} to {end:,}", f"{stock:.3f}", *shares]))
    return rows


def training_rows(name: str) -> list[str]:
    """A table of trainings with sparse sync, from the record committed; each against stock, as the
    record has it.
    """
    return [row(cells) for cells in _trainings(name)]


def rates_rows() -> list[str]:
    """The table of optimizers at rates of their own, from the records: stock is at one rate, the
    floor of the first.
    """
    rows, floor = [], "`chaos`"
    first, *others = (_trainings(f"sparse-rates{part}") for part in ("", "-above", "-aged"))
    for scheme, *cells in [
        *first,
        *(cells for found in others for cells in found if cells[0] != floor),
    ]:
        name, _, rate = scheme.strip("`").partition("@")
        rows.append(row([f"`{name}`", cells[0], cells[1], rate or "-", *cells[2:-1]]))
    return rows


def papers_rows() -> list[str]:
    """The table of the papers' own settings, from the records of 400 and of 1,600 steps: each
    scheme against stock in as many.
    """
    rows = []
    for name in ("papers-400", "papers-1600"):
        steps = f"{record(name)['settings']['steps']:,}"
        for scheme, settings, optimizer, *cells in _trainings(name):
            plain, _, rate = scheme.strip("`").partition("@")
            shown = [f"`{plain}`", settings, optimizer, rate or "0.002", steps, cells[1], cells[3]]
            rows.append(row(shown))
    return rows


def aged_rows() -> list[str]:
    """The table of AgedAdamW behind sparse sync, by nodes, from the records: one floor, from that
    of ternary.
    """
    rows = []
    more: tuple[tuple[int, tuple[str, ...]], ...] = (
        (2, ()),
        (4, ("feedback",)),
        (8, ("denser", "feedback")),
    )
    for nodes, names in more:
        floor, *longer = _trainings(f"sparse-ternary-{nodes}")
        records = ("aged", "sharded", *names)
        others = [
            of
            for name in records
            for of in _trainings(f"sparse-{name}-{nodes}")
            if of[0] != floor[0]
        ]
        rows += [row([str(nodes), *cells]) for cells in (floor, *others, *longer)]
    return rows


def larger_rows() -> list[str]:
    """The table of a larger model with sparse sync, from the record committed: one seed, whose mean
    is its worst.
    """
    return [
        row([cells[column] for column in (0, 1, 2, 4, 6, 8)]) for cells in _trainings("sparse-20m")
    ]


def muon_rows() -> list[str]:
    """The table of Muon, from the record committed: each scheme against `muon` with the same
    seed.
    """
    content = record("muon-4")
    jobs = {job["scheme"]: job for job in content["settings"]["jobs"]}
    results = {
        result["scheme"]: result for result in content["results"] if result["scheme"] != "chaos"
    }
    rows = []
    for name, result in results.items():
        cells = [f"`{name}`", jobs[name]["optimizer"], f"{result['evaluation']['loss']:.3f}"]
        for measure in ("last", "evaluation"):
            own, dense = (of[measure]["difference"]["by_seed"] for of in (result, results["muon"]))
            shares = [100 * ((1 + own[seed]) / (1 + dense[seed]) - 1) for seed in own]
            cells += [f"{statistics.mean(shares):+.2f}%", f"{max(shares, key=abs):+.2f}%"]
        rows.append(row(cells))
    return rows


def _trainings(name: str) -> list[list[str]]:
    """Of each scheme of a record of losses, but for stock itself, the cells of its row."""
    content = record(name)
    jobs = {job["scheme"]: job for job in content["settings"]["jobs"]}
    rows = []
    for result in content["results"]:
        if result["scheme"] == "stock":
            continue
        job = jobs[result["scheme"]]
        cells = [f"`{result['scheme']}`", _sync_cell(job["block"]), job["optimizer"]]
        cells.append(str(len(result["last"]["difference"]["by_seed"])))
        for measure in ("last", "evaluation"):
            difference = result[measure]["difference"]
            cells += [f"{100 * difference['mean']:+.2f}%", f"{100 * difference['worst']:+.2f}%"]
        crossing = result["crossing_bytes"]
        rows.append([*cells, "-" if crossing is None else format_bytes(round(crossing))])
    return rows


def _sync_cell(block: dict[str, Any] | None) -> str:
    sync = (block or {}).get("sync", {})
    words = [f"{key} {value}" for key, value in sync.items() if key != "mode"]
    return ", ".join(words).replace("_", " ") or "-"


LOSSES: Mapping[str, Callable[[], list[str]]] = MappingProxyType(
    {
        "convergence": convergence_rows,
        "formats": formats_rows,
        "formats, defaults": defaults_rows,
        "sparse, nodes": nodes_rows,
        "sparse, beginning": beginning_rows,
        "sparse, restart": restart_rows,
        "resident": resident_rows,
        "resident, long": partial(drift_rows, "resident-5000"),
        "sparse, long": partial(drift_rows, "sparse-3000"),
        "defaults, long": partial(drift_rows, "long-defaults"),
        "sync, long": partial(drift_rows, "long-sparse"),
        "sparse, large": larger_rows,
        "sparse training": partial(training_rows, "sparse-training"),
        "sparse, radius": partial(training_rows, "sparse-radius"),
        "sparse, scape": partial(training_rows, "sparse-scape"),
        "sparse, feedback": partial(training_rows, "sparse-feedback"),
        "sparse, rates": rates_rows,
        "sparse, papers": papers_rows,
        "sparse, aged": aged_rows,
        "muon": muon_rows,
    }
)
"""By the name in the page's comment: the rows that the record gives."""
