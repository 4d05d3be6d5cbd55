# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Losses in README and docs are those of the records, and each is compared with stock ZeRO-3."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.training_setup import TrainingSetup
from tests.documents import record, row

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
    """The table of a record: scheme or mode of sync, optimizer, and how the loss differs."""
    content = record(name)
    jobs = {job["scheme"]: job for job in content["settings"]["jobs"]}
    return [
        row([*_cells(jobs[result["scheme"]]), *_differences(result)])
        for result in content["results"][1:]
    ]


NODES = (8, 16, 32, 48)


def nodes_rows() -> list[str]:
    """The table of sync by the number of nodes: training loss against stock, and bits of a weight
    in a step.
    """
    contents = [record(f"sparse-nodes-{nodes}") for nodes in NODES]
    numel = TrainingSetup(**contents[0]["settings"]["setup"]).parameters
    by_nodes = [{result["scheme"]: result for result in of["results"]} for of in contents]
    jobs = {job["scheme"]: job for job in contents[0]["settings"]["jobs"]}
    rows = []
    for scheme, job in jobs.items():
        results = [found[scheme] for found in by_nodes if scheme in found]
        if job["block"] and len(results) == len(NODES):
            gaps = [f"{100 * of['last']['difference']['mean']:+.2f}%" for of in results]
            bits = [f"{8 * of['crossing_bytes'] / numel:.1f}" for of in (results[0], results[-1])]
            rows.append(row([*_cells(job), *gaps, " to ".join(dict.fromkeys(bits))]))
    return rows


def _cells(job: Mapping[str, Any]) -> list[str]:
    """The scheme, or the mode of sync and its keys, as a user writes them, and the optimizer."""
    block = job["block"] or {}
    sync = block.get("sync", {"mode": block.get("scheme", job["scheme"])})
    words = [f"{key} {json.dumps(value)}" for key, value in sync.items() if key != "mode"]
    rate = f", rate {job['lr']:g}" if "lr" in job else ""
    return [", ".join([f"`{sync['mode']}`", *words]), job["optimizer"] + rate]


LOSSES: Mapping[str, Callable[[], list[str]]] = MappingProxyType(
    {
        "formats, defaults": defaults_rows,
        "sparse, nodes": nodes_rows,
        "losses, long": partial(sync_rows, "long"),
        "sparse, 800 steps": partial(sync_rows, "sparse-800"),
        "sparse, papers": partial(sync_rows, "sparse-papers"),
        "sparse, lost": partial(sync_rows, "sparse-lost"),
    }
)
"""By the name in the page's comment: the rows that the record gives."""
