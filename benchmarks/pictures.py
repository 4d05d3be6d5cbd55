# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README and docs from the records: python -m benchmarks.pictures
docs/pictures

``make docs`` does so. A test draws them again and compares each with the file committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

from benchmarks.svg import Bar, Line, Picture
from zero_topo.config import SCHEMES, ZeroTopoConfig, resolve_config
from zero_topo.cost import Workload, memory_bytes
from zero_topo.observe.plots import NAMES
from zero_topo.topology.presets import load_preset
from zero_topo.units import format_bytes

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "records"
SHOWN = MappingProxyType(
    {
        "zero3": "zero3",
        "zero++": "zero++",
        "paper": "paper",
        "topo": "topo",
        "codes-q4": "topo, quantized",
        "zero2-q4": "topo-zero2, quantized",
        "topo-ternary": "topo, ternary",
    }
)
"""Schemes of the emulated cluster that are drawn -> scheme and mode of sync, as a user writes
them."""
STOCK = "stock"
WINDOW = 100
"""Steps of a mean in a picture of losses."""
SERIES = MappingProxyType(
    {
        "gather_forward": 0,
        "gather_backward": 5,
        "gather_exact": 3,
        "scatter": 1,
        "sync": 2,
        "publish": 4,
    }
)
"""Phase -> its series."""
COMPUTING = 6
ROLES = ("weights", "secondary", "gradients", "optimizer")


def _record(name: str) -> Any:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def _results(name: str, micro_batches: int) -> dict[str, Any]:
    found = _record(name)["results"]
    return {row["scheme"]: row for row in found if row["micro_batches"] == micro_batches}


# -- the emulated cluster --------------------------------------------------------------------------


def cluster(micro_batches: int) -> str:
    """Step time and bytes over a node's uplink; unmodified DeepSpeed where it was measured."""
    rows = {
        name: row for name, row in _results("cluster-t8", micro_batches).items() if name in SHOWN
    }
    if micro_batches == 1:
        rows = {STOCK: _results("cluster-t8-stock", 1)[STOCK], **rows}
    plural = "micro-batch" if micro_batches == 1 else "micro-batches"
    picture = Picture(
        f"Step time and bytes between nodes of the emulated cluster, {micro_batches} {plural}"
    )
    first = "zero3 is ZeRO-3 on our engine"
    if micro_batches == 1:
        first = f"{STOCK} is unmodified DeepSpeed ZeRO-3, {first}"
    picture.heading(f"Seconds of a step of {micro_batches} {plural}", f"{first}. Shorter is better")
    picture.bars([_step_bar(name, row) for name, row in rows.items()])
    picture.heading("Sent by a node over its uplink in that step")
    picture.bars([_sent_bar(name, row) for name, row in rows.items()])
    picture.note(
        "2 nodes x 2 GPUs x 2 ranks on two CPU cores, links limited: only ratios are meaningful"
    )
    return picture.svg()


def _series(name: str) -> int:
    return 6 if name in (STOCK, "zero3") else 0


def _step_bar(name: str, row: Mapping[str, Any]) -> Bar:
    step = row["step_s"]
    return Bar(
        SHOWN.get(name, name),
        [(step["median"], _series(name))],
        f"{step['median']:.2f} s",
        step["min"],
        step["max"],
    )


def _sent_bar(name: str, row: Mapping[str, Any]) -> Bar:
    sent = row["uplink_bytes_per_step_per_node"]
    return Bar(SHOWN.get(name, name), [(sent, _series(name))], format_bytes(sent))


def time() -> str:
    """Where a step of one micro-batch goes, on rank 0."""
    rows = _results("cluster-t8", 1)
    picture = Picture("Where the time of a step of the emulated cluster goes, by phase")
    picture.heading(
        "Where a step of one micro-batch goes",
        "seconds in which rank 0 worked or waited for each phase",
    )
    bars = []
    for name in SHOWN:
        phases = {phase: found.get("seconds", 0.0) for phase, found in rows[name]["phases"].items()}
        total = rows[name]["step_seconds"][-1]
        parts = [(phases.get(phase, 0.0), series) for phase, series in SERIES.items()]
        parts.append((total - sum(phases.values()), COMPUTING))
        bars.append(Bar(SHOWN[name], parts, f"{total:.2f} s"))
    picture.bars(bars)
    drawn = [phase for phase in SERIES if any(phase in rows[name]["phases"] for name in SHOWN)]
    picture.legend([*((NAMES[phase], SERIES[phase]) for phase in drawn), ("computing", COMPUTING)])
    return picture.svg()


