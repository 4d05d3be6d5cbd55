# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Builds the report of a run: bytes sent and stored, compared with the formulas and with ZeRO-3 on
that machine.

``build_report`` writes ``report.json``, ``report.html`` and its pictures next to the run's
``metrics.jsonl``. ``render`` of ``tables.py`` returns its tables as text, at once or later.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median_high
from typing import Any

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost import Workload, memory_bytes, step_bytes
from zero_topo.observe.page import write_page
from zero_topo.observe.runlog import FORMAT, METRICS, REPORT, Key, read_metrics
from zero_topo.observe.tables import measured_text
from zero_topo.plan import PHASES
from zero_topo.topology.model import LINKED_DOMAINS
from zero_topo.versions import used

RankBytes = tuple[Mapping[Key, int], Mapping[str, int], int]
"""What one rank sent in the last optimizer step, by (phase, domain); what it stores, by role; and
its peak memory.
"""


@dataclass(frozen=True)
class Stats:
    """Traffic, memory and times of an engine on this rank (``zero_topo.stats``); ``str`` returns
    tables.

    Attributes:
        config: the resolved block.
        steps: optimizer steps, skipped ones included; forward passes for an engine without an
            optimizer.
        micro_batches: micro-batches per optimizer step.
        step_bytes: ``(phase, domain)`` -> bytes this rank sent in the last optimizer step.
        total_bytes: ``(phase, domain)`` -> bytes this rank sent since the start.
        memory: role -> bytes stored by this rank, including states offloaded to the host.
        work: the model as input of the cost formulas.
        accumulation_itemsize: bytes per element of the gradient buffer.
        optimizer_itemsize: bytes per element of Adam's states, 12, or 8 if FP32 masters are the
            weights themselves; 4 less with AdamS, 1 more with AgedAdamW.
        calls: phase -> collectives since the start.
        phase_seconds: phase -> seconds of the last optimizer step in which the host worked on it or
            waited for it.
        sync_report: the mode of sync's report of the last step: densities, norms, counts.
        peak_memory: peak bytes of tensors on this rank's device; on a CPU, peak bytes of the
            process.
        on_device: whether ``peak_memory`` is that of a device.
        predicted_memory: role -> predicted bytes on this rank at the peak of a step;
            empty without an optimizer.
        experts: with expert parallelism, the plan and the model of the experts; bytes are counted
            in domains of their own, memory and calls with those of all other parameters.
        formula: bytes of a step by the host's own formula (FSDP2); None takes that of the DeepSpeed
            engine.
    """

    config: ResolvedConfig
    steps: int
    micro_batches: int
    step_bytes: dict[tuple[str, str], int]
    total_bytes: dict[tuple[str, str], int]
    memory: dict[str, int]
    work: Workload
    accumulation_itemsize: int
    optimizer_itemsize: int
    calls: dict[str, int]
    phase_seconds: dict[str, float]
    sync_report: dict[str, float]
    peak_memory: int
    on_device: bool
    predicted_memory: dict[str, int]
    experts: tuple[ResolvedConfig, Workload] | None = None
    formula: Mapping[Key, int] | None = None

    @property
    def parts(self) -> list[tuple[ResolvedConfig, Workload]]:
        """The plan and the model of all parameters but the experts, then those of the experts."""
        return [(self.config, self.work), *([self.experts] if self.experts else [])]

    def __str__(self) -> str:
        what = "optimizer steps" if self.optimizer_itemsize else "forward passes"
        return f"{self.steps} {what}\n\n{measured_text(measurements(self, [self.of_rank()]))}"

    def of_rank(self) -> RankBytes:
        """Return this rank's part of a report."""
        return self.step_bytes, self.memory, self.peak_memory


def build_report(
    folder: Path,
    stats: Stats | None,
    ranks: Sequence[RankBytes],
    *,
    title: str,
    world_size: int,
    settings: Mapping[str, Any],
    deepspeed: Mapping[str, Any],
) -> dict[str, Any]:
    """Write a run's ``report.json`` and, if matplotlib is installed, its page and plots.

    Args:
        folder: the run's folder, with its ``metrics.jsonl`` if there is one.
        stats: of this rank's engine; None for a run under stock ZeRO-3.
        ranks: measurements in rank order, of every rank or only of rank 0; empty for stock ZeRO-3.
        title: one line about model and data.
        world_size: ranks.
        settings: the program's arguments.
        deepspeed: the DeepSpeed config.

    Returns:
        The content of ``report.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = read_metrics(folder) if (folder / METRICS).is_file() else []
    report = {
        "format": FORMAT,
        "title": title,
        "world_size": world_size,
        **_of_steps(metrics),
        "zero_topo": None if stats is None else measurements(stats, ranks),
        "settings": {key: _plain(value) for key, value in settings.items()},
        "deepspeed": _shareable(deepspeed),
        "versions": used(),
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if find_spec("matplotlib") is not None:
        write_page(report, metrics, folder)
    return report


def _of_steps(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number, the losses and the time of the steps in a log."""
    steps = [line for line in metrics if "lr" in line]
    losses = [line["loss"] for line in metrics if "loss" in line] or [None]
    evaluations = [line["eval_loss"] for line in metrics if "eval_loss" in line] or [None]
    seconds = [line["seconds"] for line in steps]
    return {
        "steps": len(steps),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "eval_loss": evaluations[-1],
        "seconds": round(sum(seconds), 1),
        "seconds_per_step": _median(seconds),
    }


