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

from zero_topo.cli.inputs import LIKE_PARAMS, naming, read_count, read_deepspeed_config, refuse
from zero_topo.cli.job import ITEMSIZE, JobOptions, machine_of, model_of, need_model, request_of
from zero_topo.cli.options import Force, taking
from zero_topo.cli.output import print_json, print_notes
from zero_topo.cli.tables import memory_table, places_table, show, volume_table
from zero_topo.config import (
    ZeroTopoConfig,
    deepspeed_hints,
    deepspeed_problems,
    resolve_config,
    stock_keys,
)
from zero_topo.config.parts import ROOT
from zero_topo.config.stock_keys import Translation, switched_on, translate
from zero_topo.cost.explain import planned, setting
from zero_topo.cost.planner import Price
from zero_topo.cost.volume import loco_bytes, stock_config
from zero_topo.doctor.refusals import deepspeed_refusals, unasked
from zero_topo.observe.documents import Document
from zero_topo.observe.files import check_files
from zero_topo.topology import Topology
from zero_topo.units import format_seconds

BEFORE = "before"
AFTER = "after"
EMPTY = "empty"
USUAL_PARAMS = "1B"


class ComparedCosts(Document):
    """Rows "before", "after" and "empty" -> costs."""

    topology: Topology
    params: int
    micro_batches: int
    memory: dict[str, dict[str, int]]
    sent_by_domain: dict[str, dict[str, int]]
    seconds: dict[str, float]


class Migrated(Document):
    """``migrate``."""

    config: dict[str, Any]
    translated: list[str]
    differences: list[str]
    costs: ComparedCosts | None


DOCUMENT = Migrated


@taking(JobOptions)
def migrate(
    options: JobOptions,
    ds_config: Annotated[
        str, typer.Argument(metavar="DS_CONFIG", help="DeepSpeed JSON with stage 3.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write the new config to.")
    ] = None,
    force: Force = False,
) -> None:
    """Replace the keys of ZeRO++, LoCo and MiCS by a zero_topo block. Shows what changes."""
    check_files([(output, "", None)], force)
    loaded = read_deepspeed_config(ds_config)
    active = switched_on(loaded)
    found = migrated(loaded)
    with naming(ds_config):
        refuse([*found.problems, *deepspeed_problems(found.config)])
        # A config to migrate may have no batch sizes yet
        refuse(deepspeed_refusals({**found.config, "train_batch_size": "auto"}, None))
        block = ZeroTopoConfig.parse(found.config[ROOT])
    prices = _prices(options, active, block, loaded)
    costs = _costs(prices, active) if prices else None
    if output is not None:
        output.write_text(json.dumps(found.config, indent=2) + "\n", encoding="utf-8")
    changes = [
        *differences(active, block),
        *deepspeed_hints(found.config),
        *filter(None, [unasked()]),
    ]
    if options.as_json:
        print_json(
            {
                "config": found.config,
                "translated": list(found.lines),
                "differences": changes,
                "costs": costs,
            }
        )
        return
    print_notes([*found.lines, *changes])
    print()
    if costs is None:
        print("- bytes and memory: give --machine frontier --nodes 48, or another machine\n")
    else:
        _show(prices, costs)
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
    size = block.quantize.block_size
    gradients = stock_keys.QUANTIZED_GRADIENTS in active
    weights = stock_keys.QUANTIZED_WEIGHTS in active
    if stock_keys.MICS in active:
        yield "MiCS: deepspeed.zero.Init takes the place of deepspeed.zero.MiCS_Init in your script"
        if stock_keys.MICS_HIERARCHICAL not in active:
            yield (
                "gathers over several nodes now go through the node, as "
                'mics_hierarchical_params_gather; "two_hop"'
            )
        return
    if weights or gradients:
        yield (
            f"values are nearer: {size} elements share a scale, in DeepSpeed thousands; INT8 "
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


def _prices(
    options: JobOptions,
    active: Mapping[str, Any],
    block: ZeroTopoConfig,
    ds_config: Mapping[str, Any],
) -> dict[str, Price]:
    """The plan before, after, and of the empty block; none where no machine is named."""
    counted = options.ranks is not None or options.nodes is not None
    if options.machine == "auto" and not counted:
        return {}
    found = machine_of(options)
    model = model_of(options) or need_model(replace(options, params=USUAL_PARAMS))
    request = request_of(options, found, model, ds_config)
    whole = options.model is None and not request.job.muon
    numels = (
        (read_count(options.params or USUAL_PARAMS, "--params", LIKE_PARAMS),) if whole else None
    )
    request = replace(
        request, job=replace(request.job, itemsize=ITEMSIZE), states_only=True, numels=numels
    )
    stock = replace(
        request, job=replace(request.job, stock=stock_keys.MICS_HIERARCHICAL not in active)
    )
    plans = {AFTER: resolve_config(block, found)}
    with suppress(ValueError):  # nothing fits
        plans[EMPTY] = planned(ZeroTopoConfig.parse({}), replace(request, states_only=False))
    prices = {BEFORE: stock.price(stock_config(active, found))}
    return prices | {row: request.price(plan) for row, plan in plans.items()}


def _costs(prices: Mapping[str, Price], active: Mapping[str, Any]) -> dict[str, Any]:
    """The costs in JSON types; LoCo keeps residuals before."""
    memory = {row: price.memory for row, price in prices.items()}
    after = prices[AFTER]
    if loco := loco_bytes(active, after.request.work, after.config.topology):
        memory[BEFORE] = memory[BEFORE] | {"residual": loco}
    return {
        "topology": after.config.topology.to_json(),
        "params": sum(after.request.work.numels),
        "micro_batches": after.request.job.micro_batches,
        "memory": memory,
        "sent_by_domain": {row: price.sent_by_domain for row, price in prices.items()},
        "seconds": {row: price.seconds for row, price in prices.items()},
    }


def _show(prices: Mapping[str, Price], costs: Mapping[str, Any]) -> None:
    found = prices[AFTER].config.topology
    request = prices[AFTER].request
    configs = {row: price.config for row, price in prices.items()}
    show(
        places_table(
            configs, f"{costs['params']:,} parameters on {found.world_size:,} ranks of {found.name}"
        )
    )
    show(memory_table(costs["memory"], found.memory_per_rank))
    show(volume_table(costs["sent_by_domain"], request.job.micro_batches))
    steps = (f"{row} {format_seconds(seconds)}" for row, seconds in costs["seconds"].items())
    print(f"- a step takes by prediction: {', '.join(steps)}")
    print(f"- {setting(request)}")
    print(f'- {EMPTY}: what "{ROOT}": {{}} would do here; see zero-topo plan --recommend\n')
