# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo check``: would this DeepSpeed config start, with which plan, and at what cost?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from zero_topo.cli.inputs import naming, refuse
from zero_topo.cli.job import job_of_config, machine_of, model_of, tensor_of
from zero_topo.cli.options import AsJson, Machine, ModelName, Nodes, Params, Ranks
from zero_topo.cli.output import print_json, print_notes
from zero_topo.cli.plan import machine_notes
from zero_topo.cli.tables import LEGEND, costs_json, plans_table
from zero_topo.config import (
    AUTO,
    ZeroTopoConfig,
    deepspeed_hints,
    deepspeed_problems,
    is_automatic,
    load_deepspeed_config,
    resolve_config,
)
from zero_topo.config.deepspeed_json import with_environment_block
from zero_topo.config.deepspeed_parts import lookup
from zero_topo.config.stock_keys import translate
from zero_topo.cost.bounds import Cost, cost_of
from zero_topo.cost.rule import before_a_model, fewest_ranks, plan_for
from zero_topo.cost.tensor import tree_of
from zero_topo.doctor.refusals import deepspeed_refusals, unasked
from zero_topo.observe.tables import table_text
from zero_topo.topology import Topology, preset_names
from zero_topo.topology.render import render_tree
from zero_topo.versions import installed_refusals


def check(
    ds_config: Annotated[
        str, typer.Argument(metavar="DS_CONFIG", help='DeepSpeed JSON with a "zero_topo" block.')
    ],
    model: ModelName = None,
    params: Params = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's, or 2048.")
    ] = None,
    machine: Machine = AUTO,
    nodes: Nodes = None,
    ranks: Ranks = None,
    as_json: AsJson = False,
) -> None:
    """Validate a DeepSpeed config and show its plan. Starts nothing and needs no GPU."""
    refuse(installed_refusals())
    with naming(ds_config):
        loaded = with_environment_block(load_deepspeed_config(ds_config))
        refuse(deepspeed_problems(loaded) or deepspeed_refusals(loaded, None))
        block = ZeroTopoConfig.from_ds_config(loaded)
        if block is None:
            raise ValueError('has no "zero_topo" block; add one, such as "zero_topo": {}')
        found, notes = _machine(block, loaded, machine, nodes, ranks)
    translated = translate(loaded, optimizer=True)
    notes += [*translated.lines]
    notes += deepspeed_hints(loaded)
    tree = tree_of(found, tensor_of(loaded))
    resolved = None
    cost: Cost | None = None
    if (shape := model_of(model, params, seq)) is not None:
        job = job_of_config(loaded, shape, tree.world_size)
        resolved = plan_for(block, tree, job)
        cost = cost_of(resolved, job, found)
        notes += [*resolved.notes, job.describe(), *shape.notes, *machine_notes(found)]
    elif is_automatic(block, tree):
        before_a_model(block, tree)
        notes.append(
            f"scheme {AUTO}: weights go over as few ranks as fits in memory, then gradients, as "
            "training starts; for your model: --params 13B, or --model NAME"
        )
    else:
        resolved = resolve_config(block, tree)
        notes += [*resolved.notes, "memory, bytes and seconds: --params 13B, or --model NAME"]
    if lookup(loaded, "expert_parallel.enabled") is True:
        notes.append("expert parallelism is not counted: plan and costs are those without it")
    notes = list(dict.fromkeys(filter(None, [*notes, unasked()])))
    if as_json:
        print_json(
            {
                "config": translated.config,
                "topology": found.to_json(),
                "plan": None if resolved is None else replace(resolved, notes=()).to_json(),
                "cost": None if cost is None else costs_json(cost),
                "notes": notes,
            }
        )
        return
    print(f"{render_tree(found)}\n")
    if cost is not None:
        name = cost.config.scheme or (AUTO if is_automatic(block, tree) else "degrees")
        table = plans_table({name: cost}, f"A step of {job.micro_batches} micro-batches")
        print(table_text(table))
        notes += LEGEND
    print_notes(notes)
    print("ok, with a warning" if any(note.startswith("warning") for note in notes) else "ok")


def _machine(
    block: ZeroTopoConfig,
    loaded: Mapping[str, Any],
    machine: str,
    nodes: int | None,
    ranks: str | None,
) -> tuple[Topology, list[str]]:
    """Where the config will run, once DeepSpeed's batch sizes fit its ranks; and what was assumed
    for that.
    """
    if machine != AUTO and block.topology != AUTO:
        raise ValueError(
            f"--machine {machine}: the block already names its machine, "
            f"{block.topology!r}; leave --machine out"
        )
    where = block.topology if machine == AUTO else machine
    counted = nodes is not None or ranks is not None
    fewest = None if counted else fewest_ranks(block, where)
    found = machine_of(where, nodes, ranks if fewest is None else str(fewest))
    tensor = tensor_of(loaded)
    anywhere = isinstance(where, str) and where in (AUTO, *preset_names())
    if counted or not anywhere:
        refuse(deepspeed_refusals(loaded, tree_of(found, tensor).world_size))
    notes = []
    if fewest is not None:
        notes.append(f"checked for {fewest} ranks; --ranks N checks for others")
    if tensor > 1:
        group = found.world_size // tensor
        notes.append(
            f"tensor parallelism: the plan is that of a data-parallel group, {group} of "
            f"{found.world_size} ranks"
        )
    return found, notes
