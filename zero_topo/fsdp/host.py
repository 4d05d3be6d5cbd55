# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""An attached model: what FSDP2's modules and the sharded optimizer share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from zero_topo.config import ResolvedConfig
from zero_topo.fsdp.collectives import Gather, Scatter, Shared
from zero_topo.mesh import Mesh
from zero_topo.plan import Plan


class Receiver(Protocol):
    """The sharded optimizer, as the collectives call it."""

    def before_reduction(self) -> None:
        """Prepare for new gradients of shards."""


@dataclass
class Host:
    """An attached model.

    Attributes:
        model: the root module.
        config: the resolved block.
        mesh: the process groups of the plan.
        states: the mesh of optimizer states.
        shared: what the collectives of all modules share.
        divisor: what the sum of all ranks' gradients is divided by.
        optimizer: the sharded optimizer, once it is built.
    """

    model: nn.Module
    config: ResolvedConfig
    mesh: Mesh
    states: DeviceMesh
    shared: Shared
    divisor: float
    optimizer: Receiver | None = None

    @property
    def factor(self) -> float:
        """Multiplies added gradients: FSDP2 reduces nothing if one rank stores all weights."""
        return 1 / self.divisor if self.config.plan.weights == 1 else 1.0

    def install(self) -> None:
        """Give every module that FSDP2 shards our collectives."""
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise ValueError("this torch has no custom collectives of FSDP2; install torch 2.13")
        config = self.config
        for module in sharded_modules(self.model):
            stored = own_parameters(module)
            trained = [param for param in stored if param.requires_grad]
            gather = Gather(self.shared, config.weights_spec, self._sizes(stored))
            scatter = Scatter(
                self.shared,
                config.gradients_spec,
                self._sizes(trained),
                1 / self.divisor,
                self._before_reduction,
            )
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
            # FSDP2 then divides nothing and asks for sums: the sum is divided once, in FP32.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _sizes(self, params: list[DTensor]) -> list[int]:
        degree = self.config.plan.weights
        rows = [-(-param.shape[0] // degree) for param in params]
        return [count * param.shape[1:].numel() for count, param in zip(rows, params, strict=True)]

    def _before_reduction(self) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                "a backward pass before zero_topo.fsdp.shard_optimizer: nothing would sync "
                "gradients between nodes; build the optimizer by shard_optimizer first"
            )
        self.optimizer.before_reduction()


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


def own_parameters(module: nn.Module) -> list[DTensor]:
    """Return the parameters that FSDP2 gathers with a module, in its order."""
    inner = {
        param
        for other in sharded_modules(module)
        if other is not module
        for param in other.parameters()
    }
    own = (param for param in module.parameters() if param not in inner)
    return [param for param in own if isinstance(param, DTensor)]
