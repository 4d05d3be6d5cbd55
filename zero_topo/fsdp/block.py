# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Resolves the block for FSDP2, which has one degree for weights and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.config.parts import ROOT
from zero_topo.config.resolve import is_automatic
from zero_topo.config.schemes import DEFAULT_SCHEME, SAME, SCHEMES
from zero_topo.plan import Plan
from zero_topo.strict import as_json
from zero_topo.topology.discover import resolve_topology
from zero_topo.topology.placements import Placement

OF_DEEPSPEED: Mapping[str, str] = {
    "report": "call zero_topo.fsdp.report",
}
"""Keys that only a DeepSpeed engine reads, and what to do in their place."""


def resolve(
    block: Mapping[str, Any], world_size: int, placements: Sequence[Placement] = ()
) -> ResolvedConfig:
    """Resolve a ``zero_topo`` block for FSDP2.

    A scheme's own choices that FSDP2 does not have are replaced: weights and gradients share the
    larger degree, and there is no secondary copy and no INT8 storage. The user's own keys are never
    replaced.

    Args:
        block: the block's keys.
        world_size: ranks of the job.
        placements: the placement of each rank, if the ranks have gathered them.

    Raises:
        ValueError: in one line, for a wrong block or a setting that FSDP2 does not have.
    """
    block = _with_publish(block)
    config = ZeroTopoConfig.parse(block)
    for key, instead in OF_DEEPSPEED.items():
        if key in config.model_fields_set:
            raise ValueError(
                f"{ROOT}.{key}: FSDP2 has no engine that reads it; remove it and {instead}"
            )
    topology = resolve_topology(config.topology, world_size, placements)
    if is_automatic(config, topology):
        raise ValueError(
            f"{ROOT}: no plan is chosen for a model under FSDP2; name one, such as "
            f'{{"scheme": "paper"}}; "zero-topo plan" shows what each takes'
        )
    resolved = resolve_config(ZeroTopoConfig.parse(_with_one_degree(block)), topology)
    _refuse(resolved)
    return resolved


def _with_publish(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the block with the earlier ``"publish": {"delta": "int4"}`` as ``quantize.publish``.

    Only this door has kept the format, so that its scripts still run.
    """
    quantize = block.get("quantize") or {}
    if block.get("publish") != {"delta": "int4"} or not isinstance(quantize, Mapping):
        return block
    others = {key: value for key, value in block.items() if key != "publish"}
    return {**others, "quantize": {**quantize, "publish": "int4"}}


def _with_one_degree(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block with the scheme's choices that FSDP2 does not have replaced."""
    unnamed = "" if block.get("weights") else DEFAULT_SCHEME
    scheme = SCHEMES.get(block.get("scheme") or unnamed, {})
    degree = scheme.get("gradients")
    if degree == SAME:
        degree = scheme["weights"]
    given = [block[role] for role in ("weights", "gradients") if block.get(role) is not None]
    if scheme and len(given) < 2:
        own = given[0] if given else degree
        block = {**block, "weights": own, "gradients": own}
    quantize = block.get("quantize") or {}
    return {"secondary": None, **block, "quantize": {"resident": None, **quantize}}


def _refuse(config: ResolvedConfig) -> None:
    plan = config.plan
    if plan.weights != plan.gradients:
        raise ValueError(
            f"weights over {plan.weights} ranks and gradients over {plan.gradients}: FSDP2 has one "
            f'degree for both; give "weights" and "gradients" one value, such as "node"'
        )
    if plan.secondary is not None:
        raise ValueError(
            f"secondary = {as_json(plan.secondary)}: FSDP2 makes its own second copy; set it to "
            f"null and pass reshard_after_forward={plan.secondary} to fully_shard"
        )
    if config.resident_spec is not None:
        raise ValueError(
            'quantize.resident = "int8": FSDP2 stores weights in their own type; set it to '
            'null and send them as INT8 with "weights": "int8"'
        )
    groups = plan.groups(1, plan.weights)
    unsorted = next((ranks for ranks in groups if ranks != sorted(ranks)), None)
    if unsorted is not None:
        raise ValueError(
            f"ranks {unsorted} share weights in this order: FSDP2 counts ranks in ascending order; "
            "start ranks in the order of the node's GPUs"
        )


def state_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Create the mesh of optimizer states: weight shards, their parts, equal copies. Collective.

    Args:
        plan: the degrees ``W | O | N``.
        device_type: of the shards, such as "cuda".

    Returns:
        ``[W, O / W, N / O]`` with the dimensions "shard", "part" and "copy". FSDP2 shards over
        "shard".
    """
    parts = plan.optimizer // plan.weights
    copies = plan.world_size // plan.optimizer
    ranks = torch.tensor(plan.rank_at).view(copies, parts, plan.weights)
    return DeviceMesh(device_type, ranks.permute(2, 1, 0), mesh_dim_names=("shard", "part", "copy"))


def whole_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Create the mesh of the ranks whose parts are a whole state, for reductions. Collective.

    ``DeviceMesh._flatten`` of "shard" and "part" would also serve gathers, and torch then orders
    parts by rank, not by place.
    """
    ranks = torch.tensor(plan.rank_at).view(-1, plan.optimizer)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("copy", "whole"))["whole"]
