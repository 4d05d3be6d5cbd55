# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo simulate``: how long a step takes under each scheme, how far that may be off, and on what it depends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from rich.table import Table

from zero_topo.cli.fitting import fit
from zero_topo.cli.inputs import MOST_MICRO_BATCHES, machine, read_count, read_rates, words_of
from zero_topo.cli.options import MACHINES, MODEL_NAMES, SCHEME_NAMES, Force, Overlap, Rare, refuse_others, taking
from zero_topo.cli.output import print_json
from zero_topo.cli.tables import show
from zero_topo.config import SCHEMES, ZeroTopoConfig, load_deepspeed_config, resolve_config
from zero_topo.cost.explain import range_sentence, setting
from zero_topo.cost.model_files import load_model
from zero_topo.cost.planner import Price, Request
from zero_topo.cost.step import Job, known_rates, rates_of
from zero_topo.cost.volume import by_domain
from zero_topo.observe.console import figures_table
from zero_topo.observe.files import SCALING, check_files, write_png
from zero_topo.strict import Seconds, did_you_mean, to_json
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.presets import assumptions
from zero_topo.topology.rates import Rates
from zero_topo.units import format_bytes

GCDS = "64,128,256,384"
STOCK = "stock"
NotNegative = Annotated[int, Field(ge=0)]
SHOWN = (("compute", "optimizer"), ("gather_forward", "gather_backward"), ("scatter",), ("sync", "publish"))
"""Phases of each column of the table."""
NEVER = 10**6
"""Micro-batches beyond which nobody breaks even: a step of so many takes days."""


@dataclass(frozen=True)
class Options:
    """The options of ``simulate``."""

    machine: Annotated[
        str,
        typer.Option(
            autocompletion=MACHINES,
            metavar="PRESET|FILE|JSON",
            help="Preset, .json file or JSON object that describes the machine.",
        ),
    ] = "frontier"
    model: Annotated[
        str,
        typer.Option(
            autocompletion=MODEL_NAMES,
            metavar="NAME|FILE",
            help="Model name, Hugging Face config.json or GPT-NeoX YAML.",
        ),
    ] = "gpt-neox-20b"
    gcds: Annotated[str | None, typer.Option(help="Rank counts, comma-separated.", show_default=GCDS)] = None
    schemes: Annotated[
        str,
        typer.Option(
            autocompletion=SCHEME_NAMES,
            help="Names or block files (.json), comma-separated; stock-NAME is stock DeepSpeed's traffic.",
        ),
    ] = "zero3,zero++,paper,topo"
    micro_batches: Annotated[str, typer.Option(help="Micro-batches per optimizer step, comma-separated.")] = "1,8"
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and micro-batch.")] = 1
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's.")] = None
    overlap: Overlap = None
    rates: Annotated[
        str, typer.Option(metavar="FILE|JSON", help="Link rates that replace the preset's, all or some keys.")
    ] = "{}"
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds.")] = False
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw TFLOP/s per rank over the rank count.")
    ] = None
    force: Force = False
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Fit rates instead: to outputs of rccl-tests or nccl-tests, any number of them."
        ),
    ] = None
    prefetch: Annotated[NotNegative, Rare("modules whose weights are gathered ahead")] = 1
    latency: Annotated[Seconds | None, Rare("seconds per message, instead of the machine's")] = None
    checkpointing: Annotated[bool, Rare("false keeps activations instead of recomputing them")] = True


