# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Builds the report of a run: bytes sent and stored, compared with the formulas and with ZeRO-3 on that machine.

``build_report`` writes ``report.json``, ``report.html``, ``loss.png`` and ``bytes.png`` next to the run's
``metrics.jsonl``. ``render`` of ``tables.py`` returns its tables as text, at once or later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median_high
from typing import Any, Protocol

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost import Workload, memory_bytes, padding_bytes, step_bytes
from zero_topo.observe import plots
from zero_topo.observe.files import RUN, write_png
from zero_topo.observe.page import HTML, write_page
from zero_topo.observe.runlog import FORMAT, METRICS, REPORT, Key, read_metrics
from zero_topo.plan import PHASES
from zero_topo.topology.model import LINKED_DOMAINS
from zero_topo.versions import used


class RunStats(Protocol):
    """Defines the part of ``zero_topo.stats(engine)`` that the report reads."""

    @property
    def config(self) -> ResolvedConfig: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def work(self) -> Workload: ...
    @property
    def accumulation_itemsize(self) -> int: ...
    @property
    def optimizer_itemsize(self) -> int: ...
    @property
    def phase_seconds(self) -> Mapping[str, float]: ...
    @property
    def sync_report(self) -> Mapping[str, float]: ...
    @property
    def on_device(self) -> bool: ...
    @property
    def predicted_memory(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class RankBytes:
    """The bytes that one rank sent and stored.

    Attributes:
        sent: (phase, domain) -> bytes sent in the last optimizer step.
        memory: role -> bytes stored.
        peak: peak memory of the device in bytes; on a CPU, of the process.
    """

    sent: Mapping[Key, int]
    memory: Mapping[str, int]
    peak: int


@dataclass(frozen=True)
class Run:
    """Describes a run.

    Attributes:
        title: one line about model and data.
        world_size: ranks.
        settings: the program's arguments.
        deepspeed: the DeepSpeed config.
    """

    title: str
    world_size: int
    settings: Mapping[str, Any]
    deepspeed: Mapping[str, Any]


def build_report(folder: Path, run: Run, stats: RunStats | None, ranks: Sequence[RankBytes]) -> dict[str, Any]:
    """Write a run's ``report.json`` and, if matplotlib is installed, its page and plots.

    Args:
        folder: the run's folder, with its ``metrics.jsonl`` if there is one.
        run: what was run.
        stats: of this rank's engine; None for a run under stock ZeRO-3.
        ranks: measurements in rank order, of every rank or only of rank 0; empty for stock ZeRO-3.

    Returns:
        The content of ``report.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = read_metrics(folder) if (folder / METRICS).is_file() else []
    steps = [line for line in metrics if "lr" in line]
    losses, evaluations = ([line[key] for line in metrics if key in line] for key in ("loss", "eval_loss"))
    seconds = [line["seconds"] for line in steps]
    pace = {key: _median([line[key] for line in steps if key in line]) for key in ("tokens_per_s", "tflops", "mfu")}
    report = {
        "format": FORMAT,
        "title": run.title,
        "world_size": run.world_size,
        "steps": len(steps),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "eval_loss": evaluations[-1] if evaluations else None,
        "seconds": round(sum(seconds), 1),
        "seconds_per_step": _median(seconds),
        "pace": {key: value for key, value in pace.items() if value is not None},
        "zero_topo": None if stats is None else measurements(stats, ranks),
        "settings": {key: _plain(value) for key, value in run.settings.items()},
        "deepspeed": _shareable(run.deepspeed),
        "versions": used(),
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if find_spec("matplotlib") is not None:
        write_png(plots.loss_curve(metrics), folder / "loss.png", RUN)
        if report["zero_topo"] is not None:
            write_png(plots.bytes_by_domain(report["zero_topo"]), folder / "bytes.png", RUN)
        write_page(report, metrics, folder / HTML)
    return report


def measurements(stats: RunStats, ranks: Sequence[RankBytes]) -> dict[str, Any]:
    """Return the ``zero_topo`` part of a report, of all given ranks."""
    config, work = stats.config, stats.work
    zero3 = resolve_config(ZeroTopoConfig.parse({"scheme": "zero3"}), config.topology)
    peaks = [rank.peak for rank in ranks]
    return {
        "ranks": len(ranks),
        "config": config.to_json(),
        "topology": config.topology.to_json(),
        "parameters": sum(work.numels),
        "micro_batches": stats.micro_batches,
        "sent": _sent_rows([rank.sent for rank in ranks], step_bytes(config, work), step_bytes(zero3, work)),
        "phase_seconds": dict(stats.phase_seconds),
        "sync": dict(stats.sync_report),
        "memory": _memory_rows(stats, zero3, [rank.memory for rank in ranks]),
        "peak": {
            "min": min(peaks),
            "max": max(peaks),
            "on_device": stats.on_device,
            "predicted": sum(stats.predicted_memory.values()),
        },
    }


def _sent_rows(
    measured: Sequence[Mapping[Key, int]], formula: Mapping[Key, int], zero3: Mapping[Key, int]
) -> list[dict[str, Any]]:
    """Return one row for each phase and domain that appears anywhere; bytes per rank and optimizer step."""
    seen = {key for table in (*measured, formula, zero3) for key in table}
    order = {key: place for place, key in enumerate((phase, domain) for domain in LINKED_DOMAINS for phase in PHASES)}
    rows = []
    for phase, domain in sorted(seen, key=lambda key: (order.get(key, len(order)), key)):
        values = [rank.get((phase, domain), 0) for rank in measured]
        row = {"domain": domain, "phase": phase, "min": min(values, default=0), "max": max(values, default=0)}
        rows.append(row | {"formula": formula.get((phase, domain), 0), "zero3": zero3.get((phase, domain), 0)})
    return rows


def _memory_rows(stats: RunStats, zero3: ResolvedConfig, measured: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Return one row for each role, bytes per rank; the formula is for Adam and includes the padding it lists."""
    itemsizes = stats.accumulation_itemsize, stats.optimizer_itemsize
    formula = memory_bytes(stats.config, stats.work, *itemsizes)
    padding = padding_bytes(stats.config, stats.work, *itemsizes)
    stock = memory_bytes(zero3, stats.work, *itemsizes)
    rows = []
    for role in dict.fromkeys([*formula, *(role for rank in measured for role in rank)]):
        values = [rank.get(role, 0) for rank in measured]
        row = {"role": role, "min": min(values, default=0), "max": max(values, default=0)}
        rows.append(row | {"formula": formula.get(role), "padding": padding.get(role), "zero3": stock.get(role)})
    return rows


def _median(values: Sequence[float]) -> float | None:
    return median_high(values) if values else None


def _shareable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without account keys, such as that of Comet's monitor, because users share reports."""
    hidden = {key: "hidden" if key == "api_key" else value for key, value in config.items()}
    return {key: _shareable(value) if isinstance(value, Mapping) else value for key, value in hidden.items()}


def _plain(value: object) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)
