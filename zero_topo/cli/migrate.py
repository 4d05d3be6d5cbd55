# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo migrate``: a DeepSpeed config with ZeRO-3, ZeRO++, LoCo or MiCS as one with a ``zero_topo`` block."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from zero_topo.cli.inputs import LIKE_PARAMS, read_count
from zero_topo.cli.job import ITEMSIZE, JobOptions, machine_of, model_of, need_model, request_of
from zero_topo.cli.options import Force, taking
from zero_topo.cli.output import print_json
from zero_topo.cli.tables import memory_table, places_table, show, volume_table
from zero_topo.config import (
    ZeroTopoConfig,
    deepspeed_hints,
    deepspeed_problems,
    load_deepspeed_config,
    resolve_config,
)
from zero_topo.config.errors import ROOT
from zero_topo.config.stock_keys import (
    HPZ,
    LOCO,
    MICS,
    MICS_HOPS,
    QUANTIZED_GRADIENTS,
    QUANTIZED_WEIGHTS,
    Translation,
    base_block,
    switched_on,
    translate,
)
from zero_topo.cost import by_domain
from zero_topo.cost.explain import setting
from zero_topo.cost.fit import planned
from zero_topo.cost.planner import Price
from zero_topo.cost.volume import loco_bytes, stock_config
from zero_topo.doctor.refusals import setting_refusals, unasked
from zero_topo.observe.documents import Document
from zero_topo.observe.files import check_files
from zero_topo.topology import Topology
from zero_topo.topology.launchers import launcher_view
from zero_topo.units import format_seconds

BEFORE, AFTER, EMPTY = "before", "after", "empty"
USUAL_PARAMS = "1B"


@dataclass(frozen=True)
class MigrateOptions(JobOptions):
    """Of ``migrate``."""

    ds_config: Annotated[str, typer.Argument(metavar="DS_CONFIG", help="DeepSpeed JSON with stage 3.")] = ""
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write the new config to.")] = None
    force: Force = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")] = False


class CostsBeside(Document):
    """Rows "before", "after" and "empty" -> costs."""

    topology: Topology
    params: int
    micro_batches: int
    memory: dict[str, dict[str, int]]
    sent_by_domain: dict[str, dict[str, int]]
    step_s: dict[str, float]


class Migrated(Document):
    """``migrate``."""

    config: dict[str, Any]
    translated: list[str]
    differences: list[str]
    costs: CostsBeside | None


DOCUMENT = Migrated


@taking(MigrateOptions)
def migrate(options: MigrateOptions) -> None:
    """Replace the keys of ZeRO++, LoCo and MiCS by a zero_topo block. Shows what changes."""
    if not options.ds_config:
        raise ValueError("which config? give the DeepSpeed JSON that you train with now")
    check_files([(options.output, "", None)], options.force)
    loaded = load_deepspeed_config(options.ds_config)
    active, found = switched_on(loaded), migrated(loaded)
    if problems := [*found.problems, *deepspeed_problems(found.config), *setting_refusals(found.config)]:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    block = ZeroTopoConfig.parse(found.config[ROOT])
    costs = _costs(options, active, block, loaded)
    if options.output is not None:
        options.output.write_text(json.dumps(found.config, indent=2) + "\n", encoding="utf-8")
    told = [*differences(active, block), *deepspeed_hints(found.config), *filter(None, [unasked()])]
    if options.as_json:
        print_json(
            {
                "config": found.config,
                "translated": list(found.lines),
                "differences": told,
                "costs": None if costs is None else costs.to_json(),
            }
        )
        return
    for line in (*found.lines, *told):
        print(f"- {line}")
    print()
    if costs is None:
        print("- bytes and memory: give --machine frontier --nodes 48, or another machine\n")
    else:
        costs.show()
    print(json.dumps(found.config, indent=2) if options.output is None else f"wrote {options.output}")


def migrated(ds_config: Mapping[str, Any]) -> Translation:
    """The config with a block: its own completed, or a new one that does what the stock keys do, or plain ZeRO-3."""
    if ROOT in ds_config:
        return translate(ds_config, optimizer=True)
    found = translate({**ds_config, ROOT: base_block(switched_on(ds_config))}, optimizer=True)
    lines = found.lines or ("no key of ZeRO++, LoCo or MiCS is set: this is plain ZeRO-3",)
    return Translation(found.config, lines, found.problems)


