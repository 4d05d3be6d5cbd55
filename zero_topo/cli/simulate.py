# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo simulate``: how long a step takes under each scheme, and how well that agrees with measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from zero_topo.bench.schemes import BenchScheme, schemes_named
from zero_topo.cli.inputs import read_count, words_of
from zero_topo.cli.options import taking
from zero_topo.cli.tables import show
from zero_topo.config import ZeroTopoConfig
from zero_topo.cost import calibrate
from zero_topo.cost.model_files import load_model
from zero_topo.cost.simulator import PHASES, Job, Simulation
from zero_topo.cost.sweep import Point, Sweep, scaling_efficiency
from zero_topo.cost.time import rates_of
from zero_topo.observe.console import figures_table
from zero_topo.strict import read, to_json
from zero_topo.topology import load_preset
from zero_topo.topology.rates import Rates
from zero_topo.units import format_seconds


@dataclass(frozen=True)
class Options:
    """Of ``simulate``."""

    machine: Annotated[str, typer.Option(metavar="PRESET", help="The machine.")] = "frontier"
    model: Annotated[str, typer.Option(metavar="NAME|FILE", help="The model.")] = "gpt-neox-20b"
    gcds: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "64,128,256,384"
    schemes: Annotated[str, typer.Option(help="Comma-separated.")] = "zero3,zero++,paper,topo"
    micro_batches: Annotated[str, typer.Option(help="Per optimizer step, comma-separated.")] = "1,8"
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of each rank's micro-batch.")] = 1
    prefetch: Annotated[int, typer.Option(min=0, help="Modules gathered ahead.")] = 1
    checkpointing: Annotated[bool, typer.Option(help="Layers run forward again before their backward.")] = True
    rates: Annotated[
        str, typer.Option(metavar="FILE|JSON", help="Rates in place of the preset's, some or all of their keys.")
    ] = "{}"
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds.")] = False
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw TFLOP/s per rank over ranks.")] = None
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="One step of each scheme for a trace viewer, and FILE.png beside it."),
    ] = None
    calibrate: Annotated[
        Path | None, typer.Option(metavar="RECORD.json", help="Fit rates to a record of 'benchmarks cluster' instead.")
    ] = None
    on: Annotated[str, typer.Option(help="With --calibrate: schemes to fit.")] = "zero3,topo"
    predict: Annotated[str, typer.Option(help="With --calibrate: schemes to predict; default: all others.")] = ""


@taking(Options)
def simulate(options: Options) -> None:
    """Simulate optimizer steps: seconds, TFLOP/s per rank, what waits for what, and from when a scheme wins."""
    if options.calibrate is not None:
        _calibrate(options, options.calibrate)
        return
    sweep = _sweep(options)
    points = sweep.points()
    content = {
        "machine": options.machine,
        "model": options.model,
        "params": sweep.job.model.params,
        "rates": to_json(sweep.rates) if sweep.rates else None,
        "results": [point.to_json() for point in points],
        "scaling_efficiency": scaling_efficiency(points),
        "break_even": sweep.break_even(),
    }
    written = [*_draw(options, points), *_trace(options, points)]
    if options.as_json:
        print(json.dumps(content, indent=2))
        return
    _show(options, points, content)
    if written:
        print(f"Written: {', '.join(str(path) for path in written)}")


def _sweep(options: Options) -> Sweep:
    job = Job(load_model(options.model), options.micro_batch, 1, options.checkpointing, prefetch=options.prefetch)
    machines = [load_preset(options.machine, ranks) for ranks in _counts(options.gcds, "--gcds")]
    return Sweep(
        machines=machines,
        schemes={scheme.name: _config(scheme) for scheme in schemes_named(words_of(options.schemes))},
        job=job,
        micro_batches=_counts(options.micro_batches, "--micro-batches"),
        rates=_rates(options.rates, rates_of(machines[0])),
    )


