# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``benchmarks cluster`` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.console import figures_table, wide_console
from benchmarks.emulated_cluster.spec import LEVELS, Spec
from zero_topo.plan import PHASES
from zero_topo.units import format_bytes, format_seconds

BASELINE = "zero3"
WIDTH = 112
NOTE = (
    "K micro-batches per optimizer step. Times in seconds where no unit is given; floors: what the "
    "links need if all collectives overlap, and if one follows the other. uplink: bytes that leave "
    "a node per step, by the kernel."
)
STOCK_NOTE = (
    "stock: gloo's own reduce-scatter sends every byte twice; stock-ring sends it once, "
    "as NCCL and RCCL do."
)
PHASE_NOTE = (
    "Where rank 0's last step went: seconds it worked or waited for each phase; the rest "
    "is computing."
)


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record's table, with what is needed to read it."""
    console = wide_console(WIDTH, console)
    spec = Spec.from_json("spec", content["spec"])
    rates = " / ".join(str(getattr(spec.rates_mbit, level)) for level in LEVELS)
    console.print(
        f"{spec.name}: {spec.nodes} nodes x {spec.gpus_per_node} GPUs x {spec.gcds_per_gpu} GCDs, "
        f"links of a GCD / GPU / node {rates} Mbit/s; model "
        f"{format_bytes(content['message_bytes'])} in 16 bits; forward and backward of a "
        f"micro-batch {format_seconds(content['compute_s_per_micro_batch'])} without communication",
        soft_wrap=True,
    )
    console.print(table(content["results"]))
    console.print(NOTE)
    console.print(phase_table(content["results"]))
    console.print(PHASE_NOTE)
    if any(row["scheme"].startswith("stock") for row in content["results"]):
        console.print(STOCK_NOTE)


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each result, in sections of equal micro-batches."""
    columns = (
        "K",
        "scheme",
        "step, median",
        "min - max",
        f"vs {BASELINE}",
        "floors",
        "uplink",
        "formula",
        "drops",
    )
    made = figures_table(columns, left=("scheme",))
    for count in dict.fromkeys(row["micro_batches"] for row in results):
        rows = [row for row in results if row["micro_batches"] == count]
        for row in rows:
            made.add_row(*_cells(row, ratio(row, rows)), end_section=row is rows[-1])
    return made


def phase_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Seconds by phase of those results that have them: not stock DeepSpeed's."""
    made = figures_table(("K", "scheme", *PHASES, "rest"), left=("scheme",))
    for row in results:
        seconds = {
            phase: found["seconds"] for phase, found in row["phases"].items() if "seconds" in found
        }
        if not seconds:
            continue
        cells = [f"{seconds[phase]:.2f}" if phase in seconds else "-" for phase in PHASES]
        rest = row["step_seconds"][-1] - sum(seconds.values())
        made.add_row(str(row["micro_batches"]), row["scheme"], *cells, f"{rest:.2f}")
    return made


def _cells(row: Mapping[str, Any], times: float | None) -> list[str]:
    step = row["step_s"]
    return [
        str(row["micro_batches"]),
        row["scheme"],
        format_seconds(step["median"]),
        f"{step['min']:.2f} - {step['max']:.2f}",
        "-" if times is None else f"{times:.2f}x",
        f"{row['floor_s']['overlapped']:.2f} - {row['floor_s']['serial']:.2f}",
        format_bytes(row["uplink_bytes_per_step_per_node"]),
        format_bytes(row["uplink_formula"]),
        str(row["drops"]),
    ]


def ratio(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """How many times longer a step of the baseline takes; None if it was not measured."""
    base = next((other for other in rows if other["scheme"] == BASELINE), None)
    return None if base is None else float(base["step_s"]["median"] / row["step_s"]["median"])
