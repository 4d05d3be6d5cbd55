# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo check``: would this DeepSpeed config start, with which plan, and at what cost?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from zero_topo.cli.inputs import naming, refuse
from zero_topo.cli.job import JobOptions, machine_of, model_of, request_of, tensor_of
from zero_topo.cli.options import taking
from zero_topo.cli.output import fill, print_json, print_notes
from zero_topo.cli.plan import Ranked, plan_json
from zero_topo.cli.tables import DEGREES, degrees, places_table, show
from zero_topo.config import (
    AUTO,
    ResolvedConfig,
    ZeroTopoConfig,
    deepspeed_problems,
    is_automatic,
    load_deepspeed_config,
    resolve_config,
)
from zero_topo.config.deepspeed_json import muon_clipping, with_environment_block
from zero_topo.config.stock_keys import translate
from zero_topo.cost.candidates import before_a_model, fewest_ranks
from zero_topo.cost.explain import assumed_lines, planned, price_sentence, setting
from zero_topo.cost.largest import max_params
from zero_topo.cost.planner import Ranking, rank_plans
from zero_topo.cost.tensor import tree_of
from zero_topo.cost.transformer import SEQUENCE, scaled
from zero_topo.doctor.refusals import deepspeed_refusals, unasked
from zero_topo.observe.console import figures_table
from zero_topo.observe.documents import Document, Resolved
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.render import render_tree
from zero_topo.units import format_bytes, format_count, format_seconds
from zero_topo.versions import SUPPORTED, default_clipping, installed, installed_refusals

USUAL = (10**9, 7 * 10**9, 70 * 10**9)
"""Parameters of the models that are predicted if none is named."""


class Cost(Document):
    """Of a step of a rank, and the memory it needs; the limit is None if the memory is not
    known.
    """

    seconds: float
    sent_by_domain: dict[str, int]
    stored: int
    limit: int | None


class Checked(Resolved):
    """``check``."""

    topology: Topology
    cost: Cost | None
    translated: list[str]


class _Forecast(Document):
    params: int
    chosen: Ranked | None


class Automatic(Document):
    """``check`` of a block whose plan is chosen for the model, if none is named."""

    scheme: Literal["auto"]
    lossy: bool
    topology: Topology
    forecasts: list[_Forecast]
    translated: list[str]
    notes: list[str]


DOCUMENT = Checked | Automatic


@taking(JobOptions)
def check(
    options: JobOptions,
    ds_config: Annotated[
        str, typer.Argument(metavar="DS_CONFIG", help='DeepSpeed JSON with a "zero_topo" block.')
    ],
) -> None:
    """Validate a DeepSpeed config and show its plan. Starts nothing and needs no GPU."""
    refuse(installed_refusals())
    with naming(ds_config):
        loaded = with_environment_block(load_deepspeed_config(ds_config))
        refuse(deepspeed_problems(loaded) or deepspeed_refusals(loaded, None))
        block = ZeroTopoConfig.from_ds_config(loaded)
        if block is None:
            raise ValueError('has no "zero_topo" block; add one, such as "zero_topo": {}')
        found, doubts = _machine(options, block, loaded)
    model = model_of(options)
    clipping = default_clipping(installed("deepspeed") or SUPPORTED["deepspeed"].pinned)
    doubts += muon_clipping(loaded, clipping)
    tree = tree_of(found, tensor_of(options, loaded))
    translated = translate(loaded, optimizer=True).lines
    if is_automatic(block, tree) and model is None:
        _forecast(options, block, found, loaded, [*translated, *doubts])
        return
    cost: dict[str, Any] | None = None
    if model is None:
        resolved = resolve_config(block, tree)
        notes = [*resolved.notes, *_largest(options, resolved, found, loaded)]
    else:
        request = request_of(options, found, model, loaded)
        price = request.price(planned(block, request))
        resolved = price.config
        cost = fill(Cost, price, request)
        notes = [*resolved.notes, price_sentence(price), setting(request), *assumed_lines(request)]
    if (loaded.get("expert_parallel") or {}).get("enabled") is True and (
        cost is None or request.job.expert == 1
    ):
        notes.append(
            "expert parallelism is priced only for a model with experts, such as --model "
            "mixtral-8x7b: plan, seconds, bytes and memory are those without it"
        )
    resolved = replace(resolved, notes=tuple(dict.fromkeys([*doubts, *notes])))
    if options.as_json:
        print_json(
            {
                "topology": found.to_json(),
                **resolved.to_json(),
                "cost": cost,
                "translated": translated,
            }
        )
        return
    print(f"{render_tree(found)}\n")
    show(places_table({resolved.scheme or "free form": resolved}, "Shards: domain, ranks, format"))
    _say((*translated, *resolved.notes))