@taking(Options)
def simulate(options: Options) -> None:
    """Predict seconds and TFLOP/s of a step, per scheme and rank count. Shows what each step waits for."""
    if options.calibrate:
        fitted = ("calibrate", "as_json")
        refuse_others(options, lambda name: name in fitted, "--calibrate fits rates and simulates nothing else")
        fit(options.calibrate, options.as_json)
        return
    check_files([(options.plot, ".png", SCALING)], options.force)
    machines, rates = _machines(options)
    job = Job(
        load_model(options.model, options.seq),
        options.micro_batch,
        1,
        options.checkpointing,
        prefetch=options.prefetch,
        overlap=options.overlap,
    )
    counts = _counts(options.micro_batches, "--micro-batches", MOST_MICRO_BATCHES)
    schemes = _schemes(words_of(options.schemes))
    prices = {
        (name, place.world_size, count): _price(schemes[name], place, job, count, rates)
        for name in schemes
        for place in machines
        for count in counts
    }
    points = [_point(*key, price) for key, price in prices.items()]
    content = {
        "machine": options.machine,
        "model": options.model,
        "params": job.model.params,
        "setting": setting(job),
        "overlap": job.hidden,
        "notes": job.model.notes,
        "rates": to_json(rates),
        "assumed": assumptions(machines[0].name),
        "results": points,
        "scaling_efficiency": list(_scaling(points)),
        "break_even": [row for place in machines for row in _break_even(schemes, place, job, rates)],
    }
    if options.plot is not None:
        _draw(options, options.plot, job, content)
    if options.as_json:
        print_json(content)
        return
    _show(options, prices, content)
    if options.plot is not None:
        print(f"Written: {options.plot}")


def _price(scheme: tuple[ZeroTopoConfig, bool], place: Topology, job: Job, count: int, rates: Rates) -> Price:
    """Return the cost of a scheme on a machine for a number of micro-batches per step."""
    block, stock = scheme
    request = Request(place, replace(job, micro_batches=count, stock=stock), own_rates=rates)
    return request.price(resolve_config(block, place))


def _point(scheme: str, ranks: int, count: int, price: Price) -> dict[str, Any]:
    """A predicted step in JSON types."""
    return {
        "scheme": scheme,
        "ranks": ranks,
        "micro_batches": count,
        "step_s": price.step.seconds,
        "tflops_per_gpu": price.step.tflops_per_gpu,
        "breakdown": dict(price.step.breakdown),
        "range": to_json(price.range),
        "sent_by_domain": by_domain(price.sent),
        "held": price.held,
        "fits": price.fits,
    }


