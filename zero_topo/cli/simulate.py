# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo simulate``: how long a step takes under each scheme, how far that may be off, and on what it hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from zero_topo.bench.schemes import KNOWN
from zero_topo.cli.files import Force, check_files
from zero_topo.cli.fitting import fit
from zero_topo.cli.inputs import MOST_MICRO_BATCHES, machine, read_count, read_rates, words_of
from zero_topo.cli.options import refuse_others, taking
from zero_topo.cli.output import print_json
from zero_topo.cli.tables import show
from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.model_files import load_model
from zero_topo.cost.simulator import Job
from zero_topo.cost.sweep import Entry, Point, Sweep, scaling_efficiency
from zero_topo.cost.time import known_rates, rates_of
from zero_topo.cost.uncertainty import OVERLAPS, Overlap
from zero_topo.observe.console import figures_table
from zero_topo.observe.marks import SCALING, TIMELINE, TRACE, write_png
from zero_topo.strict import did_you_mean, to_json
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.presets import assumptions
from zero_topo.topology.rates import Rates
from zero_topo.units import format_seconds

GCDS = "64,128,256,384"
STOCK = "stock"
SHOWN = (("compute", "optimizer"), ("gather_forward", "gather_backward"), ("scatter",), ("sync", "publish"))
"""Phases of each column of the table."""


@dataclass(frozen=True)
class Options:
    """Of ``simulate``."""

    machine: Annotated[
        str,
        typer.Option(metavar="PRESET|FILE|JSON", help="Preset, .json file or JSON object that describes the machine."),
    ] = "frontier"
    model: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Model name, Hugging Face config.json or GPT-NeoX YAML.")
    ] = "gpt-neox-20b"
    gcds: Annotated[str | None, typer.Option(help="Rank counts, comma-separated.", show_default=GCDS)] = None
    schemes: Annotated[
        str, typer.Option(help="Comma-separated; stock-NAME is the traffic of unmodified DeepSpeed.")
    ] = "zero3,zero++,paper,topo"
    micro_batches: Annotated[str, typer.Option(help="Micro-batches per optimizer step, comma-separated.")] = "1,8"
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and micro-batch.")] = 1
    prefetch: Annotated[int, typer.Option(min=0, help="Modules whose weights are gathered ahead.")] = 1
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's.")] = None
    overlap: Annotated[
        str | None,
        typer.Option(
            metavar="none|prefetch|full",
            help="Communication hidden by computation; default: full; ranges also show none.",
        ),
    ] = None
    latency: Annotated[float | None, typer.Option(min=0, help="Seconds per message, instead of the machine's.")] = None
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in the backward pass.")] = True
    rates: Annotated[
        str, typer.Option(metavar="FILE|JSON", help="Link rates that replace the preset's, all or some keys.")
    ] = "{}"
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds.")] = False
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw TFLOP/s per rank over the rank count.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write one step of each scheme for a trace viewer, and FILE.png."),
    ] = None
    force: Force = False
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Fit rates instead: to a record of 'benchmarks cluster', or to outputs of rccl-tests or nccl-tests, "
            "any number of them.",
        ),
    ] = None
    on: Annotated[str, typer.Option(help="With --calibrate: schemes to fit.")] = "zero3,topo"
    predict: Annotated[str, typer.Option(help="With --calibrate: schemes to predict; default: all others.")] = ""


@taking(Options)
def simulate(options: Options) -> None:
    """Predict seconds and TFLOP/s of a step, per scheme and rank count. Shows what each step waits for."""
    fitted = ("calibrate", "on", "predict", "as_json")
    if options.calibrate:
        refuse_others(options, lambda name: name in fitted, "--calibrate fits rates and simulates nothing else")
        fit(options.calibrate, options.on, options.predict, options.as_json)
        return
    refuse_others(options, lambda name: name not in ("on", "predict"), "give the record with --calibrate FILE")
    picture = None if options.trace is None else options.trace.with_suffix(".png")
    files = [(options.plot, ".png", SCALING), (options.trace, ".json", TRACE), (picture, ".png", TIMELINE)]
    check_files(files, options.force)
    sweep = _sweep(options)
    points = sweep.points()
    content = {
        "machine": options.machine,
        "model": options.model,
        "params": sweep.job.model.params,
        "overlap": options.overlap,
        "notes": sweep.job.model.notes,
        "rates": to_json(sweep.rates),
        "assumed": assumptions(sweep.machines[0].name),
        "results": [point.to_json() for point in points],
        "scaling_efficiency": scaling_efficiency(points),
        "break_even": sweep.break_even(),
    }
    written = [*_draw(options, sweep.job, points, content), *_trace(options, sweep.job, points)]
    if options.as_json:
        print_json(content)
        return
    _show(options, points, content)
    if written:
        print(f"Written: {', '.join(str(path) for path in written)}")


def _sweep(options: Options) -> Sweep:
    job = Job(
        load_model(options.model, options.seq), options.micro_batch, 1, options.checkpointing, prefetch=options.prefetch
    )
    machines, rates = _machines(options)
    return Sweep(
        machines=machines,
        schemes=_schemes(words_of(options.schemes)),
        job=job,
        micro_batches=_counts(options.micro_batches, "--micro-batches", MOST_MICRO_BATCHES),
        rates=rates,
        overlap=_overlap(options.overlap),
    )