# -- losses ----------------------------------------------------------------------------------------


def _means(losses: Sequence[float]) -> list[tuple[float, float]]:
    """The mean of each window, at its last step; the last window may be shorter."""
    means: list[tuple[float, float]] = []
    for start in range(0, len(losses), WINDOW):
        within = losses[start : start + WINDOW]
        means.append((start + len(within), sum(within) / len(within)))
    return means


def losses(name: str, schemes: Mapping[str, str], title: str) -> str:
    """Loss over the steps, mean over seeds, and its difference from stock, of a record."""
    found = _record(name)["curves"]
    by_step = {scheme: zip(*found[scheme].values(), strict=True) for scheme in schemes}
    curves = {scheme: _means(list(map(mean, steps))) for scheme, steps in by_step.items()}
    seeds = len(found[STOCK])
    picture = Picture(title)
    source = f"benchmarks/records/{name}.json"
    picture.heading(
        "Training loss", f"nats per byte, means of {WINDOW} steps, seeds: {seeds} ({source})"
    )
    lines = [
        Line(schemes[scheme], index, points, dashed=index > 0)
        for index, (scheme, points) in enumerate(curves.items())
    ]
    picture.lines(lines, "optimizer step", "{:.1f}")
    picture.heading(
        "Difference from stock", "chaos is stock with its initial weights changed by 1e-6"
    )
    stock = dict(curves[STOCK])
    apart = []
    for index, (scheme, points) in enumerate(curves.items()):
        if scheme != STOCK:
            differences = [(step, 100 * (loss / stock[step] - 1)) for step, loss in points]
            apart.append(Line(schemes[scheme], index, differences))
    picture.lines(apart, "optimizer step", "{:+.1f}%", zero=True)
    return picture.svg()


def long_losses() -> str:
    """The defaults of ``topo``, and sync that leaves out, over 20 tokens for each parameter."""
    schemes = {
        STOCK: "stock: nothing left out",
        "chaos": "chaos",
        "topo": "topo: INT8 weights, NF4 gradients",
        "ternary-aged": "ternary with AgedAdamW",
        "oktopk-sharded-aged-5": "Ok-Topk 5%, AgedAdamW",
        "sync-nf4": "NF4 with feedback",
    }
    title = "Loss over 20 tokens for each parameter, compared with stock"
    return losses("long", schemes, title)


# -- memory ----------------------------------------------------------------------------------------


SERIES_OF = {"weights": 0, "secondary": 5, "gradients": 1, "optimizer": 2}
"""Of each role, the series of its colour, which is that of the README's picture and of a run's
report.
"""


def memory() -> str:
    """Memory of a rank by scheme: 20 billion parameters on 384 GCDs of Frontier, as in the table of
    schemes.
    """
    topology = load_preset("frontier", 384)
    work = Workload.uniform([20 * 10**9], micro_batches=4)
    bars = []
    for name in SCHEMES:
        config = resolve_config(ZeroTopoConfig.parse({"scheme": name}), topology)
        stored = memory_bytes(config, work, accumulation_itemsize=2)
        total = sum(stored.values())
        bars.append(
            Bar(
                name,
                [(stored.get(role, 0), SERIES_OF[role]) for role in ROLES],
                format_bytes(total),
            )
        )
    picture = Picture("Memory per rank by scheme, 20 billion parameters on 384 GCDs of Frontier")
    picture.heading(
        "Memory of a rank",
        "20 billion parameters on 384 GCDs of Frontier, BF16 with Adam, no activations",
    )
    picture.bars(bars)
    picture.legend((role, SERIES_OF[role]) for role in ROLES)
    return picture.svg()


PICTURES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "cluster": lambda: cluster(1),
        "cluster-8": lambda: cluster(8),
        "time": time,
        "losses-long": long_losses,
        "memory": memory,
    }
)
"""Name of the file without its ending -> what draws it."""


def main(arguments: list[str]) -> None:
    """Write all pictures into the folder named.

    Raises:
        SystemExit: unless exactly one folder is named.
    """
    if len(arguments) != 1:
        raise SystemExit("usage: python -m benchmarks.pictures FOLDER")
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
