# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo simulate``: how long a step takes under each scheme, how far that may be off, and on
what it depends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python
from rich.table import Table

from zero_topo.cli.inputs import MOST_MICRO_BATCHES, counts, naming, read_deepspeed_config
from zero_topo.cli.job import JobOptions, Machine, machines_of, need_model, request_of
from zero_topo.cli.options import SCHEME_NAMES, Force, taking
from zero_topo.cli.output import fill, print_json, print_notes
from zero_topo.cli.tables import bar_cells, show, with_bars
from zero_topo.config import ROLES, SCHEMES, ZeroTopoConfig, resolve_config
from zero_topo.config.parts import ROOT
from zero_topo.cost.explain import assumed_lines, range_sentence, setting
from zero_topo.cost.job import method_of
from zero_topo.cost.pipeline import NAME, PipelinePrice, best_pipeline, pipeline_price, pipelines
from zero_topo.cost.planner import Price, Request
from zero_topo.cost.step import Range
from zero_topo.cost.tensor import tree_of
from zero_topo.observe.console import figures_table
from zero_topo.observe.documents import Document
from zero_topo.observe.files import SCALING, check_files, write_png
from zero_topo.strict import did_you_mean, words_of
from zero_topo.topology import preset_names
from zero_topo.topology.presets import assumptions
from zero_topo.topology.rates import Rates
from zero_topo.units import format_bytes

RANKS = "64,128,256,384"
MICRO_BATCHES = "1,8"
STOCK = "stock"
SHOWN = {
    "compute": ("compute", "optimizer"),
    "gather": ("gather_forward", "gather_backward", "publish"),
    "reduce": ("scatter", "sync", "matrices"),
    "other": ("tensor", "tokens", "stages", "bubble"),
}
"""Column of the table -> phases."""
DEGREES = re.compile(r"(\d+)/(\d+|-)/(\d+)/(\d+)")


@dataclass(frozen=True)
class Options(JobOptions):
    """Of ``simulate``."""

    machine: Machine = "frontier"
    schemes: Annotated[
        str,
        typer.Option(
            autocompletion=SCHEME_NAMES,
            help="Comma-separated: schemes, blocks (.json), degrees as plan prints them "
            "(2/-/8/384), stock-NAME as "
            "unmodified DeepSpeed sends it, pipeline or pipeline-STAGESxTENSOR with ZeRO-1.",
        ),
    ] = "stock-zero3,zero3,zero++,paper,topo,pipeline"
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw TFLOP/s per rank over the rank count."),
    ] = None
    force: Force = False


class Point(Document):
    """One predicted step."""

    scheme: str
    ranks: int
    micro_batches: int
    seconds: float
    tflops_per_gpu: float
    breakdown: dict[str, float]
    range: Range
    sent_by_domain: dict[str, int]
    stored: int
    fits: bool
    checkpointing: bool


class Simulated(Document):
    """``simulate``."""

    machine: str
    model: str
    params: int
    setting: str
    overlap: float
    notes: list[str]
    rates: Rates
    assumed: list[str]
    results: list[Point]


DOCUMENT = Simulated


@taking(Options)
def simulate(options: Options) -> None:
    """Predict how long a step takes under each scheme. Shows TFLOP/s and what each step waits
    for.
    """
    check_files([(options.plot, ".png", SCALING)], options.force)
    named = options.model or options.params
    options = options if named else replace(options, model="gpt-neox-20b")
    steps = counts(options.micro_batches or MICRO_BATCHES, "--micro-batches", MOST_MICRO_BATCHES)
    places = list(_places(options))
    names = words_of(options.schemes)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"schemes {names} must be at least one, each named once")
    prices = {
        (name, place.topology.world_size, count): _price(name, place, count)
        for name in names
        for place in places
        for count in steps
    }
    job = places[0].job
    content = fill(
        Simulated,
        job.model,
        places[0],
        machine=options.machine,
        model=job.model.name,
        setting=setting(places[0]),
        overlap=job.hidden,
        notes=[*job.model.notes, *assumed_lines(places[0])],
        assumed=assumptions(places[0].topology.name),
        results=[
            fill(
                Point,
                price,
                price.step,
                price.request.job,
                scheme=name,
                ranks=ranks,
                micro_batches=count,
            )
            for (name, ranks, count), price in prices.items()
        ],
    )
    content = to_jsonable_python(content)
    if options.plot is not None:
        _draw(options.plot, places[0], content)
    if options.as_json:
        print_json(content)
        return
    _show(prices, content)
    if options.plot is not None:
        print(f"Written: {options.plot}")


def _places(options: Options) -> Iterator[Request]:
    """The machine with each number of ranks, and the job there."""
    if options.machine in preset_names() and not (options.ranks or options.nodes):
        options = replace(options, ranks=RANKS)
    model = need_model(options)
    for place in machines_of(options):
        request = request_of(replace(options, micro_batches="1"), place, model)
        yield replace(request, keeps_if_fits=options.checkpointing is None)


