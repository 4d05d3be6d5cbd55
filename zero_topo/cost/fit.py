# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Finds the plan of a block for a model: chooses an automatic one, else checks that it fits into memory."""

from __future__ import annotations

from dataclasses import replace

from zero_topo.config import AUTO, ResolvedConfig, ZeroTopoConfig, is_automatic, resolve_config
from zero_topo.config.parts import ROOT
from zero_topo.cost.explain import recommend
from zero_topo.cost.planner import Request
from zero_topo.units import format_bytes

SURE = ("weights", "frozen", "secondary", "gradients", "residual")
"""Roles whose bytes follow from the plan alone; an optimizer may store less than Adam."""


def planned(block: ZeroTopoConfig, request: Request) -> ResolvedConfig:
    """Resolve the block for a model; the notes say why a plan was chosen, or that it is not likely to fit.

    Raises:
        ValueError: raised by :func:`recommend`, ``resolve_config`` and :func:`fit_notes`.
    """
    if is_automatic(block, request.topology):
        chosen, why = recommend(block, request)
        resolved = resolve_config(chosen, request.topology)
        return replace(resolved, notes=(why, *resolved.notes))
    resolved = resolve_config(block, request.topology)
    return replace(resolved, notes=(*resolved.notes, *fit_notes(block, resolved, request)))


def fit_notes(block: ZeroTopoConfig, resolved: ResolvedConfig, request: Request) -> list[str]:
    """Return a warning if a plan is predicted not to fit; nothing if it fits, or the memory is not known.

    Args:
        block: the user's block.
        resolved: the block resolved on the request's machine.
        request: machine and job.

    Raises:
        ValueError: if its shards of weights and gradients alone are more than a rank's memory.
    """
    memory, limit = request.topology.memory_per_rank, request.limit
    price = request.price(resolved)
    if memory is None or limit is None or price.fits:
        return []
    name = "the plan" if resolved.scheme is None else f"scheme {resolved.scheme}"
    sure = sum(price.memory.get(role, 0) for role in SURE)
    way_out = _way_out(block, resolved, request)
    if sure > memory:
        raise ValueError(
            f"{ROOT}: {name} leaves {format_bytes(sure)} of weights and gradients on each rank of "
            f"{request.topology.name}, which has {format_bytes(memory)}; {way_out}"
        )
    return [
        f"warning: {name} needs {format_bytes(price.held)} on each rank by prediction, {price.most}, of "
        f"{format_bytes(limit)} ({request.reserve:.0%} of the memory is kept in reserve); {way_out}"
    ]


def _way_out(block: ZeroTopoConfig, resolved: ResolvedConfig, request: Request) -> str:
    """Return what to set instead: weights sharded over a larger domain if that fits, else the scheme "auto"."""
    for domain in ("gpu", "node"):
        degree = resolved.topology.degree(domain)
        if degree <= resolved.plan.weights or resolved.plan.gradients % degree:
            continue
        keys = {"weights": domain} if resolved.scheme is None else {"scheme": resolved.scheme, "weights": domain}
        wider = request.price(resolve_config(block.model_copy(update=keys), resolved.topology))
        if wider.fits:
            words = ", ".join(f'"{key}": "{value}"' for key, value in keys.items() if value != block.scheme)
            return f"set {words}, which needs {format_bytes(wider.held)}"
    return f'set "scheme": "{AUTO}", which takes the fastest plan that fits; if none fits, it reports why'
