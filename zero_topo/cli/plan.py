# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo plan``: where a scheme stores what, its memory and bytes, and which plan to take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zero_topo.cli.inputs import LIKE_PARAMS, naming, read_count, read_deepspeed_config
from zero_topo.cli.job import JobOptions, machine_of, need_model, request_of
from zero_topo.cli.options import SPARSE_NAMES, Force, Rare, refuse_others, taking
from zero_topo.cli.output import fill, print_json, print_notes
from zero_topo.cli.tables import (
    DEGREES,
    drawn_name,
    memory_table,
    places_table,
    ranking_table,
    show,
    volume_table,
    with_bars,
)
from zero_topo.config import SCHEMES, ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.config.parts import ROOT
from zero_topo.cost.divided import rank_experts, rank_tensor
from zero_topo.cost.explain import explain, setting
from zero_topo.cost.job import deepspeed_settings, method_of
from zero_topo.cost.largest import max_params
from zero_topo.cost.model_files import ModuleTree
from zero_topo.cost.pipeline import PipelinePrice, best_pipeline
from zero_topo.cost.planner import (
    Priced,
    Ranking,
    Request,
    rank_plans,
)
from zero_topo.cost.step import Range
from zero_topo.cost.transformer import Transformer
from zero_topo.observe.console import figures_table
from zero_topo.observe.documents import Degrees, Document, Resolved
from zero_topo.observe.files import RANKING, check_files, write_png
from zero_topo.topology import Topology
from zero_topo.topology.discover import ALONE
from zero_topo.topology.presets import assumptions
from zero_topo.units import format_bytes, format_count

SHOWN_PLANS = 8
DRAWN_PLANS = 10
OF_A_JOB = (
    "micro_batch",
    "tensor_parallel",
    "expert_parallel",
    "checkpointing",
    "overlap",
    "attention",
    "fused_loss",
    "states_only",
    "reserve",
    "lossy",
    "sparse",
    "rates",
)
"""Options that the plain view, which is formulas of the parameters, does not read."""


@dataclass(frozen=True)
class PlanOptions(JobOptions):
    """Of ``plan``."""

    recommend: Annotated[
        bool,
        typer.Option("--recommend", help="List the fastest plans that fit, and explain the first."),
    ] = False
    max_params: Annotated[
        bool,
        typer.Option("--max-params", help="Show the largest model that each scheme can train."),
    ] = False
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow quantized and sparse traffic in --recommend.")
    ] = False
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the ten best plans of --recommend."),
    ] = None
    force: Force = False
    trainable: Annotated[str | None, Rare("trained parameters, the others are frozen")] = None
    states_only: Annotated[
        bool, Rare("count weights, gradients and optimizer states alone, as papers do")
    ] = False
    scheme: Annotated[
        tuple[str, ...], Rare("schemes to show, comma-separated; default: all", tuple(SCHEMES))
    ] = ()
    sparse: Annotated[
        tuple[str, ...],
        Rare("modes of sparse sync to try as well, comma-separated; implies lossy", SPARSE_NAMES),
    ] = ()
    deepspeed_config: Annotated[
        str | None, Rare("DeepSpeed JSON whose optimizer, buckets and offload count")
    ] = None