def _machine(
    options: JobOptions, block: ZeroTopoConfig, loaded: Mapping[str, Any]
) -> tuple[Topology, list[str]]:
    """Where the config will run, once DeepSpeed's batch sizes fit its ranks; and what was assumed
    for that.
    """
    if options.machine != AUTO and block.topology != AUTO:
        raise ValueError(
            f"--machine {options.machine}: the block already names its machine, "
            f"{block.topology!r}; leave --machine out"
        )
    where: Any = block.topology if options.machine == AUTO else options.machine
    named = replace(options, machine=where)
    counted = options.ranks is not None or options.nodes is not None
    fewest = None if counted else fewest_ranks(block, where)
    found = machine_of(named if fewest is None else replace(named, ranks=str(fewest)))
    tensor = tensor_of(options, loaded)
    anywhere = isinstance(where, str) and where in (AUTO, *preset_names())
    if counted or not anywhere:
        refuse(deepspeed_refusals(loaded, tree_of(found, tensor).world_size))
    notes = []
    if fewest is not None:
        notes.append(f"checked for {fewest} ranks, as this is no job; --ranks N checks for others")
    if tensor > 1:
        group = found.world_size // tensor
        notes.append(
            f"tensor parallelism: the plan is that of a data-parallel group, {group} of "
            f"{found.world_size} ranks"
        )
    return found, notes


def _largest(
    options: JobOptions, resolved: ResolvedConfig, found: Topology, loaded: Mapping[str, Any]
) -> list[str]:
    """How large a model fits a named plan, if the memory is known."""
    sized = scaled(USUAL[0], options.seq or SEQUENCE)
    request = request_of(options, found, sized, loaded)
    most = max_params(resolved, request)
    if most is None or request.limit is None:
        return []
    return [
        f"this plan trains models of up to {format_count(most)} parameters in "
        f"{format_bytes(request.limit)} of each "
        f"rank, of conventional shape, {sized.sequence} tokens a sequence, activations recomputed"
    ]


def _forecast(
    options: JobOptions,
    block: ZeroTopoConfig,
    found: Topology,
    loaded: Mapping[str, Any],
    translated: list[str],
) -> None:
    """What an automatic block would choose for models of usual sizes, as no model is named."""
    before_a_model(block, tree_of(found, tensor_of(options, loaded)))
    chosen = {
        params: rank_plans(
            block, request_of(options, found, scaled(params, options.seq or SEQUENCE), loaded)
        )
        for params in USUAL
        if found.memory_per_rank is not None
    }
    default = "" if block.scheme else ", the default here"
    fewer = "lossy" if block.lossy else "without more quantization than the block asks for"
    notes = [
        f"scheme {AUTO}{default}: as training starts, the plan is chosen that fits and is "
        f"predicted to be fastest, {fewer}; for your model: --params 13B, or --model NAME",
        setting(chosen[USUAL[0]].request)
        if chosen
        else f"the memory of a rank of {found.name} is not known here, so the plan is not known "
        "either; a job reads it from its devices; here give --machine, such as --machine dgx-h100",
    ]
    if options.as_json:
        rows = [
            {"params": params, "chosen": plan_json(ranking.timed[0], {}) if ranking.timed else None}
            for params, ranking in chosen.items()
        ]
        of = {
            "scheme": AUTO,
            "topology": found.to_json(),
            "forecasts": rows,
            "translated": translated,
            "notes": notes,
        }
        print_json(fill(Automatic, block, **of))
        return
    print(f"{render_tree(found)}\n")
    if chosen:
        show(_forecasts(chosen))
        print(f"{DEGREES}\n")
    _say((*translated, *notes))


def _forecasts(chosen: Mapping[int, Ranking]) -> Table:
    """Model by degrees, predicted step, memory, and how many times as fast ``"lossy": true`` would
    be.
    """
    title = "Chosen for models of these sizes, and the gain of a lossy one"
    table = figures_table(["parameters", "degrees", "step", "memory", "lossy"], title)
    for params, ranking in chosen.items():
        if not ranking.timed:
            table.add_row(
                format_count(params), "none fits", "-", "-", "fits" if ranking.lossier else "-"
            )
            continue
        best = ranking.best
        faster = ranking.faster
        gain = "-" if faster is None else f"{best.seconds / faster.seconds:.2f} x"
        cells = degrees(best.config), format_seconds(best.seconds), format_bytes(best.stored), gain
        table.add_row(format_count(params), *cells)
    return table


def _say(notes: tuple[str, ...]) -> None:
    print_notes(filter(None, (*notes, unasked())))
    print("ok, with a warning" if any(note.startswith("warning") for note in notes) else "ok")
