# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What ``check`` can say of a block beyond its degrees: the plan for a model, or for models of usual sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from zero_topo.cli.plan_options import ITEMSIZE, PlanOptions, found_model
from zero_topo.cli.plan_views import plan_json
from zero_topo.cli.tables import degrees
from zero_topo.config import ResolvedConfig, ZeroTopoConfig
from zero_topo.cost.footprint import InFlight
from zero_topo.cost.planner import Ranking, Request, max_params, rank_plans
from zero_topo.cost.step import Job
from zero_topo.cost.transformer import Transformer, scaled
from zero_topo.observe.console import figures_table
from zero_topo.topology import Topology
from zero_topo.units import format_bytes, format_count, format_seconds

USUAL = (10**9, 7 * 10**9, 70 * 10**9)
"""Parameters of the example models that are printed if the user names no model."""


def request_for(
    loaded: Mapping[str, Any], found: Topology, model: Transformer, overlap: float | None = None
) -> Request:
    """Machine, model and the job of a DeepSpeed config; what it leaves open, or to "auto", is one, in 16 bits."""
    micro, steps = (
        value if isinstance(value := loaded.get(key), int) else None
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    batch = loaded.get("train_batch_size")
    if steps is None and isinstance(batch, int):
        sharing = loaded.get("sequence_parallel_size")
        steps = batch * (sharing if isinstance(sharing, int) else 1) // ((micro or 1) * found.world_size)
    halves = [loaded.get(name) or {} for name in ("bf16", "fp16")]
    itemsize = ITEMSIZE if any(half.get("enabled") for half in halves) else 2 * ITEMSIZE
    job = Job(model, micro or 1, steps or 1, itemsize=itemsize, overlap=overlap)
    return Request(found, job, flight=InFlight.read(loaded))


def model_named(params: str | None, model: str | None) -> Transformer | None:
    """The model that the options name, if they do.

    Raises:
        ValueError: if it is not known.
    """
    return found_model(PlanOptions(params=params, model=model)) if params or model else None


def largest_note(resolved: ResolvedConfig, loaded: Mapping[str, Any]) -> list[str]:
    """The largest model that fits a named plan, if the memory is known."""
    request = request_for(loaded, resolved.topology, scaled(USUAL[0]))
    most = max_params(resolved, request)
    if most is None or request.limit is None:
        return []
    return [
        f"this plan trains models of up to {format_count(most)} parameters in {format_bytes(request.limit)} of each "
        f"rank, of conventional shape, {request.job.model.sequence} tokens a sequence, activations recomputed"
    ]


def forecasts(
    block: ZeroTopoConfig, found: Topology, loaded: Mapping[str, Any], overlap: float | None
) -> dict[int, Ranking]:
    """Return what an automatic block would choose for models of usual sizes; empty if the memory is not known."""
    if found.memory_per_rank is None:
        return {}
    return {params: rank_plans(block, request_for(loaded, found, scaled(params), overlap)) for params in USUAL}


def forecasts_json(chosen: Mapping[int, Ranking]) -> list[dict[str, Any]]:
    """Convert forecasts to JSON types."""
    return [
        {"params": params, "chosen": plan_json(ranking.timed[0]) if ranking.timed else None}
        for params, ranking in chosen.items()
    ]


def forecasts_table(chosen: Mapping[int, Ranking]) -> Table:
    """By model: degrees, predicted step, memory per rank, and the speed-up that ``"lossy": true`` would bring."""
    title = "Chosen for models of these sizes, and the gain of a lossy one"
    table = figures_table(["parameters", "degrees", "step", "held", "lossy"], title)
    for params, ranking in chosen.items():
        if not ranking.timed:
            table.add_row(format_count(params), "none fits", "-", "-", "fits" if ranking.lossier else "-")
            continue
        best, faster = ranking.best, ranking.faster
        gain = "-" if faster is None else f"{best.seconds / faster.seconds:.2f} x"
        step = format_seconds(best.seconds)
        table.add_row(format_count(params), degrees(best.candidate.config), step, format_bytes(best.held), gain)
    return table
