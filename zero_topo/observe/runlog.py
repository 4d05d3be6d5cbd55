# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A run's folder: ``metrics.jsonl``, one line per optimizer step or evaluation, written as the run
goes.

A line of a step holds ``step`` (from 1), ``lr``, ``seconds``, ``loss`` if it is known and, with
zero_topo, ``sent``: bytes rank 0 sent since the step before, as ``{"phase/domain": bytes}``.
Gathers of an evaluation count toward the step after it. A line of an evaluation holds ``step`` and
``eval_loss``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_topo.strict import parse_json

METRICS = "metrics.jsonl"
REPORT = "report.json"
FORMAT = 1  # of report.json
RUNS = Path("runs")
Key = tuple[str, str]


def new_run_folder(name: str) -> Path:
    """A folder name for a run that starts now, such as ``runs/demo-20250131-235959``; nothing is
    created.
    """
    return RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def log_step(
    folder: Path | None,
    step: int,
    loss: float | None,
    lr: float,
    seconds: float,
    sent: Mapping[Key, int] | None = None,
) -> None:
    """Log an optimizer step.

    Args:
        folder: of the run, created if missing; None writes nothing (ranks other than 0).
        step: its number, from 1.
        loss: mean over micro-batches, or None if it is not known.
        lr: learning rate after it.
        seconds: duration of the step.
        sent: (phase, domain) -> bytes rank 0 sent in it; None if nothing is metered.
    """
    line: dict[str, Any] = {"step": step, "lr": lr, "seconds": round(seconds, 6)}
    if loss is not None:
        line["loss"] = loss
    if sent is not None:
        line["sent"] = {
            f"{phase}/{domain}": nbytes for (phase, domain), nbytes in sorted(sent.items())
        }
    _append(folder, line)


def log_evaluation(folder: Path | None, step: int, loss: float) -> float:
    """Log an evaluation after ``step`` steps; returns ``loss``."""
    _append(folder, {"step": step, "eval_loss": loss})
    return loss


def _append(folder: Path | None, line: Mapping[str, Any]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log.

    Raises:
        ValueError: if the folder has no log, or a line that is not JSON.
    """
    path = folder / METRICS
    lines = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}; remove the line") from None
    return lines


def read_report(folder: Path) -> dict[str, Any]:
    """The content of a run's ``report.json``.

    Raises:
        ValueError: if the folder has none, or one of another format.
    """
    path = folder / REPORT
    report = parse_json(_read(path), str(path))
    found = report.get("format") if isinstance(report, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found!r}, this version reads {FORMAT}: run again")
    return dict(report)


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(
            f"{path.parent} has no {path.name}: give the folder of a run that ended, such as one "
            f"under {RUNS}/"
        )
    return path.read_text(encoding="utf-8")
