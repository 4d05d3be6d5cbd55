# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The other views of ``zero-topo plan``: the best plan and the largest models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from zero_topo.cli.output import print_json
from zero_topo.cli.plan_options import PlanOptions, found_request, found_schemes
from zero_topo.cli.tables import DEGREES, largest_table, ranking_table, show
from zero_topo.config import ZeroTopoConfig
from zero_topo.config.errors import ROOT
from zero_topo.cost.explain import explain, setting
from zero_topo.cost.planner import Priced, Ranking, max_params, rank_plans
from zero_topo.cost.volume import by_domain
from zero_topo.strict import to_json
from zero_topo.topology.presets import assumptions
from zero_topo.units import format_bytes, format_count

SHOWN_PLANS = 8


def recommendation(options: PlanOptions) -> None:
    """All plans ranked, the best explained, and the block to paste."""
    lossy = options.lossy or bool(options.sparse)
    ranking = rank_plans(ZeroTopoConfig.parse({"lossy": lossy}), found_request(options))
    reasons = explain(ranking)
    if options.as_json:
        print_json(_ranking_json(ranking, reasons, options))
        return
    model, found = ranking.request.job.model, ranking.request.topology
    shape = f"{format_count(model.params)} parameters ({model.layers} layers of width {model.hidden})"
    show(ranking_table(ranking.timed[:SHOWN_PLANS], f"{shape} on {found.world_size} ranks of {found.name}"))
    print(f"{DEGREES}\n")
    for line in (setting(ranking.request.job), *reasons):
        print(f"- {line}")
    print(f"\n{json.dumps({ROOT: {**_machine(options), **ranking.best.candidate.settings}}, indent=2)}")


def _ranking_json(ranking: Ranking, reasons: list[str], options: PlanOptions) -> dict[str, Any]:
    request = ranking.request
    return {
        "topology": request.topology.to_json(),
        "model": asdict(request.job.model),
        "params": request.job.model.params,
        "micro_batch": request.job.micro_batch,
        "micro_batches": request.job.micro_batches,
        "setting": setting(request.job),
        "overlap": request.job.hidden,
        "memory_limit": request.limit,
        "reserve": request.reserve,
        "recommended": {**plan_json(ranking.best, _machine(options)), "range": to_json(ranking.best.price.range)},
        "why": reasons,
        "assumed": assumptions(request.topology.name),
        "plans": [plan_json(plan, _machine(options)) for plan in ranking.timed],
        "lossier": [plan_json(plan, _machine(options)) for plan in ranking.lossier],
        "fitting": ranking.fitting,
        "refused": [
            {"name": plan.candidate.name, "memory": dict(plan.memory), "needs": plan.held} for plan in ranking.refused
        ],
    }


def plan_json(plan: Priced, machine: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """A plan in JSON types, with the keys of the machine's in its block; bytes and seconds."""
    return {
        "name": plan.candidate.name,
        "degrees": plan.candidate.config.plan.degrees(),
        "quantize": plan.candidate.config.to_json()["quantize"],
        "seconds": plan.seconds,
        "losses": [word for part in plan.candidate.losses for word in part],
        "wire_seconds": plan.wire,
        "sent_by_domain": by_domain(plan.price.sent),
        "memory": dict(plan.memory),
        "block": {**machine, **plan.candidate.settings},
    }


def _machine(options: PlanOptions) -> dict[str, Any]:
    """The key of a block that names the machine."""
    setting = options.topology
    return {} if setting == "auto" else {"topology": json.loads(setting) if setting.startswith("{") else setting}


def largest_models(options: PlanOptions) -> None:
    """The largest model that each scheme trains on the machine."""
    named = options.params or options.model or options.layers or options.hidden
    request = found_request(options if named else replace(options, params="1B"))
    machine, job = request.topology, request.job
    if request.limit is None:
        raise ValueError(
            f'--max-params: the memory of a rank of {machine.name} is not known; give "memory_per_rank" (bytes) '
            "in a .json file of the machine, or take a preset"
        )
    configs = found_schemes(options, request.machine)
    found = {name: max_params(config, request) for name, config in configs.items()}
    if options.as_json:
        head = {
            "topology": machine.to_json(),
            "memory_limit": request.limit,
            "reserve": request.reserve,
            "sequence": job.model.sequence,
            "micro_batch": job.micro_batch,
            "checkpointing": job.checkpointing,
        }
        print_json({**head, "schemes": {name: {"max_params": n} for name, n in found.items()}})
        return
    show(largest_table(found, f"Largest model on {machine.world_size} ranks of {machine.name}"))
    beside = "weights, gradients and optimizer alone" if request.states_only else f"{job.attention} attention"
    print(
        f"- in {format_bytes(request.limit)} of each rank ({request.reserve:.0%} of the memory is kept in reserve), "
        f"{job.micro_batch} x {job.model.sequence} tokens a micro-batch, activations "
        f"{'recomputed' if job.checkpointing else 'kept'}, {beside}"
    )
