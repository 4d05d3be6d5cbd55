# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The calls of a training script: shard the model by FSDP2, its optimizer over the whole job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from zero_topo.collectives.meter import Meter
from zero_topo.config import ResolvedConfig
from zero_topo.engine.agreement import agree, check_agreement, gather_placements
from zero_topo.fsdp.block import resolve, state_mesh, whole_mesh
from zero_topo.fsdp.collectives import install
from zero_topo.fsdp.host import Host, check_sharding
from zero_topo.fsdp.modules import elements_of_lists, has_forward, inner_first
from zero_topo.fsdp.optimizer import ShardedOptimizer
from zero_topo.mesh import Mesh
from zero_topo.observe.log import log_notes, refusals, show_log
from zero_topo.quant.operators import select

ATTACHED = "zero_topo_host"
"""The attribute of an attached model."""


@refusals()
def shard_mesh(block: Mapping[str, Any]) -> DeviceMesh:
    """Return the mesh of the ranks that share weights by the block, for FSDP2. Collective.

    Give it to your own calls of ``fully_shard``, or to a trainer's, and then call :func:`attach`.

    Args:
        block: the keys of a ``zero_topo`` block.
    """
    return state_mesh(_agreed(block).plan, _device().type)["shard"]


@refusals()
def fully_shard(
    model: nn.Module,
    block: Mapping[str, Any],
    modules: Iterable[nn.Module | Sequence[nn.Module]] | None = None,
    divisor: float | None = None,
    **options: Any,
) -> nn.Module:
    """Shard a model by FSDP2 over the ranks that the block names, with our collectives. Collective.

    Args:
        model: the model.
        block: the keys of a ``zero_topo`` block.
        modules: modules that FSDP2 gathers one by one, in any order; of a container without a
            forward, its elements. None takes :func:`elements_of_lists`.
        divisor: see :func:`attach`.
        options: passed to ``torch.distributed.fsdp.fully_shard``.

    Returns:
        The model.

    Raises:
        ValueError: in one line, for a block or option that FSDP2 does not have.
    """
    _refuse(model, options)
    config = _agreed(block)
    states = state_mesh(config.plan, _device().type)
    chosen: list[Any] = elements_of_lists(model) if modules is None else inner_first(model, modules)
    for module in chosen:
        if not isinstance(module, FSDPModule):  # else the user has sharded it
            torch_fully_shard(module, mesh=states["shard"], **options)
    torch_fully_shard(model, mesh=states["shard"], **options)
    return _attached(model, config, states, divisor)


@refusals()
def attach(model: nn.Module, block: Mapping[str, Any], divisor: float | None = None) -> nn.Module:
    """Give a model that FSDP2 has sharded our collectives. Collective.

    Args:
        model: the root module, sharded over :func:`shard_mesh` or an equal mesh.
        block: the keys of a ``zero_topo`` block.
        divisor: what the sum of all ranks' gradients is divided by. None is what FSDP2's
            ``set_gradient_divide_factor`` has set, or the number of ranks. Trainers that divide the
            loss by the tokens of all ranks need 1.

    Returns:
        The model. Build its optimizer by :func:`shard_optimizer` before the first backward pass.

    Raises:
        ValueError: in one line, for a wrong block, or a model that is not sharded as the block
            says.
    """
    return _attached(model, _agreed(block), None, divisor)


def _refuse(model: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of torch's ``fully_shard`` that have no place here."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__}: pass the root module; modules that share a gather "
            "go to modules, pass modules=[[norm, head]]"
        )
    if isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is sharded already; call attach in its place")
    if not has_forward(model):
        raise ValueError(
            f"{type(model).__name__} has no forward, which gathers weights; shard the models in it "
            "one by one"
        )
    for name in ("mesh", "dp_mesh_dims"):
        if name in options:
            raise ValueError(
                f"{name}: fully_shard makes the mesh from the block; leave it out, or call torch's "
                "fully_shard over shard_mesh(block) and then attach"
            )
    if isinstance(options.get("offload_policy"), CPUOffloadPolicy):
        raise ValueError("offload_policy: offloaded shards are not supported; leave it out")


def _attached(
    model: nn.Module, config: ResolvedConfig, states: DeviceMesh | None, divisor: float | None
) -> nn.Module:
    rank = dist.get_rank()
    plan = config.plan
    device = _device()
    if hasattr(model, ATTACHED):
        raise ValueError(f"{type(model).__name__} is attached already; attach a model once")
    check_sharding(model, plan, rank)
    meter = Meter()
    mesh = Mesh(plan, config.topology, meter, plan.pairs())
    states = states or state_mesh(plan, device.type)
    whole = whole_mesh(plan, device.type)
    host = Host(model, config, mesh, states, whole, divisor)
    show_log(rank)
    log_notes(rank, [f"machine: {config.machine.name}, {config.machine.shape}", *config.notes])
    select(device, config.kinds)
    install(host)
    setattr(model, ATTACHED, host)
    return model


@refusals()
def shard_optimizer(
    kind: Callable[..., torch.optim.Optimizer],
    model: nn.Module,
    params: Iterable[Any] | None = None,
    elementwise: bool = False,
    **settings: Any,
) -> ShardedOptimizer:
    """Build an optimizer whose states are sharded as the block says. Collective.

    Args:
        kind: an optimizer that updates each element by itself, such as ``torch.optim.AdamW``.
        model: of :func:`fully_shard` or :func:`attach`, with its weights, not on the meta device.
        params: parameters or groups, as ``kind`` takes them; None is all that require a gradient.
        elementwise: whether ``kind`` updates each element by itself; of torch's optimizers and ours
            it is known.
        settings: of ``kind``.

    Raises:
        ValueError: in one line, for a model that is not attached, or parameters that are not its
            own.
    """
    host: Host | None = getattr(model, ATTACHED, None)
    if host is None:
        raise ValueError(
            f"{type(model).__name__} is not attached: call fully_shard or attach of zero_topo.fsdp "
            "first"
        )
    if params is None:
        params = [param for param in model.parameters() if param.requires_grad]
    return ShardedOptimizer(kind, host, list(params), settings, elementwise)


def _agreed(block: Mapping[str, Any]) -> ResolvedConfig:
    """Resolve the block, and check that all ranks have one plan, on the machine where they run."""
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group yet; call torch.distributed.init_process_group first"
        )
    device = _device()
    placements = gather_placements(device)
    try:
        config = resolve(block, dist.get_world_size(), placements)
    except ValueError as error:
        agree({"refused": str(error)}, device)  # the other ranks must not wait for this one
        raise
    check_agreement(config, device)
    return config


def _device() -> torch.device:
    """Return this rank's accelerator, or the host if the backend of the job serves only that."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