def measurements(stats: Stats, ranks: Sequence[RankBytes]) -> dict[str, Any]:
    """Return the ``zero_topo`` part of a report, of all given ranks."""
    config = stats.config
    zero3 = [(_zero3(plan), work) for plan, work in stats.parts]
    sent, stored, peaks = zip(*ranks, strict=True)
    formula = bytes_of(stats.parts) if stats.formula is None else stats.formula
    return {
        "ranks": len(ranks),
        "config": config.to_json(),
        "topology": config.topology.to_json(),
        "parameters": sum(sum(work.numels) for _, work in stats.parts),
        "micro_batches": stats.micro_batches,
        "sent": _sent_rows(sent, formula, bytes_of(zero3)),
        "phase_seconds": dict(stats.phase_seconds),
        "sync": dict(stats.sync_report),
        "memory": _memory_rows(stats, zero3, stored),
        "peak": {
            **_spread(peaks),
            "on_device": stats.on_device,
            "predicted": sum(stats.predicted_memory.values()),
        },
    }


def bytes_of(parts: Sequence[tuple[ResolvedConfig, Workload]]) -> dict[Key, int]:
    """Return what the formulas say a rank sends in a step, in domains of each plan."""
    found: dict[Key, int] = {}
    for config, work in parts:
        prefix = "" if config.groups is None else config.groups.prefix
        for (phase, domain), nbytes in step_bytes(config, work).items():
            found[phase, f"{prefix}{domain}"] = nbytes
    return found


def _zero3(config: ResolvedConfig) -> ResolvedConfig:
    """Return ZeRO-3's plan of the same ranks."""
    return replace(
        resolve_config(ZeroTopoConfig.parse({"scheme": "zero3"}), config.topology),
        groups=config.groups,
    )


def _sent_rows(
    measured: Sequence[Mapping[Key, int]], formula: Mapping[Key, int], zero3: Mapping[Key, int]
) -> list[dict[str, Any]]:
    """Return one row for each phase and domain that appears anywhere; bytes per rank and optimizer
    step.
    """
    seen = {key for table in (*measured, formula, zero3) for key in table}
    order: dict[tuple[str, str], int] = {}
    for link, kind in product(LINKED_DOMAINS, PHASES):
        order[kind, link] = len(order)
    rows = []
    for phase, domain in sorted(seen, key=lambda key: (order.get(key, len(order)), key)):
        key = phase, domain
        row = {
            "domain": domain,
            "phase": phase,
            **_spread([rank.get(key, 0) for rank in measured]),
            "formula": formula.get(key, 0),
            "zero3": zero3.get(key, 0),
        }
        rows.append(row)
    return rows


def _memory_rows(
    stats: Stats,
    zero3: Sequence[tuple[ResolvedConfig, Workload]],
    measured: Sequence[Mapping[str, int]],
) -> list[dict[str, Any]]:
    """Return one row for each role, bytes per rank; the formula is for Adam."""
    itemsizes = stats.accumulation_itemsize, stats.optimizer_itemsize
    formula: Counter[str] = Counter()
    stock: Counter[str] = Counter()
    for part, stock_part in zip(stats.parts, zero3, strict=True):
        formula.update(memory_bytes(*part, *itemsizes))
        stock.update(memory_bytes(*stock_part, *itemsizes))
    rows = []
    for role in dict.fromkeys([*formula, *(role for rank in measured for role in rank)]):
        row = {
            "role": role,
            **_spread([rank.get(role, 0) for rank in measured]),
            "formula": formula.get(role),
            "zero3": stock.get(role),
        }
        rows.append(row)
    return rows


def _spread(values: Sequence[int]) -> dict[str, int]:
    return {"min": min(values), "max": max(values)}


def _median(values: Sequence[float]) -> float | None:
    return median_high(values) if values else None


def _shareable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without account keys, such as that of Comet's monitor, because users share
    reports.
    """
    hidden = {key: "hidden" if key == "api_key" else value for key, value in config.items()}
    return {
        key: _shareable(value) if isinstance(value, Mapping) else value
        for key, value in hidden.items()
    }


def _plain(value: object) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)
