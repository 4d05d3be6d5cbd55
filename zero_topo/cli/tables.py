# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables of plans and their costs; those of up to some thousand ranks fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from zero_topo.config import ROLES, ResolvedConfig
from zero_topo.cost.pipeline import PipelinePrice
from zero_topo.cost.planner import Price, Priced
from zero_topo.observe.console import figures_table, wide_console
from zero_topo.observe.tables import bytes_or_dash
from zero_topo.topology.model import LINKED_DOMAINS
from zero_topo.units import format_bytes, format_seconds

NARROWEST = 80
WIDEST = 1000
SHORTEST_BAR = 8
LONGEST_BAR = 40
DEGREES = "degrees: ranks that share weights/secondary/gradients/optimizer"


def show(table: Table) -> None:
    """Print a table to stdout, with no cell cut."""
    console = wide_console(WIDEST)
    console.width = max(NARROWEST, console.measure(table).maximum)
    console.print(table)
    console.print()


def with_bars(make: Callable[[int], Table]) -> Table:
    """Return a table with a column of bars if stdout is a terminal that has room for it, else the
    table without.

    Args:
        make: the width of the bars in columns, or 0 -> the table.
    """
    console = Console()
    table = make(0)
    room = min(console.width - console.measure(table).maximum - 1, LONGEST_BAR)
    return make(room) if console.is_terminal and room >= SHORTEST_BAR else table


def bar_cells(values: Sequence[float], width: int) -> list[tuple[str, ...]]:
    """Return the cells of a column of bars, one for each value; of no column if ``width`` is 0."""
    if not width:
        return [()] * len(values)
    block = "\N{FULL BLOCK}" if Console().encoding.startswith("utf") else "#"
    return [(block * max(1, round(value / max(values) * width)),) for value in values]


def places_table(rows: Mapping[str, ResolvedConfig], title: str) -> Table:
    """Scheme by role: the domain, its number of ranks if not all, and the bits in which it is sent
    or stored.
    """
    table = figures_table(["", *ROLES, "sync"], title)
    for name, config in rows.items():
        cells = []
        for role, degree in config.plan.degrees().items():
            if degree is None:
                cells.append("-")
                continue
            spec = getattr(config, f"{role}_spec", None)
            stored = config.resident_spec is not None and role == "weights"
            bits = f" {spec.name}" if spec is not None and (degree > 1 or stored) else ""
            bits += " stored" if stored else ""
            domain = config.topology.domain(degree)
            cells.append(domain + ("" if domain == "world" else f" {degree}") + bits)
        copies = config.plan.world_size // config.plan.gradients
        table.add_row(name, *cells, config.sync.MODE if copies > 1 else "-")
    return table


def memory_table(rows: Mapping[str, Mapping[str, int]], capacity: int | None) -> Table:
    """Scheme by role: bytes per rank, and their share of its memory if that is known and fits the
    terminal.
    """
    more = [
        role for role in ("frozen", "residual") if any(role in sizes for sizes in rows.values())
    ]
    shares = "frozen" not in more
    roles = [*ROLES, *more]
    title = f"Memory per rank{', and share of it' if shares else ''} (no activations)"
    table = figures_table(["", *roles, "total", *(["share"] if shares else [])], title)
    for name, sizes in rows.items():
        total = sum(sizes.values())
        share = "?" if capacity is None else f"{100 * total / capacity:.0f}%"
        cells = [*(bytes_or_dash(sizes.get(role, 0)) for role in roles), format_bytes(total)]
        table.add_row(name, *cells, *([share] if shares else []))
    return table


def volume_table(rows: Mapping[str, Mapping[str, int]], micro_batches: int) -> Table:
    """Scheme by domain: bytes one rank sends per optimizer step, booked under the domain each
    collective spans.
    """
    plural = "es" if micro_batches > 1 else ""
    title = f"Sent by each rank per step of {micro_batches} micro-batch{plural}"
    table = figures_table(["", *LINKED_DOMAINS, "total"], title)
    for name, sent in rows.items():
        cells = [bytes_or_dash(sent.get(domain, 0)) for domain in LINKED_DOMAINS]
        table.add_row(name, *cells, format_bytes(sum(sent.values())))
    return table


def ranking_table(
    plans: Sequence[Priced],
    title: str,
    tensor: Sequence[Priced] = (),
    pipeline: PipelinePrice | None = None,
    bars: int = 0,
) -> Table:
    """Plans: degrees of the roles, sync, step and its range, memory.

    The best plans with tensor and expert parallelism follow, then the pipeline to compare with.
    """
    columns = [
        "scheme",
        "degrees",
        "lossy",
        "sync",
        "step",
        "range",
        "memory",
        *([""] if bars else []),
    ]
    table = figures_table(columns, title, ("scheme", "degrees", ""))
    prices = [*plans, *tensor, *([] if pipeline is None else [pipeline])]
    drawn = bar_cells([price.seconds for price in prices], bars)
    for plan, drawn_bar in zip((*plans, *tensor), drawn, strict=False):
        scheme = str(plan.candidate.settings.get("scheme", "-"))
        job = plan.request.job
        divided = (
            f"EP {job.expert}" if job.expert > 1 else f"TP {job.tensor}" if job.tensor > 1 else ""
        )
        if divided:
            scheme = divided if scheme == "-" else f"{divided}, {scheme}"
        loses = "yes" if plan.candidate.losses else "no"
        table.add_row(scheme, degrees(plan.config), loses, _sync(plan), *_costs(plan), *drawn_bar)
    if pipeline is not None:
        table.add_row(pipeline.config.name, "", "no", "", *_costs(pipeline), *drawn[-1])
    return table


def drawn_name(plan: Priced) -> str:
    """Return a plan's scheme, degrees and sync, for a picture; in a second line what it
    quantizes.
    """
    scheme = plan.candidate.settings.get("scheme")
    words = [degrees(plan.config)] if scheme is None else [str(scheme), degrees(plan.config)]
    name = " ".join(words if _sync(plan) == "-" else [*words, _sync(plan)])
    quantized = ", ".join(plan.candidate.words)
    return f"{name}\n{quantized}" if quantized else name


def _sync(plan: Priced) -> str:
    """Return the mode of a plan's sync, or its format, and whether it goes through the GPU; "-" if
    there is no sync.
    """
    mode = _mode(plan)
    if "two_hop" not in plan.candidate.settings:
        return mode
    return "gpu" if mode == "-" else f"{mode}, gpu"


def _mode(plan: Priced) -> str:
    """Return the mode of a plan's sync, or its format; "-" if nothing is to be reduced across
    nodes.
    """
    config = plan.config
    if config.plan.gradients == config.plan.world_size:
        return "-"
    spec = config.sync.spec
    if config.sync.rings:
        return "ring"
    return config.sync.MODE if spec is None else str(spec.name)


def _costs(price: Price) -> tuple[str, str, str]:
    """Seconds of a step, their range, and memory."""
    within = f"{price.range.low_s:.3g}-{price.range.high_s:.3g} s"
    return format_seconds(price.seconds), within, format_bytes(price.stored)


def degrees(config: ResolvedConfig) -> str:
    """Ranks that share each role, such as ``8/-/8/32``; :data:`DEGREES` says of what."""
    return "/".join(
        "-" if degree is None else str(degree) for degree in config.plan.degrees().values()
    )
