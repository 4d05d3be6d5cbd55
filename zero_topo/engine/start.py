# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the ranks of an engine make sure of together, before its first collective and before its first group."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import zero_topo
from zero_topo.config import ResolvedConfig
from zero_topo.config.errors import ROOT
from zero_topo.engine.agreement import agree, check_agreement, check_blocks
from zero_topo.engine.initialize import resolve_block
from zero_topo.topology.seats import Seat


def meeting(configure: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's ``configure``, of an engine and its model, once all ranks have come there with the same.

    It begins with the engine's first collective, a broadcast of the parameters, which hangs if their shapes differ.
    """

    @wraps(configure)
    def wrapper(engine: Any, model: Any) -> None:
        has_block, world = ROOT in engine._config._param_dict, dist.get_world_size()
        divided = engine.mpu is not None and engine.mpu.get_data_parallel_world_size() < world
        store = meeting_place()
        if not divided and store is not None:
            check_blocks(store, dist.get_rank(), world, has_block)
        if has_block:
            agree(_told(engine, model), Seat(socket.gethostname()), engine.device)
        configure(engine, model)

    return wrapper


def meeting_place() -> dist.Store | None:
    """The store in which torch's ranks met; two backends have none."""
    return None if dist.get_backend() in ("mpi", "fake") else dist.distributed_c10d._get_default_store()


def _told(engine: Any, model: torch.nn.Module) -> dict[str, Any]:
    """What must be the same everywhere, beside the plan: the model, DeepSpeed's settings, versions."""
    shapes = {
        name: [str(param.dtype), param.requires_grad, *getattr(param, "ds_shape", param.shape)]
        for name, param in model.named_parameters()
    }
    return {
        "model": shapes,
        "versions": {module.__name__: module.__version__ for module in (torch, deepspeed, zero_topo)},
        "zero_optimization": engine._config.zero_config.model_dump(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
    }


def agreed(engine: Any) -> ResolvedConfig | None:
    """The block on which all ranks agree, or None; a rank that refuses its own tells the others first."""
    config = engine._config._param_dict
    memory = least_memory(engine.device) if ROOT in config else None
    try:
        found = resolve_block(config, dist.get_world_size(), engine.dp_world_size, engine=engine, memory=memory)
    except ValueError as error:
        agree({"refused": str(error)}, Seat(socket.gethostname()), engine.device)
        raise
    if found is not None:
        check_agreement(found, engine.device)
    return found


def least_memory(device: torch.device) -> int | None:
    """Bytes of the smallest device of the job, so that all ranks plan alike; None on CPUs. Collective.

    Args:
        device: this rank's.
    """
    if get_accelerator().is_synchronized_device():
        return None
    least = torch.tensor(get_accelerator().total_memory(), device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