def _machines(options: Options) -> tuple[list[Topology], Rates]:
    """The machine with each number of ranks, and how fast a rank is; the user's latency in place of its own."""
    preset = options.machine in preset_names()
    counts = _counts(options.gcds or GCDS, "--gcds") if preset or options.gcds else [None]
    machines = [machine(options.machine, count) for count in counts]
    known = known_rates(machines[0])
    rates = read_rates(options.rates, known) if known or options.rates != "{}" else rates_of(machines[0])
    if (latency := options.latency) is None:
        return machines, rates
    links = [{name: replace(link, latency=latency) for name, link in m.links.items()} for m in machines]
    slower = rates.with_rings(lambda ring: replace(ring, step=latency, small_step=None))
    return [replace(m, links=of) for m, of in zip(machines, links, strict=True)], slower


def _overlap(word: str | None) -> Overlap | None:
    if word is None or word in OVERLAPS:
        return word
    raise ValueError(f"--overlap {word!r}{did_you_mean(word, OVERLAPS)} (choose one of {', '.join(OVERLAPS)})")


def _schemes(names: Sequence[str]) -> dict[str, Entry]:
    if not names or len(set(names)) < len(names):
        raise ValueError(f"schemes {list(names)} must be at least one, each named once")
    return {name: _entry(name) for name in names}


def _entry(name: str) -> Entry:
    """A scheme by name; one of stock is what follows ``stock-``, by itself ZeRO-3."""
    known = {known: scheme.block for known, scheme in KNOWN.items() if scheme.block is not None}
    plain = "zero3" if name == STOCK else name.removeprefix(f"{STOCK}-")
    if plain not in known:
        near = did_you_mean(name, [*known, *(f"{STOCK}-{other}" for other in known)])
        raise ValueError(
            f"unknown scheme {name!r}{near} (known: {', '.join(known)}, each also with 'stock-' before it)"
        )
    return Entry(ZeroTopoConfig.parse(known[plain]), stock=plain != name)


def _counts(text: str, what: str, most: int = MOST_RANKS) -> list[int]:
    counts = sorted({read_count(word, what, most=most) for word in words_of(text)})
    if not counts:
        raise ValueError(f"{what} {text!r} names no number; write one or more, such as 8,16")
    return counts


def _draw(options: Options, job: Job, points: Sequence[Point], content: Mapping[str, Any]) -> list[Path]:
    if options.plot is None:
        return []
    from zero_topo.observe.plots import job_line
    from zero_topo.observe.timeline import scaling

    worst = "at their worst" if options.overlap else "at their worst with nothing overlapping"
    notes = [job_line(job, (p.ranks for p in points), (p.micro_batches for p in points))]
    notes += [f"overlap: {options.overlap or 'full'}; bars: rates at their best, and {worst}"]
    if content["assumed"]:
        notes.append(f"assumed for {options.machine}: {', '.join(content['assumed'])}")
    figure = scaling(points, f"{options.model} on {options.machine}", "\n".join(notes))
    write_png(figure, options.plot, SCALING, dpi=200)
    return [options.plot]


def _trace(options: Options, job: Job, points: Sequence[Point]) -> list[Path]:
    """One step of each scheme on the most ranks, with the fewest micro-batches."""
    if options.trace is None:
        return []
    from zero_topo.observe.plots import job_line
    from zero_topo.observe.timeline import timeline, write_trace

    ranks, count = max(point.ranks for point in points), min(point.micro_batches for point in points)
    steps = {p.scheme: p.simulation for p in points if (p.ranks, p.micro_batches) == (ranks, count)}
    picture = options.trace.with_suffix(".png")
    write_trace(steps, options.trace)
    write_png(timeline(steps, job_line(job, [ranks], [count])), picture, TIMELINE)
    return [options.trace, picture]


def _show(options: Options, points: Sequence[Point], content: Mapping[str, Any]) -> None:
    for count in dict.fromkeys(point.micro_batches for point in points):
        title = f"{options.model} on {options.machine}, {count} x {options.micro_batch} sequences a step, simulated"
        show(_steps_table([point for point in points if point.micro_batches == count], title))
    for row in content["break_even"]:
        if row["ranks"] == content["break_even"][-1]["ranks"]:
            ahead, behind, count = row["ahead_at_1"], row["behind_at_1"], row["break_even"]
            when = "never" if count is None else f"from {count:.1f} micro-batches on"
            print(f"- {behind} beats {ahead} {when}, at {row['ranks']:,} ranks")
    last = points[-1]
    for point in points:
        if (point.ranks, point.micro_batches) == (last.ranks, last.micro_batches):
            print(f"- {point.scheme} at {point.ranks:,} ranks hangs on {point.range.sentence()}")
    for note in content["notes"]:
        print(f"- {note}")
    if content["assumed"]:
        print(f"- assumed, not measured, for {options.machine}: {', '.join(content['assumed'])}")


def _steps_table(points: Sequence[Point], title: str) -> Table:
    """Scheme and ranks by seconds of a step, TFLOP/s and their range, and the step's shares of what took time."""
    columns = ["", "ranks", "step", "TFLOP/s", "range", "compute", "gather", "scatter", "sync"]
    table = figures_table(columns, title)
    for point in points:
        found, within = point.simulation, point.range
        shares = (sum(found.breakdown[phase] for phase in phases) / found.step_s for phases in SHOWN)
        cells = [f"{100 * share:.0f}%" if share >= 0.005 else "-" for share in shares]
        flops = found.tflops_per_gpu * found.step_s
        spread = f"{flops / within.high_s:.0f}-{flops / within.low_s:.0f}"
        step, speed = format_seconds(found.step_s), f"{found.tflops_per_gpu:.1f}"
        table.add_row(point.scheme, f"{point.ranks:,}", step, speed, spread, *cells)
    return table
