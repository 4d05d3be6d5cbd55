# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A run's folder: ``metrics.jsonl``, one line per optimizer step or evaluation, written as the run
goes.

A line of a step holds ``step`` (from 1), ``lr``, ``seconds``, ``loss`` if it is known and, with
zero_topo, ``sent``: bytes rank 0 sent since the step before, as ``{"phase/domain": bytes}``, and as
far as they are known rank 0's ``tokens_per_s``, ``tflops`` and ``mfu``. Gathers of an evaluation
count toward the step after it. A line of an evaluation holds ``step`` and ``eval_loss``; one line
of the last step, with zero_topo, ``step``, ``seconds`` and ``timeline``: when rank 0's host worked
or waited for which phase of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NotRequired

from typing_extensions import TypedDict

from zero_topo.strict import Seconds, conform, read_text

METRICS = "metrics.jsonl"
REPORT = "report.json"
FORMAT = 1  # of report.json
RUNS = Path("runs")
Key = tuple[str, str]


class _Step(TypedDict):
    step: int
    loss: NotRequired[float]
    lr: float
    seconds: Seconds
    sent: NotRequired[dict[str, int]]
    tokens_per_s: NotRequired[float]
    tflops: NotRequired[float]
    mfu: NotRequired[float]


class _Evaluation(TypedDict):
    step: int
    eval_loss: float


class _Timeline(TypedDict):
    step: int
    seconds: Seconds
    timeline: list[tuple[str, Seconds, Seconds]]


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
    pace: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Log an optimizer step.

    Args:
        folder: of the run, created if missing; None writes nothing (ranks other than 0).
        step: its number, from 1.
        loss: mean over micro-batches, or None if it is not known.
        lr: learning rate after it.
        seconds: duration of the step.
        sent: (phase, domain) -> bytes rank 0 sent in it; None if nothing is metered.
        pace: tokens/s, TFLOP/s and MFU of rank 0.
    """
    line: dict[str, Any] = {"step": step, "lr": lr, "seconds": round(seconds, 6), **pace}
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


def log_timeline(
    folder: Path | None, step: int, seconds: float, intervals: Collection[tuple[str, float, float]]
) -> None:
    """Log (phase, begin, end) of a step that took so long; in seconds."""
    rounded = [(phase, round(begin, 6), round(end, 6)) for phase, begin, end in intervals]
    _append(folder, {"step": step, "seconds": round(seconds, 6), "timeline": rounded})


def _append(folder: Path | None, line: Mapping[str, Any]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log.

    Raises:
        ValueError: if the folder has no log, or a line that is not a log line.
    """
    path = folder / METRICS
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {METRICS}: give the folder of a run, such as one under {RUNS}/"
        )
    text = read_text(path, str(path))
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        kind = _Step if '"lr"' in line else _Evaluation if '"eval_loss"' in line else _Timeline
        try:
            lines.append(conform(kind, f"{path}: line {number}", line))
        except ValueError as error:
            raise ValueError(f"{error}; remove the line") from None
    return lines


def read_report(folder: Path, kind: Any = dict[str, Any]) -> dict[str, Any]:
    """Read a run's ``report.json``.

    Args:
        folder: of the run.
        kind: type of the report, where others may have written it.

    Raises:
        ValueError: if the folder has none, or one of another format or type.
    """
    path = folder / REPORT
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {REPORT}: give the folder of a run that ended, such as one under "
            "runs/"
        )
    text = read_text(path, str(path))
    report = conform(dict[str, Any], str(path), text)
    if report.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {report.get('format')!r}, this version reads {FORMAT}: run again"
        )
    return dict(conform(kind, str(path), text))