@taking(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show memory and traffic of each scheme for a model. --recommend ranks all plans that fit.

    Training is in 16 bits, with Adam unless the config named by deepspeed_config has Muon.
    """
    if options.recommend and options.max_params:
        raise ValueError("--recommend and --max-params are different views; ask for one at a time")
    if options.plot is not None and not options.recommend:
        raise ValueError("--plot draws the plans of --recommend; add it, or leave --plot out")
    check_files([(options.plot, ".png", RANKING)], options.force)
    view = (
        recommendation if options.recommend else largest_models if options.max_params else schemes
    )
    if view is schemes:
        refuse_others(options, lambda name: name not in OF_A_JOB, "add --recommend or --max-params")
    else:
        refuse_others(
            options, lambda name: name != "trainable", "leave out --recommend and --max-params"
        )
    view(options)


def _request(options: PlanOptions) -> Request:
    """Machine, model and job for the planner.

    Raises:
        ValueError: as those, for an unknown mode of sync, or a config that cannot be read.
    """
    loaded = (
        {} if options.deepspeed_config is None else read_deepspeed_config(options.deepspeed_config)
    )
    request = request_of(options, machine_of(options), need_model(options))
    with naming(options.deepspeed_config or ""):
        settings = deepspeed_settings(loaded)
    return replace(
        request,
        job=replace(request.job, **settings),
        reserve=0.0 if options.states_only and options.reserve is None else request.reserve,
        sparse=options.sparse,
        states_only=options.states_only,
        keeps_if_fits=options.recommend and options.checkpointing is None,
    )


def _schemes(options: PlanOptions, topology: Topology) -> dict[str, ResolvedConfig]:
    """The schemes to show, by default all, on a machine."""
    blocks = {name: ZeroTopoConfig.parse({"scheme": name}) for name in options.scheme or SCHEMES}
    return {name: resolve_config(block, topology) for name, block in blocks.items()}


# -- all schemes -----------------------------------------------------------------------------------


class _Sent(Document):
    phase: str
    domain: str
    bytes: int


class _Costed(Resolved):
    memory: dict[str, int]
    sent: list[_Sent]
    sent_by_domain: dict[str, int]


class Schemes(Document):
    """``plan``."""

    topology: Topology
    params: int
    trainable: int
    micro_batches: int
    schemes: list[_Costed]


def schemes(options: PlanOptions) -> None:
    """Prints degrees, memory and bytes sent of each scheme."""
    request = _states(options)
    found = request.topology
    trained = sum(request.work.numels)
    frozen = sum(request.frozen)
    prices = {name: request.price(config) for name, config in _schemes(options, found).items()}
    if options.as_json:
        rows: list[Any] = [
            {
                **price.config.to_json(),
                "memory": price.memory,
                "sent": [
                    {"phase": phase, "domain": domain, "bytes": n}
                    for (phase, domain), n in price.sent.items()
                ],
                "sent_by_domain": price.sent_by_domain,
            }
            for price in prices.values()
        ]
        counts = {
            "params": trained + frozen,
            "trainable": trained,
            "micro_batches": request.job.micro_batches,
        }
        print_json({"topology": found.to_json(), **counts, "schemes": rows})
        return
    configs = {name: price.config for name, price in prices.items()}
    part = f", {trained:,} of them trained," if frozen else ""
    shape = (
        f"{found.nodes} x {found.gpus_per_node} x {found.ranks_per_gpu} = {found.world_size} ranks"
    )
    show(places_table(configs, f"{trained + frozen:,} parameters{part} on {found.name}: {shape}"))
    show(
        memory_table({name: price.memory for name, price in prices.items()}, found.memory_per_rank)
    )
    show(
        volume_table(
            {name: price.sent_by_domain for name, price in prices.items()},
            request.job.micro_batches,
        )
    )
    if found.name == ALONE:
        print(
            "- no machine is named, and this is no job: one rank; for another --machine frontier "
            "--nodes 48"
        )
    print_notes(need_model(options).notes if options.model else ())
    if len(configs) == 1:
        print_notes(next(iter(configs.values())).notes)


def _states(options: PlanOptions) -> Request:
    """The job, of which states count; a number of parameters is one matrix, trained in part if the
    options say so.
    """
    muon = options.deepspeed_config and method_of(read_deepspeed_config(options.deepspeed_config))
    counted = options.params is not None and not muon
    request = replace(
        _request(replace(options, params="1B") if counted else options), states_only=True
    )
    if not counted and options.trainable is None:
        return request
    params = (
        read_count(options.params or "", "--params", LIKE_PARAMS)
        if counted
        else request.job.model.params
    )
    trained = (
        params
        if options.trainable is None
        else read_count(options.trainable, "trainable", LIKE_PARAMS)
    )
    if trained > params:
        raise ValueError(
            f"trainable {trained:,} is more than the {params:,} parameters of the model"
        )
    return replace(
        request, numels=(trained,), frozen=(params - trained,) if trained < params else ()
    )


# -- the best plan ---------------------------------------------------------------------------------


class Ranked(Document):
    """A plan; bytes and seconds."""

    name: str
    degrees: Degrees
    quantize: dict[str, str | None]
    seconds: float
    checkpointing: bool
    losses: list[str]
    sent_by_domain: dict[str, int]
    memory: dict[str, int]
    block: ZeroTopoConfig


class _Recommended(Ranked):
    range: Range


class _Divided(Ranked):
    tensor: int
    expert: int
    micro_batch: int
    micro_batches: int


class _Refused(Document):
    name: str
    memory: dict[str, int]
    needs: int


class _Compared(Document):
    name: str
    seconds: float
    range: Range
    sent_by_domain: dict[str, int]
    memory: dict[str, int]


class Recommendation(Document):
    """``plan --recommend``."""

    topology: Topology
    model: Transformer | ModuleTree
    params: int
    micro_batch: int
    micro_batches: int
    checkpointing: bool
    setting: str
    overlap: float
    memory_limit: int | None
    reserve: float
    recommended: _Recommended
    why: list[str]
    assumed: list[str]
    plans: list[Ranked]
    lossier: list[Ranked]
    tensor: list[_Divided]
    pipeline: _Compared | None
    refused: list[_Refused]


def recommendation(options: PlanOptions) -> None:
    """All plans ranked, the best explained, and the block to paste."""
    request = _request(options)
    asked = ZeroTopoConfig.parse({"lossy": options.lossy or bool(options.sparse)})
    ranking = rank_plans(asked, request)
    tensor = (*rank_tensor(asked, request), *rank_experts(asked, request))
    reasons = explain(ranking, tensor)
    pipeline = best_pipeline(request)
    if options.plot is not None:
        _draw(options.plot, ranking)
    if options.as_json:
        machine = _machine(options)
        print_json(_ranking_json(ranking, reasons, tensor, pipeline, machine))
        return
    model = request.job.model
    found = request.topology
    shape = (
        f"{format_count(model.params)} parameters ({model.layers} layers of width {model.hidden})"
    )
    title = f"{shape} on {found.world_size} ranks of {found.name}"
    divided_plans = [of.best for of in tensor]
    plans = ranking.timed[:SHOWN_PLANS]
    show(with_bars(lambda bars: ranking_table(plans, title, divided_plans, pipeline, bars)))
    print(f"{DEGREES}\n")
    print_notes([setting(ranking.best.request), *reasons])
    block = {**_machine(options), **ranking.best.candidate.settings}
    print(f"\n{json.dumps({ROOT: block}, indent=2)}")
    if options.plot is not None:
        print(f"\nWritten: {options.plot}")


def _draw(path: Path, ranking: Ranking) -> None:
    from zero_topo.observe.plots import ranked_plans

    model = ranking.request.job.model
    found = ranking.request.topology
    title = (
        f"{format_count(model.params)} parameters on {found.world_size} ranks of {found.name}, "
        "predicted"
    )
    plans = ranking.timed[:DRAWN_PLANS]
    rows = []
    for plan in plans:
        rows.append((drawn_name(plan), plan.seconds, plan.range, plan.memory))
    write_png(
        ranked_plans(rows, title, f"{DEGREES}\n{setting(ranking.best.request)}"),
        path,
        RANKING,
        dpi=200,
    )


def _ranking_json(
    ranking: Ranking,
    reasons: list[str],
    tensor: Sequence[Ranking],
    pipeline: PipelinePrice | None,
    machine: dict[str, Any],
) -> dict[str, Any]:
    request = ranking.request
    job = ranking.best.request.job
    return fill(
        Recommendation,
        job,
        request,
        topology=request.topology.to_json(),
        params=job.model.params,
        setting=setting(ranking.best.request),
        overlap=job.hidden,
        memory_limit=request.limit,
        recommended=plan_json(ranking.best, machine, _Recommended),
        why=reasons,
        assumed=assumptions(request.topology.name),
        plans=[plan_json(plan, machine) for plan in ranking.timed],
        lossier=[plan_json(plan, machine) for plan in ranking.lossier],
        tensor=[plan_json(of.best, machine, _Divided) for of in tensor],
        pipeline=None if pipeline is None else fill(_Compared, pipeline, name=pipeline.config.name),
        refused=[
            fill(_Refused, plan, name=plan.candidate.name, needs=plan.stored)
            for plan in ranking.refused
        ],
    )


def plan_json(plan: Priced, machine: dict[str, Any], kind: Any = Ranked) -> dict[str, Any]:
    """A plan in JSON types, with the keys of the machine in its block."""
    of = plan.candidate
    places = {"degrees": plan.config.plan.degrees(), "quantize": plan.config.to_json()["quantize"]}
    block = {**machine, **of.settings}
    return fill(kind, plan, plan.request.job, name=of.name, **places, losses=of.words, block=block)


def _machine(options: PlanOptions) -> dict[str, Any]:
    """The key of a block that names the machine."""
    setting = options.machine
    return (
        {}
        if setting == "auto"
        else {"topology": json.loads(setting) if setting.startswith("{") else setting}
    )


# -- the largest models ----------------------------------------------------------------------------


class MaxParams(Document):
    """``plan --max-params``."""

    topology: Topology
    memory_limit: int
    reserve: float
    setting: str
    schemes: dict[str, dict[Literal["max_params"], int | None]]


def largest_models(options: PlanOptions) -> None:
    """The largest model that each scheme trains on the machine."""
    named = options.params or options.model
    request = _request(options if named else replace(options, params="1B"))
    machine = request.topology
    if request.limit is None:
        raise ValueError(
            f"--max-params: the memory of a rank of {machine.name} is not known; give "
            '"memory_per_rank" (bytes) '
            "in a .json file of the machine, or take a preset"
        )
    found = {
        name: max_params(config, request)
        for name, config in _schemes(options, request.tree).items()
    }
    # Not of the request's size
    assumed = f"models of conventional shape; {setting(request).partition('; ')[2]}"
    if options.as_json:
        schemes = {name: {"max_params": n} for name, n in found.items()}
        place = {"topology": machine.to_json(), "memory_limit": request.limit}
        print_json(fill(MaxParams, request, **place, setting=assumed, schemes=schemes))
        return
    table = figures_table(
        ["", "parameters"], f"Largest model on {machine.world_size} ranks of {machine.name}"
    )
    for name, params in found.items():
        table.add_row(name, f"{params:,}" if params else "-")
    show(table)
    counted = "weights, gradients and optimizer alone; " if request.states_only else ""
    print(
        f"- {counted}in {format_bytes(request.limit)} of each rank ({request.reserve:.0%} kept in "
        "reserve)"
    )
    print(f"- {assumed}")


DOCUMENT = Schemes | Recommendation | MaxParams
