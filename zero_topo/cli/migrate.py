# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo migrate``: a DeepSpeed config with ZeRO-3, ZeRO++, LoCo or MiCS as one with a
``zero_topo`` block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from zero_topo.cli.inputs import naming, refuse
from zero_topo.cli.job import job_of_config, machine_of, model_of
from zero_topo.cli.options import AsJson, Force, Machine, ModelName, Nodes, Params, Ranks
from zero_topo.cli.output import print_json, print_notes
from zero_topo.cli.tables import LEGEND, costs_json, plans_table, show
from zero_topo.config import (
    AUTO,
    ZeroTopoConfig,
    deepspeed_hints,
    deepspeed_problems,
    load_deepspeed_config,
    resolve_config,
    stock_keys,
)
from zero_topo.config.deepspeed_parts import misread
from zero_topo.config.parts import ROOT
from zero_topo.config.stock_keys import Translation, switched_on, translate
from zero_topo.cost.bounds import Cost, cost_of
from zero_topo.cost.memory import predict_memory
from zero_topo.cost.rule import plan_for
from zero_topo.cost.transformer import Model, scaled
from zero_topo.cost.volume import by_domain, loco_bytes, step_bytes, stock_config
from zero_topo.doctor.refusals import deepspeed_refusals, unasked
from zero_topo.observe.files import check_file
from zero_topo.quant.spec import BLOCK
from zero_topo.topology import Topology

BEFORE = "before"
AFTER = "after"
EMPTY = "empty"
USUAL_PARAMS = 10**9


def migrate(
    ds_config: Annotated[
        str, typer.Argument(metavar="DS_CONFIG", help="DeepSpeed JSON with stage 3.")
    ],
    model: ModelName = None,
    params: Params = None,
    machine: Machine = AUTO,
    nodes: Nodes = None,
    ranks: Ranks = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write the new config to.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Replace the keys of ZeRO++, LoCo and MiCS by a zero_topo block. Shows what changes."""
    check_file(output, "", None, force)
    loaded = load_deepspeed_config(ds_config)
    with naming(ds_config):
        refuse(misread(loaded))
    active = switched_on(loaded)
    found = migrated(loaded)
    with naming(ds_config):
        refuse([*found.problems, *deepspeed_problems(found.config)])
        # A config to migrate may have no batch sizes yet
        refuse(deepspeed_refusals({**found.config, "train_batch_size": "auto"}, None))
        block = ZeroTopoConfig.parse(found.config[ROOT])
    compared = None
    if machine != AUTO or nodes is not None or ranks is not None:
        place = machine_of(machine, nodes, ranks)
        shape = model_of(model, params) or scaled(USUAL_PARAMS)
        compared = _costs(place, shape, active, block, loaded)
    if output is not None:
        output.write_text(json.dumps(found.config, indent=2) + "\n", encoding="utf-8")
    changes = [
        *differences(active, block),
        *deepspeed_hints(found.config),
        *filter(None, [unasked()]),
    ]
    if as_json:
        print_json(
            {
                "config": found.config,
                "translated": list(found.lines),
                "differences": changes,
                "costs": compared and {row: costs_json(cost) for row, cost in compared.items()},
            }
        )
        return
    print_notes([*found.lines, *changes])
    print()
    if compared is None:
        print("- bytes and memory: give --machine frontier --nodes 48, or another machine\n")
    else:
        _show(compared)
    print(json.dumps(found.config, indent=2) if output is None else f"wrote {output}")


def migrated(ds_config: Mapping[str, Any]) -> Translation:
    """The config with a block: its own completed, or a new one that does what the stock keys do, or
    plain ZeRO-3.
    """
    if ROOT in ds_config:
        return translate(ds_config, optimizer=True)
    found = translate(
        {**ds_config, ROOT: stock_keys.base_block(switched_on(ds_config))}, optimizer=True
    )
    lines = found.lines or ("no key of ZeRO++, LoCo or MiCS is set: this is plain ZeRO-3",)
    return Translation(found.config, lines, found.problems)


def differences(active: Mapping[str, Any], block: ZeroTopoConfig) -> Iterator[str]:
    """Return what differs from DeepSpeed, one sentence each."""
    gradients = stock_keys.QUANTIZED_GRADIENTS in active
    weights = stock_keys.QUANTIZED_WEIGHTS in active
    if stock_keys.MICS in active:
        yield "MiCS: deepspeed.zero.Init takes the place of deepspeed.zero.MiCS_Init in your script"
        if stock_keys.MICS_HIERARCHICAL not in active:
            yield (
                "gathers over several nodes now go through the node, as with "
                "mics_hierarchical_params_gather"
            )
        return
    if weights or gradients:
        yield (
            f"values are nearer: {BLOCK} elements share a scale, in DeepSpeed thousands; INT8 "
            "messages grow by 1.6%"
        )
    if weights and stock_keys.HPZ in active:
        yield (
            'the secondary copy is stored in INT8 too, half of hpZ\'s; "quantize": {"secondary": '
            "null} keeps 16 bits"
        )
    if gradients and stock_keys.LOCO in active:
        yield (
            "LoCo: weights and gradients are sharded over the node, and gradients leave it once "
            "per step, in INT4 with all of the error fed back (err_beta and reset_T have no "
            "counterpart); inside it they are not quantized"
        )
    elif gradients:
        yield (
            "gradients are quantized on one node too, and whatever their size; DeepSpeed falls "
            "back to 16 bits there"
        )


def _costs(
    machine: Topology,
    model: Model,
    active: Mapping[str, Any],
    block: ZeroTopoConfig,
    loaded: Mapping[str, Any],
) -> dict[str, Cost]:
    """The costs before, after, and of the empty block."""
    job = job_of_config(loaded, model, machine.world_size)
    work = job.work
    stock = stock_config(active, machine)
    # hpZ of DeepSpeed stores its copy in 16 bits
    memory = predict_memory(replace(stock, secondary_spec=None), work, job)
    if loco := loco_bytes(active, work, machine):
        memory["residual"] = loco
    sent = step_bytes(stock, work, stock=stock_keys.MICS_HIERARCHICAL not in active)
    costs = {
        BEFORE: Cost(stock, memory, by_domain(sent), None),
        AFTER: cost_of(resolve_config(block, machine), job, machine),
    }
    with suppress(ValueError):  # nothing fits
        costs[EMPTY] = cost_of(plan_for(ZeroTopoConfig(), machine, job), job, machine)
    return costs


def _show(costs: Mapping[str, Cost]) -> None:
    machine = costs[AFTER].config.topology
    show(plans_table(costs, f"On {machine.world_size:,} ranks of {machine.name}"))
    print_notes(LEGEND)
    print(f'- {EMPTY}: what "{ROOT}": {{}} would do here; see zero-topo plan\n')
