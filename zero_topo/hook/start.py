# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks across all ranks of an engine, before its first collective and before its first process
group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import zero_topo
from zero_topo.config import ResolvedConfig
from zero_topo.config.deepspeed_json import BLOCK_VARIABLE
from zero_topo.config.parts import ROOT
from zero_topo.cost.job import Job
from zero_topo.engine.agreement import agree, check_agreement, check_blocks, gather_placements
from zero_topo.hook.initialize import resolve_block, resolve_experts, sharding_group
from zero_topo.hook.parameters import wrong_group
from zero_topo.hook.seam import wrapping
from zero_topo.observe.log import refusals
from zero_topo.quant.operands import FLOATS, way_to_floats
from zero_topo.topology.groups import groups_from

LOCAL: Mapping[str, str] = MappingProxyType(
    {
        r"(.*[._])?(path|dir|file)": "the same file may lie elsewhere on another node",
        "train_batch_size|train_micro_batch_size_per_gpu": "each rank may read another batch size",
        "gradient_accumulation_steps": "the number that DeepSpeed derives is compared",
        "zero_topo": "the block as it was resolved is compared, with the machine",
        "aio": "how a node reads its own disks",
        "disable_python_gc": "garbage collection of one process",
        "steps_per_print|dump_state|log_level": "logs of one process",
        "zero_optimization.log_trace_cache_warnings": "logs of one process",
        "wall_clock_breakdown|memory_breakdown|timers": "measurements of one process",
        "flops_profiler|comms_logger": "measurements of one process",
        "tensorboard|wandb|csv_monitor|comet": "rank 0 alone writes to monitors",
    }
)
"""Keys of the DeepSpeed JSON (patterns of whole dotted names) that may differ between ranks, and
why.
"""
LISTS = ("params", "param_names")
"""Entries of an optimizer's group with one item per parameter; all other entries are settings of
the group.
"""


@wrapping
def meeting(configure: Callable[..., None], engine: Any, model: Any) -> None:
    """Wrap DeepSpeed's ``configure(engine, model)`` to check first that all ranks reach it with
    equal settings.

    ``configure`` runs the engine's first collective, a broadcast of the parameters, which hangs if
    shapes differ.
    """
    has_block = ROOT in engine._config._param_dict
    store = meeting_place()
    with refusals():
        if store is not None:
            block = os.environ.get(BLOCK_VARIABLE) or None
            check_blocks(store, dist.get_rank(), dist.get_world_size(), has_block, block)
        if has_block:
            _agree_on_start(engine, model)
    configure(engine, model)


def _agree_on_start(engine: Any, model: torch.nn.Module) -> None:
    """Check that ranks begin with equal settings, and with parameters that ``zero.Init`` shards
    over their group.
    """
    group = sharding_group(engine.mpu)
    size = dist.get_world_size(group)
    for name, param in model.named_parameters():
        # Set by `zero.Init`; a parameter that is whole has none yet.
        own = getattr(param, "ds_process_group", None)
        experts = getattr(param, "ds_zero_partition_group_name", None) is not None
        if own is not None and not experts and dist.get_world_size(own) != size:
            line = wrong_group(name, max(dist.get_world_size(own), 0), size)
            agree({"refused": line}, engine.device)
            raise ValueError(line)
    agree(_settings(engine), engine.device)
    # Tensor-parallel ranks have different parts of the model, of different shapes if a size does
    # not divide.
    agree(_model(model), engine.device, groups=groups_over(group, engine.device))


def meeting_place() -> dist.Store | None:
    """Return the store of torch's rendezvous; None for backends without one."""
    if dist.get_backend() in ("mpi", "fake"):
        return None
    return dist.distributed_c10d._get_default_store()


def groups_over(group: Any, device: torch.device) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of all process groups of the job of which ``group`` is this rank's.
    Collective.

    Groups are created by all ranks in one order, so every rank needs those of the others.

    Args:
        group: a process group; together with those of the other ranks it divides the world. None is
            the world.
        device: the device of the world group's tensors.

    Returns:
        The global ranks of each group; empty if there is one group of all ranks.
    """
    world = dist.get_world_size()
    if group is None or dist.get_world_size(group) == world:
        return ()
    first = torch.tensor(
        [min(dist.get_process_group_ranks(group))], dtype=torch.int64, device=device
    )
    # Ranks of one group send one number, which names it.
    firsts = first.new_empty(world)
    dist.all_gather_into_tensor(firsts, first)
    return groups_from(firsts.tolist())


def _model(model: torch.nn.Module) -> dict[str, Any]:
    """Return what must be equal of a model on all ranks that share its shards."""
    shapes = {
        name: [str(param.dtype), param.requires_grad, *getattr(param, "ds_shape", param.shape)]
        for name, param in model.named_parameters()
    }
    return {"model": shapes, "model_order": {str(place): name for place, name in enumerate(shapes)}}


def _settings(engine: Any) -> dict[str, Any]:
    """Return what must be equal on all ranks besides plan and model: DeepSpeed's settings,
    versions.

    ``zero_optimization`` is compared as DeepSpeed parsed it, so some ranks may write out a default.
    """
    config = engine._config
    return {
        **_shared({**config._param_dict, "zero_optimization": config.zero_config.model_dump()}),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "versions": {
            module.__name__: module.__version__ for module in (torch, deepspeed, zero_topo)
        },
    }


def _shared(block: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a block of the DeepSpeed JSON without the keys in :data:`LOCAL`."""
    local = re.compile("|".join(LOCAL))
    found = {key: value for key, value in block.items() if not local.fullmatch(f"{path}{key}")}
    return {
        key: _shared(value, f"{path}{key}.") if isinstance(value, Mapping) else value
        for key, value in found.items()
    }