def _price(name: str, place: Request, count: int) -> Price:
    """What a scheme, or a pipeline, costs on a machine with so many micro-batches a step.

    A scheme has a name, the block of a file, or degrees; ``stock-NAME`` is DeepSpeed's own engine.
    """
    plain = "zero3" if name == STOCK else name.removeprefix(f"{STOCK}-")
    content = read_deepspeed_config(plain) if plain.endswith(".json") else {}
    job = replace(
        place.job, micro_batches=count, muon=method_of(content), stock=name.startswith(STOCK)
    )
    request = replace(place, job=job)
    if name.startswith(NAME):
        tried = {
            plan.name: pipeline_price(plan, request) for plan in pipelines(place.topology, job)
        }
        if name != NAME and name not in tried:
            raise ValueError(
                f"unknown scheme {name!r}: on {place.topology.world_size} ranks this model has "
                f"{NAME}-STAGESxTENSOR "
                f"with {', '.join(plan.removeprefix(f'{NAME}-') for plan in tried)}"
            )
        return (
            tried.get(name)
            or best_pipeline(request)
            or min(tried.values(), key=lambda price: price.stored)
        )
    if degrees := DEGREES.fullmatch(plain):
        pairs = zip(ROLES, degrees.groups(), strict=True)
        content = {role: int(degree) for role, degree in pairs if degree != "-"}
    elif plain in SCHEMES:
        content = {"scheme": plain}
    elif not plain.endswith(".json"):
        near = did_you_mean(
            name, [*SCHEMES, *(f"{STOCK}-{other}" for other in SCHEMES), NAME], cutoff=0.4
        )
        raise ValueError(
            f"unknown scheme {name!r}{near} (known: {', '.join(SCHEMES)}, degrees such as "
            "2/-/8/384, a .json file with "
            f"a zero_topo block, each also with '{STOCK}-' before it; {NAME}, {NAME}-4x2)"
        )
    elif ROOT not in content:
        raise ValueError(f'{plain}: has no "{ROOT}" block; add one, such as "{ROOT}": {{}}')
    with naming(plain):
        of_file = ZeroTopoConfig.from_ds_config(content)
        block = ZeroTopoConfig.parse(content) if of_file is None else of_file
        return request.price(resolve_config(block, tree_of(place.topology, job.tensor)))


def _draw(path: Path, place: Request, content: Mapping[str, Any]) -> None:
    from zero_topo.observe.plots import job_line, scaling

    points = content["results"]
    where = content["machine"]
    notes = [
        job_line(place.job, (p["ranks"] for p in points), (p["micro_batches"] for p in points))
    ]
    notes += [content["setting"], "bars: all that is not known at its best and at its worst"]
    if content["assumed"]:
        notes.append(f"assumed for {where}: {', '.join(content['assumed'])}")
    figure = scaling(points, f"{content['model']} on {where}", "\n".join(notes))
    write_png(figure, path, SCALING, dpi=200)


def _show(prices: Mapping[tuple[str, int, int], Price], content: Mapping[str, Any]) -> None:
    for count in dict.fromkeys(key[2] for key in prices):
        title = f"{content['model']} on {content['machine']}, K = {count}, predicted"
        shown = {key: price for key, price in prices.items() if key[2] == count}
        show(with_bars(partial(_steps_table, shown, title)))
    print(f"- {content['setting']}")
    recomputed = [
        f"{key[0]} on {key[1]:,} ranks"
        for key, price in prices.items()
        if price.request.job.checkpointing
    ]
    print(f"- activations are recomputed by {', '.join(dict.fromkeys(recomputed)) or 'none'}")
    last = list(prices)[-1]
    for key, price in prices.items():
        if key[1:] == last[1:]:
            kind = (
                f" ({price.config.name})"
                if isinstance(price, PipelinePrice) and key[0] == NAME
                else ""
            )
            print(f"- {key[0]}{kind} at {key[1]:,} ranks: {range_sentence(price)}")
        if not price.fits and key[2] == last[2]:
            limit = format_bytes(price.request.limit or 0)
            print(
                f"- {key[0]} on {key[1]:,} ranks does not fit: it needs "
                f"{format_bytes(price.stored)} of {limit}"
            )
    print_notes(content["notes"])


def _steps_table(prices: Mapping[tuple[str, int, int], Price], title: str, bars: int = 0) -> Table:
    """Scheme and ranks by seconds of a step, TFLOP/s and their range, and the step's shares of what
    took time.
    """
    steps = [price.step.breakdown for price in prices.values()]
    parts = {
        name: phases for name, phases in SHOWN.items() if any(phases[0] in step for step in steps)
    }
    table = figures_table(
        ["", "ranks", "step", "TFLOP/s", "range", *parts, *([" "] if bars else [])],
        title,
        ("", " "),
    )
    drawn = bar_cells([price.step.seconds for price in prices.values()], bars)
    for ((scheme, ranks, _), price), drawn_bar in zip(prices.items(), drawn, strict=True):
        found = price.step
        within = price.range
        cells = []
        for phases in parts.values():
            share = sum(found.breakdown.get(phase, 0) for phase in phases) / found.seconds
            cells.append(f"{100 * share:.0f}%" if share >= 0.005 else "-")
        flops = found.tflops_per_gpu * found.seconds
        spread = f"{flops / within.high_s:.0f}-{flops / within.low_s:.0f}"
        step = f"{found.seconds:.3g} s" if found.seconds < 1000 else f"{found.seconds:,.0f} s"
        speed = f"{found.tflops_per_gpu:.1f}"
        table.add_row(scheme, f"{ranks:,}", step, speed, spread, *cells, *drawn_bar)
    return table