def _scaling(points: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """TFLOP/s per rank over that on the fewest ranks, for each scheme and number of micro-batches."""
    least = min(point["ranks"] for point in points)
    base = {(p["scheme"], p["micro_batches"]): p["tflops_per_gpu"] for p in points if p["ranks"] == least}
    for point in points:
        if point["ranks"] != least:
            named = {key: point[key] for key in ("scheme", "micro_batches", "ranks")}
            efficiency = point["tflops_per_gpu"] / base[point["scheme"], point["micro_batches"]]
            yield {**named, "over": least, "efficiency": efficiency}


def _break_even(
    schemes: Mapping[str, tuple[ZeroTopoConfig, bool]], place: Topology, job: Job, rates: Rates
) -> Iterable[dict[str, Any]]:
    """For each pair of schemes: from how many micro-batches on the one that is slower at 1 wins; None if never.

    A step's time is a straight line in the number of its micro-batches, which two predictions give.
    """
    times = {
        name: [_price(scheme, place, job, count, rates).step.seconds for count in (1, 2)]
        for name, scheme in schemes.items()
    }
    for pair in combinations(schemes, 2):
        ahead, behind = sorted(pair, key=lambda name: times[name][0])
        first, second = (there - here for here, there in zip(times[ahead], times[behind], strict=True))
        found = 1 + first / (first - second) if second < first else None
        even = found if found is not None and found <= NEVER else None
        names = {"ahead_at_1": ahead, "behind_at_1": behind}
        yield {"ranks": place.world_size, **names, "break_even": even}


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


def _schemes(names: Sequence[str]) -> dict[str, tuple[ZeroTopoConfig, bool]]:
    if not names or len(set(names)) < len(names):
        raise ValueError(f"schemes {list(names)} must be at least one, each named once")
    return {name: _entry(name) for name in names}


def _entry(name: str) -> tuple[ZeroTopoConfig, bool]:
    """A scheme, or the block of a file, and whether DeepSpeed's own engine sends it: ``stock-NAME``, or ZeRO-3."""
    plain = "zero3" if name == STOCK else name.removeprefix(f"{STOCK}-")
    if plain.endswith(".json"):
        content = load_deepspeed_config(plain)
        return ZeroTopoConfig.parse(content.get("zero_topo", content)), plain != name
    if plain not in SCHEMES:
        near = did_you_mean(name, [*SCHEMES, *(f"{STOCK}-{other}" for other in SCHEMES)])
        raise ValueError(
            f"unknown scheme {name!r}{near} (known: {', '.join(SCHEMES)}, and a .json file with a zero_topo block, "
            f"each also with '{STOCK}-' before it)"
        )
    return ZeroTopoConfig.parse({"scheme": plain}), plain != name


def _counts(text: str, what: str, most: int = MOST_RANKS) -> list[int]:
    counts = sorted({read_count(word, what, most=most) for word in words_of(text)})
    if not counts:
        raise ValueError(f"{what} {text!r} names no number; write one or more, such as 8,16")
    return counts


def _draw(options: Options, path: Path, job: Job, content: Mapping[str, Any]) -> None:
    from zero_topo.observe.plots import job_line
    from zero_topo.observe.scaling_figure import scaling

    points = content["results"]
    notes = [job_line(job, (p["ranks"] for p in points), (p["micro_batches"] for p in points)), content["setting"]]
    notes.append("bars: all that is not known at its best and at its worst")
    if content["assumed"]:
        notes.append(f"assumed for {options.machine}: {', '.join(content['assumed'])}")
    figure = scaling(points, f"{options.model} on {options.machine}", "\n".join(notes))
    write_png(figure, path, SCALING, dpi=200)


def _show(options: Options, prices: Mapping[tuple[str, int, int], Price], content: Mapping[str, Any]) -> None:
    for count in dict.fromkeys(key[2] for key in prices):
        title = f"{options.model} on {options.machine}, K = {count}, predicted"
        show(_steps_table({key: price for key, price in prices.items() if key[2] == count}, title))
    print(f"- {content['setting']}")
    for row in content["break_even"]:
        if row["ranks"] == content["break_even"][-1]["ranks"]:
            ahead, behind, even = row["ahead_at_1"], row["behind_at_1"], row["break_even"]
            beats = f"{behind} never beats {ahead}" if even is None else f"{behind} beats {ahead} from {even:.1f}"
            print(f"- {beats}{'' if even is None else ' micro-batches on'}, at {row['ranks']:,} ranks")
    last = list(prices)[-1]
    for key, price in prices.items():
        if key[1:] == last[1:]:
            print(f"- {key[0]} at {key[1]:,} ranks: {range_sentence(price)}")
    for key, price in prices.items():
        if not price.fits and key[2] == last[2]:
            limit = format_bytes(price.request.limit or 0)
            print(f"- {key[0]} on {key[1]:,} ranks does not fit: it needs {format_bytes(price.held)} of {limit}")
    for note in content["notes"]:
        print(f"- {note}")
    if content["assumed"]:
        print(f"- assumed, not measured, for {options.machine}: {', '.join(content['assumed'])}")


def _steps_table(prices: Mapping[tuple[str, int, int], Price], title: str) -> Table:
    """Scheme and ranks by seconds of a step, TFLOP/s and their range, and the step's shares of what took time."""
    columns = ["", "ranks", "step", "TFLOP/s", "range", "compute", "gather", "scatter", "sync"]
    table = figures_table(columns, title)
    for (scheme, ranks, _), price in prices.items():
        found, within = price.step, price.range
        shares = (sum(found.breakdown[phase] for phase in phases) / found.seconds for phases in SHOWN)
        cells = [f"{100 * share:.0f}%" if share >= 0.005 else "-" for share in shares]
        flops = found.tflops_per_gpu * found.seconds
        spread = f"{flops / within.high_s:.0f}-{flops / within.low_s:.0f}"
        step, speed = f"{found.seconds:.3g} s", f"{found.tflops_per_gpu:.1f}"
        table.add_row(scheme, f"{ranks:,}", step, speed, spread, *cells)
    return table
