# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Resolves the ``zero_topo`` block of a DeepSpeed call; most checks run before a process group exists."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, deepspeed_problems, load_deepspeed_config
from zero_topo.config.deepspeed_json import BLOCK_VARIABLE, with_environment_block
from zero_topo.config.parts import ROOT
from zero_topo.config.stock_keys import Translation, translate
from zero_topo.cost.candidates import before_a_model
from zero_topo.cost.explain import module_request, planned
from zero_topo.cost.planner import Request
from zero_topo.cost.step import method_of
from zero_topo.hook.seam import wrapping
from zero_topo.observe.log import refusals
from zero_topo.topology.discover import MEASURED, resolve_topology
from zero_topo.topology.model import Topology

CONFIG_ARGUMENTS = ("config", "config_params", "config_dict_or_path")
GROUP_ARGUMENTS = ("data_parallel_group", "sequence_data_parallel_group")
"""The process group that ``zero.Init`` shards over: the argument's name, and DeepSpeed's older name."""


def deepspeed_config_of(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the DeepSpeed JSON passed to ``deepspeed.initialize`` or ``zero.Init`` as a dict, or None.

    An unreadable config also gives None: DeepSpeed reports it in the same call. Without a ``zero_topo`` block
    DeepSpeed's behaviour must not change.

    Args:
        arguments: the call's bound arguments.
    """
    named = [arguments.get(name) for name in CONFIG_ARGUMENTS]
    named.append(getattr(arguments.get("args"), "deepspeed_config", None))
    config = next((value for value in named if value is not None), None)
    if not isinstance(config, str | Mapping):
        return None
    try:
        loaded = load_deepspeed_config(config)
    except ValueError:
        return None
    return with_environment_block(loaded)


@wrapping
def checked_first(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``function`` to validate its config argument first, before it can create a process group."""
    call = inspect.signature(function).bind(*args, **kwargs)
    config = deepspeed_config_of(call.arguments)
    if config is None:
        return function(*args, **kwargs)
    builds_engine = "optimizer" in call.signature.parameters
    with refusals():
        check_call(call.arguments, config)
        translation = translate(config, call.arguments.get("optimizer") is not None)
        call.arguments |= own_config(call.arguments, translation, say=builds_engine)
    if builds_engine:
        call.arguments |= own_optimizer(call.arguments, translation.config)
    return function(*call.args, **call.kwargs)


def own_config(arguments: Mapping[str, Any], translation: Translation, say: bool) -> dict[str, Any]:
    """Return a replacement of the config argument: with the environment's block, without keys that the block replaces.

    Args:
        arguments: the call's bound arguments.
        translation: the config without DeepSpeed's keys that the block replaces.
        say: whether rank 0 logs a line for each key.
    """
    config, lines = translation.config, list(translation.lines)
    if BLOCK_VARIABLE in os.environ:
        used = "has the block of this engine" if ROOT in config else "is not used: this engine is not of ZeRO stage 3"
        lines.insert(0, f"{BLOCK_VARIABLE} {used}")
    if not lines:
        return {}
    if say and os.environ.get("RANK", "0") == "0":
        from deepspeed.utils import logger

        for line in lines:
            logger.warning(f"zero_topo: {line}")
    name = next((name for name in CONFIG_ARGUMENTS if arguments.get(name) is not None), None)
    if name is not None:
        return {name: config}
    args = copy(arguments["args"])
    args.deepspeed_config = config
    return {"args": args}


def own_optimizer(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an ``optimizer`` argument that builds one of our optimizers, if the config names one.

    Args:
        arguments: the call's bound arguments.
        config: the DeepSpeed JSON as a dict.
    """
    named = config.get("optimizer")
    if ROOT not in config or arguments.get("optimizer") is not None or not isinstance(named, Mapping):
        return {}
    from zero_topo.sync import OPTIMIZERS

    kind = OPTIMIZERS.get(str(named.get("type")).lower())
    return {} if kind is None else {"optimizer": lambda parameters: kind(parameters, **named.get("params", {}))}


def check_call(arguments: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Validate a call of ``deepspeed.initialize`` or ``zero.Init`` if its config carries a block.

    Args:
        arguments: the call's bound arguments.
        config: the DeepSpeed JSON as a dict.

    Raises:
        ValueError: as :func:`resolve_block`, and for arguments that zero_topo cannot work with.
    """
    if ROOT not in config:
        return
    world = os.environ.get("WORLD_SIZE")
    resolve_block(config, int(world) if world else None, None)
    _model_parallel(arguments.get("mpu"))
    _mesh(arguments.get("mesh_param"))
    # The signature of zero.Init has no optimizer: there the config shows whether the model is trained.
    _remote_parameters(arguments.get("remote_device"), trains="optimizer" in config)
    for name in GROUP_ARGUMENTS:
        refuse_group(name, arguments.get(name))


def sharding_ranks(mpu: Any, world: int) -> int:
    """Return how many ranks DeepSpeed shards over with an mpu: its sequence-data-parallel or its data-parallel ranks.

    Args:
        mpu: the ``mpu`` argument of ``deepspeed.initialize``, or None.
        world: ranks of the launch, returned without an mpu.
    """
    for name in ("get_sequence_data_parallel_world_size", "get_data_parallel_world_size"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return world


def _model_parallel(mpu: Any) -> None:
    if hasattr(mpu, "initialize_sequence_parallel"):
        return  # DeepSpeed's mpu for Ulysses: its model-parallel sizes are aliases of the sequence-parallel ones
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        try:
            size = int(getattr(mpu, name)())
        except (AttributeError, AssertionError, RuntimeError, ValueError):
            continue  # no mpu, or it is not initialized: DeepSpeed's sizes are checked later
        if size > 1:
            raise ValueError(
                f"mpu = {type(mpu).__name__} with {size} tensor-parallel ranks: zero_topo shards over all "
                "ranks of the launch, which this would divide; set the tensor-parallel size to 1"
            )


def _mesh(mesh: Sequence[int] | None) -> None:
    if mesh and len(mesh) > 1 and mesh[1] > 1:
        raise ValueError(
            f"mesh_param = {tuple(mesh)}, so DeepSpeed shards over {mesh[0]} ranks: zero_topo shards over all ranks of "
            "the launch; for Ulysses give deepspeed.initialize the mpu that deepspeed.runtime.sequence_parallel makes, "
            "as Hugging Face does"
        )


def refuse_group(name: str, group: Any) -> None:
    """Raise ValueError if an argument of ``zero.Init`` is a process group of fewer ranks than the launch has.

    Args:
        name: the argument.
        group: its value, a process group or None.
    """
    if group is None:
        return
    import torch.distributed as dist

    size, world = dist.get_world_size(group), dist.get_world_size()
    if size != world:
        raise ValueError(
            f"{name} of zero.Init is a process group of {max(size, 0)} ranks: zero_topo shards over all {world} ranks "
            'of the launch; remove the argument, and set "zero_topo": {"weights": "node"} or another domain to store '
            "parameters in fewer ranks"
        )


def _remote_parameters(device: str | None, trains: bool) -> None:
    if device not in (None, "none", *(() if trains else ("cpu",))):
        raise ValueError(
            f'remote_device = "{device}": parameter offload is not supported; leave it out and shard weights wider, '
            'such as "zero_topo": {"weights": "node"}'
        )


def resolve_block(
    config: dict[str, Any],
    world_size: int | None,
    data_parallel_size: int | None,
    env: Mapping[str, str] = os.environ,
    engine: Any | None = None,
    memory: int | None = None,
) -> ResolvedConfig:
    """Resolve the ``zero_topo`` block of a DeepSpeed config.

    Args:
        config: the DeepSpeed JSON as a dict, with a block.
        world_size: ranks of the launch, if known.
        data_parallel_size: ranks over which DeepSpeed shards, if known.
        env: the launcher's environment.
        engine: DeepSpeed's engine, for whose model the plan is chosen or checked; None before it exists.
        memory: bytes of the job's smallest device (on CPUs, of its smallest host), if known.

    Raises:
        ValueError: for an invalid block, a rejected DeepSpeed setting, or a machine that does not fit.
    """
    block = ZeroTopoConfig.from_ds_config(config)
    assert block is not None
    if problems := deepspeed_problems(config):
        raise ValueError(problems[0])
    if data_parallel_size is not None and data_parallel_size != world_size:
        raise ValueError(
            f"zero_topo shards over all {world_size} ranks, but DeepSpeed has {data_parallel_size} data-parallel "
            "ranks: tensor and pipeline parallelism do not work with it yet; set their sizes to 1"
        )
    topology = _machine(block.topology, env, world_size, engine)
    if engine is None:
        return before_a_model(block, topology)
    if memory is not None and not topology.emulated:
        memory //= topology.ranks_per_node if engine.device.type == "cpu" else 1
        topology = replace(topology, memory_per_rank=min(memory, topology.memory_per_rank or memory))
    try:
        return planned(block, request_of(engine, topology))
    except ValueError:
        if engine.optimizer_name() is not None:
            raise
    return planned(block, request_of(engine, topology, trains=False))  # without an optimizer more models fit


def request_of(engine: Any, topology: Topology, trains: bool = True) -> Request:
    """Return the planner's request for an engine: its modules, with activation checkpointing, and its settings.

    Every rank has the same model, config and machine, and the planner is a pure function of them, so all ranks choose
    one plan without communication. ``agreement.py`` checks that they did.

    Args:
        engine: DeepSpeed's engine.
        topology: the machine.
        trains: whether there are gradients and optimizer states. True for the reference model of a policy too: it uses
            the policy's plan, so that both round their weights identically.
    """
    lower = str(engine.torch_autocast_dtype()) if engine.torch_autocast_enabled() else ""
    return module_request(
        engine.module,
        topology,
        trains=trains,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        micro_batches=engine.gradient_accumulation_steps(),
        itemsize=max((p.element_size() for p in engine.module.parameters()), default=4),
        muon=method_of({"optimizer": {"type": engine.optimizer_name(), "params": engine.optimizer_params()}}),
        live=engine.zero_max_live_parameters(),
        bucket=engine.zero_reduce_bucket_size(),
        sub_group=engine.zero_sub_group_size(),
        offload=engine.zero_cpu_offload(),
        loss_scaled=engine.fp16_enabled() or lower == "torch.float16",
    )


def _machine(setting: str | Mapping[str, Any], env: Mapping[str, str], world_size: int | None, engine: Any) -> Topology:
    """Return the machine of a setting; "measured" is resolved like "auto" until ranks can communicate."""
    if setting != MEASURED:
        return resolve_topology(setting, env, world_size)
    if engine is None:
        return resolve_topology("auto", env, world_size)
    from zero_topo.measure import measure

    return measure(engine.device)


def seed_everything(seed: int | None, rank: int) -> None:
    """Seed Python's and torch's generators with ``seed + rank``: dropout differs between ranks and repeats."""
    if seed is None:
        return
    import torch

    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