def differences(active: Mapping[str, Any], block: ZeroTopoConfig) -> Iterator[str]:
    """Return what differs from DeepSpeed, one sentence each."""
    size = block.quantize.block_size
    if MICS in active:
        yield "MiCS: deepspeed.zero.Init takes the place of deepspeed.zero.MiCS_Init in your script"
        if MICS_HOPS not in active:
            yield 'gathers over several nodes now go through the node, as mics_hierarchical_params_gather; "two_hop"'
        return
    if QUANTIZED_WEIGHTS in active or QUANTIZED_GRADIENTS in active:
        yield f"values are nearer: {size} elements share a scale, in DeepSpeed thousands; INT8 messages grow by 1.6%"
    if HPZ in active and QUANTIZED_WEIGHTS in active:
        yield 'the secondary copy is stored in INT8 too, half of hpZ\'s; "quantize": {"secondary": null} keeps 16 bits'
    if LOCO in active and QUANTIZED_GRADIENTS in active:
        yield (
            "LoCo: weights and gradients are sharded over the node, and gradients leave it once per step, in INT4 with "
            "all of the error fed back (err_beta and reset_T have no counterpart); inside it they are not quantized"
        )
    elif QUANTIZED_GRADIENTS in active:
        yield "gradients are quantized on one node too, and whatever their size; DeepSpeed falls back to 16 bits there"


@dataclass(frozen=True)
class Costs:
    """Bytes of a rank before and after, and of the empty block.

    Attributes:
        prices: row -> what the plan costs.
        loco: bytes that LoCo keeps before.
    """

    prices: Mapping[str, Price]
    loco: int

    @property
    def memory(self) -> dict[str, dict[str, int]]:
        """Memory per rank by plan ("before", "after" and others) and role, in bytes."""
        held = {row: dict(price.memory) for row, price in self.prices.items()}
        return held | {BEFORE: held[BEFORE] | ({"residual": self.loco} if self.loco else {})}

    @property
    def sent(self) -> dict[str, dict[str, int]]:
        """Bytes that a rank sends per optimizer step, by plan and domain."""
        return {row: by_domain(price.sent) for row, price in self.prices.items()}

    def to_json(self) -> dict[str, Any]:
        """Convert the comparison to JSON types."""
        return {
            "topology": self.prices[AFTER].config.topology.to_json(),
            "params": sum(self.prices[AFTER].request.work.numels),
            "micro_batches": self.prices[AFTER].request.job.micro_batches,
            "memory": self.memory,
            "sent_by_domain": self.sent,
            "step_s": {row: price.step.seconds for row, price in self.prices.items()},
        }

    def show(self) -> None:
        """As tables."""
        after = self.prices[AFTER]
        found, job = after.config.topology, after.request.job
        configs = {row: price.config for row, price in self.prices.items()}
        show(
            places_table(
                configs, f"{sum(after.request.work.numels):,} parameters on {found.world_size:,} ranks of {found.name}"
            )
        )
        show(memory_table(self.memory, found.memory_per_rank))
        show(volume_table(self.sent, job.micro_batches))
        steps = (f"{row} {format_seconds(price.step.seconds)}" for row, price in self.prices.items())
        print(f"- a step takes by prediction: {', '.join(steps)}")
        print(f"- {setting(job)}")
        print(f'- {EMPTY}: what "{ROOT}": {{}} would do here; see zero-topo plan --recommend\n')


def _costs(
    options: MigrateOptions, active: Mapping[str, Any], block: ZeroTopoConfig, ds_config: Mapping[str, Any]
) -> Costs | None:
    """Bytes before and after; None where no machine is named and this is no job."""
    counted = options.ranks is not None or options.nodes is not None
    if options.machine == "auto" and launcher_view(os.environ) is None and not counted:
        return None
    found, model = machine_of(options), model_of(options) or need_model(replace(options, params=USUAL_PARAMS))
    request = request_of(options, found, model, ds_config)
    whole = options.model is None and not request.job.muon
    numels = (read_count(options.params or USUAL_PARAMS, "--params", LIKE_PARAMS),) if whole else None
    request = replace(request, job=replace(request.job, itemsize=ITEMSIZE), states_only=True, numels=numels)
    stock = replace(request, job=replace(request.job, stock=MICS_HOPS not in active))
    plans = {AFTER: resolve_config(block, found)}
    with suppress(ValueError):  # nothing fits
        plans[EMPTY] = planned(ZeroTopoConfig.parse({}), replace(request, states_only=False))
    prices = {BEFORE: stock.price(stock_config(active, found))}
    prices |= {row: request.price(plan) for row, plan in plans.items()}
    return Costs(prices, loco_bytes(active, request.work, found))