def _trained(optimizer: Any, names: Mapping[Any, str]) -> dict[str, Any]:
    """Return what must be equal of an optimizer: its class, its groups' settings, and each
    parameter's group.
    """
    groups = dict(enumerate(optimizer.param_groups))
    return {
        "optimizer": type(optimizer).__name__,
        "param_groups": {
            str(index): {key: value for key, value in group.items() if key not in LISTS}
            for index, group in groups.items()
        },
        "param_group_of": {
            names.get(param, "?"): index
            for index, group in groups.items()
            for param in group["params"]
        },
    }


def _refuse_types(optimizer: Any, names: Mapping[Any, str]) -> None:
    """Raise ValueError if trained parameters have an unsupported dtype, or more than one: shards
    have one dtype.
    """
    kinds: dict[torch.dtype, str] = {}
    for param in (
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    ):
        # A parameter without elements is neither stored nor sent.
        if getattr(param, "ds_numel", param.numel()):
            kinds.setdefault(getattr(param, "ds_tensor", param).dtype, names.get(param, "?"))
    for dtype, name in kinds.items():
        if dtype not in FLOATS:
            raise ValueError(
                f"{name} is {dtype}: weights are stored and sent as FP32, FP16 or BF16, and FP32 "
                f"masters train them under stock ZeRO-3 too; {way_to_floats(dtype)}"
            )
    if len(kinds) > 1:
        named = " and ".join(f"{name} ({dtype})" for dtype, name in kinds.items())
        raise ValueError(
            f"trained parameters have several types, such as {named}: ZeRO-3 keeps them in one "
            "flat buffer; convert the model to one type, or freeze those of the others"
        )


def _in_one_order(optimizer: Any, names: Mapping[Any, str], device: torch.device) -> None:
    """Sort each group's parameters into the model's order if the order differs between ranks (a
    ``set``). Collective.

    Shards are cut in the order of the groups. An order that all ranks share stays, because
    checkpoints use it.

    Args:
        optimizer: torch's optimizer, whose groups have the same parameters on all ranks.
        names: parameter -> name, in the model's order.
        device: the device of the world group's tensors.
    """
    listed = [names.get(param) for group in optimizer.param_groups for param in group["params"]]
    # Seven bytes fit a positive int64.
    digest = int.from_bytes(sha256(repr(listed).encode()).digest()[:7], "little")
    # Least and most in one reduction: they sum to 0 if all digests are equal.
    least = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    if int(least.sum()) == 0:
        return
    place = {param: index for index, param in enumerate(names)}
    for group in optimizer.param_groups:
        order = sorted(
            range(len(group["params"])), key=lambda index: place.get(group["params"][index], -1)
        )
        group |= {key: [group[key][index] for index in order] for key in LISTS if key in group}


def agreed(engine: Any, optimizer: Any) -> list[ResolvedConfig]:
    """Resolve the block and check that all ranks agree; return it, or an empty list without a
    block.

    With expert parallelism there is a second plan, of the experts.

    A rank that rejects its block reports that to the others before it raises.

    Args:
        engine: DeepSpeed's engine.
        optimizer: torch's optimizer, or None; its groups and their order are checked too
            (:func:`_in_one_order`).
    """
    config = engine._config._param_dict
    names = engine.param_names
    if ROOT not in config:
        return []
    memory = least_memory(engine.device)
    placements = gather_placements(engine.device)
    members = groups_over(engine.seq_data_parallel_group, engine.device)
    expert_groups = _expert_groups(engine)
    experts = [groups_over(group, engine.device) for group in expert_groups[:1]]
    try:
        if len(expert_groups) > 1:
            raise ValueError(
                f"expert_parallel: {len(expert_groups)} expert-parallel sizes in one model; use one"
            )
        shared = partial(_largest, device=engine.device) if members else None
        world = dist.get_world_size()
        dense = resolve_block(config, world, members, engine, placements, memory, shared)
        found = [dense]
        for groups in experts:
            if groups != members:  # else experts are sharded like all other parameters
                found.append(resolve_experts(config, dense, groups, dist.get_rank()))
        if optimizer:
            _refuse_types(optimizer, names)
    except ValueError as error:
        agree({"refused": str(error)}, engine.device)
        raise
    more = {"experts": [plan.to_json() for plan in found[1:]]}
    if optimizer:
        more |= _trained(optimizer, names)
    check_agreement(found[0], engine.device, more)
    if optimizer:
        _in_one_order(optimizer, names, engine.device)
    return found


def _largest(job: Job, device: torch.device) -> Job:
    """Return the job of the rank with the most parameters, so that all choose one plan.
    Collective.

    Tensor-parallel ranks have parts of different sizes if a size does not divide.
    """
    own = sum(job.numels or ()) + sum(job.frozen)
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([own], dtype=torch.int64, device=device))
    stored = [job]
    # Only parts of different sizes need one rank's job; else each rank has the same.
    if int(sizes.min()) < int(sizes.max()):
        dist.broadcast_object_list(stored, src=int(sizes.argmax()))
    return stored[0]


def _expert_groups(engine: Any) -> list[Any]:
    """Return the process groups over which DeepSpeed partitions AutoEP's experts, one for each
    expert-parallel size.
    """
    found = {
        getattr(param, "ds_zero_partition_group_name", None) for param in engine.module.parameters()
    }
    return [engine.expert_data_parallel_group[name] for name in sorted(filter(None, found))]


def least_memory(device: torch.device) -> int:
    """Return the bytes of the job's smallest device (on CPUs, its smallest host). Collective.

    All ranks plan with this number, so their plans are equal.

    Args:
        device: this rank's device.
    """
    least = torch.tensor(get_accelerator().total_memory(), dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