def _rates(text: str, preset: Rates) -> Rates:
    """The preset's rates with the keys that the user gave; of ``link_efficiency``, with the domains."""
    given = _read_json(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"), "--rates")
    known = to_json(preset)
    links = given.get("link_efficiency", {})
    merged = {**known["link_efficiency"], **links} if isinstance(links, dict) else links
    return read(Rates, "--rates", {**known, **given, "link_efficiency": merged})


def _read_json(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what}: must be a JSON object, got {found!r}")
    return found


def _config(scheme: BenchScheme) -> ZeroTopoConfig:
    if scheme.block is None:
        raise ValueError(f"scheme {scheme.name!r} is stock DeepSpeed, which the model does not know; take 'zero3'")
    return ZeroTopoConfig.parse(scheme.block)


def _counts(text: str, what: str) -> list[int]:
    counts = sorted({read_count(word, what) for word in words_of(text)})
    if not counts:
        raise ValueError(f"{what} {text!r} names no number; write one or more, such as 8,16")
    return counts


def _draw(options: Options, points: Sequence[Point]) -> list[Path]:
    if options.plot is None:
        return []
    from zero_topo.observe.timeline import scaling

    scaling(points, f"{options.model} on {options.machine}", options.plot)
    return [options.plot]


def _trace(options: Options, points: Sequence[Point]) -> list[Path]:
    """One step of each scheme on the most ranks, with the fewest micro-batches."""
    if options.trace is None:
        return []
    from zero_topo.observe.timeline import timeline, write_trace

    ranks, count = max(point.ranks for point in points), min(point.micro_batches for point in points)
    steps = {p.scheme: p.simulation for p in points if (p.ranks, p.micro_batches) == (ranks, count)}
    picture = options.trace.with_suffix(".png")
    write_trace(steps, options.trace)
    timeline(steps, picture)
    return [options.trace, picture]


def _show(options: Options, points: Sequence[Point], content: Mapping[str, Any]) -> None:
    for count in dict.fromkeys(point.micro_batches for point in points):
        title = f"{options.model} on {options.machine}, {count} x {options.micro_batch} sequences a step, simulated"
        show(_steps_table([point for point in points if point.micro_batches == count], title))
    for row in content["break_even"]:
        if row["break_even"] is not None and row["ranks"] == content["break_even"][-1]["ranks"]:
            ahead, behind = row["ahead_at_1"], row["behind_at_1"]
            print(f"- {behind} beats {ahead} from {row['break_even']:.1f} micro-batches on, at {row['ranks']:,} ranks")


def _steps_table(points: Sequence[Point], title: str) -> Table:
    """Scheme and ranks by seconds of a step, TFLOP/s, and the share of the step that each phase takes."""
    columns = ["", "ranks", "step", "TFLOP/s", "comp.", "fwd", "bwd", "scat.", "sync", "publ.", "opt."]
    table = figures_table(columns, title)
    for point in points:
        found: Simulation = point.simulation
        shares = (found.breakdown[phase] / found.step_s for phase in PHASES)
        cells = [f"{100 * share:.0f}%" if share >= 0.005 else "-" for share in shares]
        step, speed = format_seconds(found.step_s), f"{found.tflops_per_gpu:.1f}"
        table.add_row(point.scheme, f"{point.ranks:,}", step, speed, *cells)
    return table


def _calibrate(options: Options, path: Path) -> None:
    record = _read_json(path.read_text(encoding="utf-8"), f"record {path}")
    measured = calibrate.read_record(record)
    on = words_of(options.on)
    wanted = words_of(options.predict) or list(dict.fromkeys(row.scheme for row in measured if row.scheme not in on))
    fitting, others = calibrate.measured_schemes(measured, on), calibrate.measured_schemes(measured, wanted)
    if not fitting:
        raise ValueError(f"--on {options.on!r} names no scheme; give one or more of the record's")
    rates = calibrate.fit(fitting, calibrate.host_rates(record))
    fitted, predicted = calibrate.predict(fitting, rates), calibrate.predict(others, rates)
    if options.as_json:
        told = [{**asdict(row), "ratio": row.ratio, "fitted": row in fitted} for row in (*fitted, *predicted)]
        print(json.dumps({"rates": to_json(rates), "results": told}, indent=2))
        return
    table = figures_table(["", "K", "measured", "model", "ratio", ""], f"{path.name}: seconds of a step")
    for rows, what in ((fitted, "fitted"), (predicted, "predicted")):
        for row in rows:
            cells = (f"{row.measured_s:.2f}", f"{row.predicted_s:.2f}", f"{row.ratio:.2f}", what)
            table.add_row(row.scheme, str(row.micro_batches), *cells)
    show(table)
    links = ", ".join(f"{domain} {share:.2f}" for domain, share in rates.link_efficiency.items())
    print(f"Rates: {rates.flops:.3g} FLOP/s, packing {rates.memory:.3g} bytes/s, share of links' rates: {links}")
