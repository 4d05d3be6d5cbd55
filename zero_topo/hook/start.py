# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the ranks of an engine make sure of together, before its first collective and before its first group."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from functools import wraps
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import zero_topo
from zero_topo.config import ResolvedConfig
from zero_topo.config.errors import ROOT
from zero_topo.engine.agreement import agree, check_agreement, check_blocks
from zero_topo.hook.initialize import resolve_block, sharding_ranks
from zero_topo.hook.log import refusals
from zero_topo.quant.operands import FLOATS
from zero_topo.topology.seats import Seat

LOCAL: Mapping[str, str] = MappingProxyType(
    {
        r"(.*[._])?(path|dir|file)": "the same file may lie elsewhere on another node",
        "train_batch_size|train_micro_batch_size_per_gpu": "what a rank reads at a time is its script's affair",
        "gradient_accumulation_steps": "the number that DeepSpeed derives is compared, whatever says it",
        "zero_topo": "the block as it was resolved is compared, with the machine",
        "aio": "how a node reads its own disks",
        "disable_python_gc": "when a process collects its own garbage",
        "steps_per_print|dump_state|log_level|zero_optimization.log_trace_cache_warnings": "what a rank logs",
        "wall_clock_breakdown|memory_breakdown|timers|flops_profiler|comms_logger": "what a rank measures of itself",
        "tensorboard|wandb|csv_monitor|comet": "rank 0 alone writes to monitors",
    }
)
"""Keys of the DeepSpeed JSON (patterns of whole dotted names) that ranks may have each their own, and why."""
LISTS = ("params", "param_names")
"""What an optimizer's group lists, parameter by parameter; the rest are settings of them all."""


def meeting(configure: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's ``configure``, of an engine and its model, once all ranks have come there with the same.

    It begins with the engine's first collective, a broadcast of the parameters, which hangs if their shapes differ.
    """

    @wraps(configure)
    def wrapper(engine: Any, model: Any) -> None:
        has_block, world = ROOT in engine._config._param_dict, dist.get_world_size()
        divided = sharding_ranks(engine.mpu, world) < world
        store = meeting_place()
        with refusals():
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
    """What must be the same everywhere, beside the plan: the model, DeepSpeed's settings, versions.

    Of ``zero_optimization`` what DeepSpeed read, so that a default may be written out on some ranks.
    """
    shapes = {
        name: [str(param.dtype), param.requires_grad, *getattr(param, "ds_shape", param.shape)]
        for name, param in model.named_parameters()
    }
    config = engine._config
    return {
        **_shared({**config._param_dict, "zero_optimization": config.zero_config.model_dump()}),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "model": shapes,
        "model_order": {str(place): name for place, name in enumerate(shapes)},
        "versions": {module.__name__: module.__version__ for module in (torch, deepspeed, zero_topo)},
    }


def _shared(block: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The keys of a block of the DeepSpeed JSON that are not :data:`LOCAL`."""
    local = re.compile("|".join(LOCAL))
    found = {key: value for key, value in block.items() if not local.fullmatch(f"{path}{key}")}
    return {
        key: _shared(value, f"{path}{key}.") if isinstance(value, Mapping) else value for key, value in found.items()
    }


def _trained(optimizer: Any, names: Mapping[Any, str]) -> dict[str, Any]:
    """What must be the same of an optimizer: its kind, the settings of its groups, and the group of each parameter."""
    groups = dict(enumerate(optimizer.param_groups))
    return {
        "optimizer": type(optimizer).__name__,
        "param_groups": {
            str(index): {key: value for key, value in group.items() if key not in LISTS}
            for index, group in groups.items()
        },
        "param_group_of": {
            names.get(param, "?"): index for index, group in groups.items() for param in group["params"]
        },
    }


def _refuse_types(optimizer: Any, names: Mapping[Any, str]) -> None:
    """Raise ValueError for trained parameters of a type in which shards cannot be, or of two: shards are of one."""
    kinds: dict[torch.dtype, str] = {}
    for param in (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad):
        if getattr(param, "ds_numel", param.numel()):
            kinds.setdefault(getattr(param, "ds_tensor", param).dtype, names.get(param, "?"))
    for dtype, name in kinds.items():
        if dtype not in FLOATS:
            raise ValueError(
                f"{name} is {dtype}: weights are held and sent as FP32, FP16 or BF16, and FP32 masters train them "
                "under stock ZeRO-3 too; call model.float() before deepspeed.initialize or zero.Init gets the model"
            )
    if len(kinds) > 1:
        named = " and ".join(f"{name} ({dtype})" for dtype, name in kinds.items())
        raise ValueError(
            f"trained parameters have several types, such as {named}: ZeRO-3 keeps them in one flat buffer; convert "
            "the model to one type, or freeze those of the others"
        )


def _in_one_order(optimizer: Any, names: Mapping[Any, str], device: torch.device) -> None:
    """Give each group's parameters the model's order if ranks list them differently, as a ``set`` does. Collective.

    Shards are cut in the order of the groups. Where all ranks have the same, it stays: checkpoints are in that order.

    Args:
        optimizer: torch's, whose groups have the same members on all ranks.
        names: parameter -> name, in the model's order.
        device: where the world's collectives take tensors.
    """
    listed = [names.get(param) for group in optimizer.param_groups for param in group["params"]]
    digest = int.from_bytes(sha256(repr(listed).encode()).digest()[:7], "little")
    least = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    if int(least.sum()) == 0:
        return
    place = {param: index for index, param in enumerate(names)}
    for group in optimizer.param_groups:
        order = sorted(range(len(group["params"])), key=lambda index: place.get(group["params"][index], -1))
        group |= {key: [group[key][index] for index in order] for key in LISTS if key in group}


def agreed(engine: Any, optimizer: Any) -> ResolvedConfig | None:
    """The block on which all ranks agree, or None; a rank that refuses its own tells the others first.

    Args:
        engine: DeepSpeed's.
        optimizer: torch's, or None; its groups are agreed on too, and their order (:func:`_in_one_order`).
    """
    config = engine._config._param_dict
    memory = least_memory(engine.device) if ROOT in config else None
    try:
        found = resolve_block(config, dist.get_world_size(), engine.seq_dp_world_size, engine=engine, memory=memory)
        if found is not None and optimizer:
            _refuse_types(optimizer, engine.param_names)
    except ValueError as error:
        agree({"refused": str(error)}, Seat(socket.gethostname()), engine.device)
        raise
    if found is not None:
        names = engine.param_names
        check_agreement(found, engine.device, _trained(optimizer, names) if optimizer else {})
        if optimizer:
            _in_one_order(optimizer, names, engine.device)
    return found


def least_memory(device: torch.device) -> int:
    """Bytes of the smallest device of the job, on CPUs of the smallest host, so that all ranks plan alike. Collective.

    Args:
        device: this rank's.
    """
    least = torch.tensor(get_accelerator().total_memory(), device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
