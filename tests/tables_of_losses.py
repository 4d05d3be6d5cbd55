# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Losses in README and docs are those of the records, and each is compared with stock ZeRO-3."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.training_setup import TrainingSetup
from tests.documents import ROOT, record, row

FORMATS = MappingProxyType(
    {
        "stock": "nothing quantized",
        "chaos": "`chaos`",
        "paper": '`"scheme": "paper"`',
        "topo": '`"scheme": "topo"`',
        "publish-int4": '`"quantize": {"publish": "int4"}`',
    }
)
SYNC = MappingProxyType(
    {
        "stock": "nothing quantized, 8 nodes",
        "sync-nf4": '`"sync": {"mode": "quantized"}`',
    }
)
"""Results of a record that are shown, as a user writes them."""


def defaults_rows() -> list[str]:
    """The table of the formats of schemes, of updated weights, and of sync with feedback, which has
    its own baseline.
    """
    return [*_compared("formats-defaults", FORMATS), *_compared("formats-sync", SYNC)]


def _compared(name: str, shown: Mapping[str, str]) -> list[str]:
    results = {result["scheme"]: result for result in record(name)["results"]}
    return [
        row([words, f"{results[scheme]['evaluation']['loss']:.3f}", *_differences(results[scheme])])
        for scheme, words in shown.items()
    ]


def _differences(result: Mapping[str, Any]) -> list[str]:
    """From stock, in training and in evaluation: the mean over seeds, and the worst."""
    found = [result[measure]["difference"] for measure in ("last", "evaluation")]
    return [f"{100 * each[kind]:+.2f}%" for each in found for kind in ("mean", "worst")]


def sync_rows(name: str) -> list[str]:
    """The table of a record of modes of sync: mode, optimizer, and how the loss differs."""
    content = record(name)
    jobs = {job["scheme"]: job for job in content["settings"]["jobs"]}
    rows = []
    for result in content["results"][1:]:
        job = jobs[result["scheme"]]
        sync = job["block"]["sync"] if job["block"] else {"mode": result["scheme"]}
        rows.append(row([_sync_cell(sync), job["optimizer"], *_differences(result)]))
    return rows


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
        sync = jobs[scheme]["block"]["sync"]
        cells = [_sync_cell(sync), jobs[scheme]["optimizer"]]
        gaps = [by_nodes[nodes]["last"]["difference"]["mean"] for nodes in NODES]
        cells += [f"{100 * gap:+.2f}%" for gap in gaps]
        bits = [
            f"{8 * by_nodes[nodes]['crossing_bytes'] / numel:.1f}"
            for nodes in (min(by_nodes), max(by_nodes))
        ]
        rows.append(row([*cells, " to ".join(dict.fromkeys(bits))]))
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


def _sync_cell(sync: Mapping[str, Any]) -> str:
    """A mode and its keys, as a user writes them."""
    words = [f"{key} {json.dumps(value)}" for key, value in sync.items() if key != "mode"]
    return ", ".join([f"`{sync['mode']}`", *words])


LOSSES: Mapping[str, Callable[[], list[str]]] = MappingProxyType(
    {
        "formats, defaults": defaults_rows,
        "sparse, nodes": nodes_rows,
        "defaults, long": partial(drift_rows, "long-defaults"),
        "sync, long": partial(sync_rows, "long-sparse"),
    }
)
"""By the name in the page's comment: the rows that the record gives."""
