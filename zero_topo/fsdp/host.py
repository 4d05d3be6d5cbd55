# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""An attached model: what FSDP2's modules and the sharded optimizer share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.module_tracker import ModuleTracker

from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import Move
from zero_topo.fsdp.modules import post_order
from zero_topo.mesh import Hierarchy, Mesh
from zero_topo.plan import Plan

PASS = ModuleTracker()
"""Never entered: of it, only ``is_bw`` is asked, whether a backward pass runs."""


def no_optimizer(params: Sequence[DTensor], divisor: float) -> None:
    """Refuse a backward pass."""
    raise RuntimeError(
        "a backward pass before zero_topo.fsdp.shard_optimizer: nothing would sync gradients "
        "between nodes; build the optimizer by shard_optimizer first"
    )


@dataclass
class Host:
    """An attached model.

    Attributes:
        model: the root module.
        config: the resolved block.
        mesh: the process groups of the plan.
        states: the mesh of optimizer states.
        whole: the mesh of the ranks whose parts are a whole state.
        divisor: what the sum of all ranks' gradients is divided by; None is FSDP2's setting of each
            module, or the number of ranks.
        before_reduction: the sharded optimizer's, called before FSDP2 reduces gradients of some
            parameters, with these and their divisor.
        formula: bytes of the current step by the formulas: ``(phase, domain) -> bytes``.
    """

    model: nn.Module
    config: ResolvedConfig
    mesh: Mesh
    states: DeviceMesh
    whole: DeviceMesh
    divisor: float | None
    before_reduction: Callable[[Sequence[DTensor], float], None] = no_optimizer
    formula: Counter[tuple[str, str]] = field(default_factory=Counter)

    @cached_property
    def hierarchy(self) -> Hierarchy:
        """The groups of the ranks that share the weights."""
        return self.mesh.hierarchy(1, self.config.plan.weights)

    def book(self, phase: str, moves: Iterable[Move]) -> None:
        """Add what a rank sends in a collective to the formula."""
        for move in moves:
            self.formula[phase, self.config.topology.domain(move.hi)] += move.sent


def check_sharding(model: nn.Module, plan: Plan, rank: int) -> None:
    """Raise ValueError, in one line, if a model is not sharded as the plan says."""
    if not isinstance(model, FSDPModule):
        raise ValueError(
            f"{type(model).__name__} is not sharded: call torch's fully_shard on it and its blocks "
            "over shard_mesh(block) first, or zero_topo.fsdp.fully_shard"
        )
    expected = plan.group(rank, 1, plan.weights)
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            continue
        ranks = param.device_mesh.mesh.tolist()
        if tuple(param.placements) != (Shard(0),):
            raise ValueError(
                f"{name} is placed as {param.placements}: the collectives need Shard(0) over one "
                "mesh dimension; shard over shard_mesh(block), without replicas or tensor "
                "parallelism"
            )
        if ranks != expected:
            raise ValueError(
                f"{name} is sharded over ranks {ranks[:16]}, but by the block ranks "
                f"{expected[:16]} share weights; shard over shard_mesh(block)"
            )


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the modules on which ``fully_shard`` was called."""
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def own_parameters(module: Any) -> list[DTensor]:
    """Return the parameters that FSDP2 gathers with a module, in its order: those of inner modules
    first.
    """
    roots = module._get_fsdp_state()._modules  # several if fully_shard was called on a list
    met = {other for root in roots for other in sharded_modules(root)}
    met.difference_update(roots)
    own: dict[DTensor, None] = {}
    for root in roots:
        for inner in post_order(root, met):
            params = inner.parameters(recurse=False)
            own.update((param, None) for param in params if isinstance(param, DTensor))
    return list(own)
