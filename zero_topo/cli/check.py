# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo check``: would this DeepSpeed config start, and with which plan?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from zero_topo.cli.forecast import (
    forecasts,
    forecasts_json,
    forecasts_table,
    largest_note,
    model_named,
    request_for,
)
from zero_topo.cli.inputs import machine
from zero_topo.cli.options import MACHINES, MODEL_NAMES, Overlap
from zero_topo.cli.output import print_json
from zero_topo.cli.tables import DEGREES, places_table, show
from zero_topo.config import (
    AUTO,
    ZeroTopoConfig,
    deepspeed_problems,
    is_automatic,
    load_deepspeed_config,
    resolve_config,
)
from zero_topo.config.deepspeed_json import with_environment_block
from zero_topo.config.stock_keys import translate
from zero_topo.cost.candidates import before_a_model
from zero_topo.cost.explain import assumed_lines, price_sentence, setting
from zero_topo.cost.fit import planned
from zero_topo.cost.volume import by_domain
from zero_topo.doctor.refusals import deepspeed_refusals, unasked
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.discover import MEASURED
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.render import render_tree
from zero_topo.versions import installed_refusals

FOUND = (AUTO, MEASURED)
"""Topologies that are found where the job runs."""


def check(
    ds_config: Annotated[str, typer.Argument(metavar="DS_CONFIG", help='DeepSpeed JSON with a "zero_topo" block.')],
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; default: the launcher's number.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--machine",
            autocompletion=MACHINES,
            metavar="FILE|PRESET",
            help="Machine of the job, if the block does not name one.",
        ),
    ] = None,
    params: Annotated[str | None, typer.Option(help="Parameters of the model, such as 20B: checks memory.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            autocompletion=MODEL_NAMES,
            metavar="NAME|FILE",
            help="Model name, Hugging Face config.json or GPT-NeoX YAML, instead of --params.",
        ),
    ] = None,
    overlap: Overlap = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the resolved plan as JSON.")] = False,
) -> None:
    """Validate a DeepSpeed config and show its plan. Starts nothing and needs no GPU."""
    loaded = with_environment_block(load_deepspeed_config(ds_config))
    _refuse([*installed_refusals(), *deepspeed_problems(loaded), *deepspeed_refusals(loaded, world_size)])
    block = ZeroTopoConfig.from_ds_config(loaded)
    if block is None:
        raise ValueError(f'{ds_config}: has no "zero_topo" block; add one, such as "zero_topo": {{}}')
    found = _machine(block, loaded, where, world_size)
    shape = model_named(params, model)
    translated = translate(loaded, optimizer=True).lines
    if is_automatic(block, found) and shape is None:
        _forecast(block, found, loaded, overlap, as_json)
        return
    cost: dict[str, Any] = {}
    if shape is None:
        resolved = resolve_config(block, found)
        resolved = replace(resolved, notes=(*resolved.notes, *largest_note(resolved, loaded)))
    else:
        request = request_for(loaded, found, shape, overlap)
        price = request.price(planned(block, request))
        notes = [*price.config.notes, price_sentence(price), setting(request.job), *assumed_lines(request)]
        resolved = replace(price.config, notes=tuple(dict.fromkeys(notes)))
        cost = {"step_s": price.step.seconds, "sent_by_domain": by_domain(price.sent), "held": price.held}
    if as_json:
        print_json({"topology": found.to_json(), **resolved.to_json(), "cost": cost, "translated": list(translated)})
        return
    print(render_tree(found))
    print()
    show(places_table({resolved.scheme or "free form": resolved}, "Shards: domain, ranks, format"))
    _say((*translated, *resolved.notes))


def _machine(block: ZeroTopoConfig, loaded: Mapping[str, Any], where: str | None, world_size: int | None) -> Topology:
    """Return the machine on which the config will run, after a check that DeepSpeed's batch sizes fit its ranks."""
    setting = block.topology
    if where is not None and setting not in FOUND:
        raise ValueError(f"--machine {where}: the block already names its machine, {setting!r}; leave --machine out")
    setting = where or setting
    found = machine(setting, world_size)
    anywhere = isinstance(setting, str) and setting in (AUTO, *preset_names())
    if not anywhere or launcher_view(os.environ) is not None:
        _refuse(deepspeed_refusals(loaded, found.world_size))
    return found


def _forecast(
    block: ZeroTopoConfig, found: Topology, loaded: Mapping[str, Any], overlap: float | None, as_json: bool
) -> None:
    """Return what an automatic block would choose if the command names no model."""
    before_a_model(block, found)
    chosen = forecasts(block, found, loaded, overlap)
    default = "" if block.scheme else ", the default here"
    fewer = "lossy" if block.lossy else "without more quantization than the block asks for"
    notes = [
        f"scheme {AUTO}{default}: as training starts, the plan is chosen that fits and is predicted to be fastest, "
        f"{fewer}; for your model: --params 13B, or --model NAME"
    ]
    notes += [setting(ranking.request.job) for ranking in list(chosen.values())[:1]]
    if not chosen:
        notes.append(
            f"the memory of a rank of {found.name} is not known here, so the plan is not known either; a job reads it "
            "from its devices; here give --machine, such as --machine dgx-h100"
        )
    translated = translate(loaded, optimizer=True).lines
    if as_json:
        told = {"scheme": AUTO, "lossy": block.lossy, "topology": found.to_json()}
        told |= {"forecasts": forecasts_json(chosen), "translated": list(translated), "notes": notes}
        print_json(told)
        return
    print(render_tree(found))
    print()
    if chosen:
        show(forecasts_table(chosen))
        print(f"{DEGREES}\n")
    _say((*translated, *notes))


def _say(notes: tuple[str, ...]) -> None:
    for note in filter(None, (*notes, unasked())):
        print(f"- {note}")
    print("ok")


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(problems))
