# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Resolves the ``zero_topo`` block of a DeepSpeed call; checks of a stated machine run before a
process group exists.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from deepspeed.utils import logger

from zero_topo.config import (
    ResolvedConfig,
    ZeroTopoConfig,
    deepspeed_problems,
    is_automatic,
    load_deepspeed_config,
    on_tree,
    resolve_config,
    tensor_parallel_groups,
)
from zero_topo.config.deepspeed_json import BLOCK_VARIABLE, with_environment_block
from zero_topo.config.modes import SCAPE_WITH_TENSOR_PARALLEL
from zero_topo.config.parts import ROOT
from zero_topo.config.sparse_config import ScapeSync
from zero_topo.config.stock_keys import Translation, translate
from zero_topo.cost.job import Job, job_of_module
from zero_topo.cost.rule import before_a_model, plan_for
from zero_topo.hook.seam import wrapping
from zero_topo.observe.log import refusals
from zero_topo.topology.discover import AUTO, resolve_topology
from zero_topo.topology.groups import Groups
from zero_topo.topology.placements import Placement

Members = Sequence[tuple[int, ...]]
"""Global ranks of each data-parallel group of a job, ascending."""
CONFIG_ARGUMENTS = ("config", "config_params", "config_dict_or_path")


def deepspeed_config_of(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the DeepSpeed JSON passed to ``deepspeed.initialize`` or ``zero.Init`` as a dict, or
    None.

    An unreadable config also gives None: DeepSpeed reports it in the same call. Without a
    ``zero_topo`` block DeepSpeed's behaviour must not change.

    Args:
        arguments: the call's bound arguments.
    """
    named = [arguments.get(name) for name in CONFIG_ARGUMENTS]
    named.append(getattr(arguments.get("args"), "deepspeed_config", None))
    # As DeepSpeed chooses among its arguments: the first that is given.
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
    """Wrap ``function`` to validate its config argument first, before it can create a process
    group.
    """
    call = inspect.signature(function).bind(*args, **kwargs)
    with refusals():
        config = deepspeed_config_of(call.arguments)
    if config is None:
        return function(*args, **kwargs)
    builds_engine = "optimizer" in call.signature.parameters
    with refusals():
        check_call(call.arguments, config)
        translation = translate(config, call.arguments.get("optimizer") is not None)
        # DeepSpeed gets the config without the keys that the block replaces.
        call.arguments |= own_config(call.arguments, translation, say=builds_engine)
        if builds_engine:
            call.arguments |= own_optimizer(call.arguments, translation.config)
    return function(*call.args, **call.kwargs)


def own_config(arguments: Mapping[str, Any], translation: Translation, say: bool) -> dict[str, Any]:
    """Return a replacement of the config argument: with the environment's block, without keys that
    the block replaces.

    Args:
        arguments: the call's bound arguments.
        translation: the config without DeepSpeed's keys that the block replaces.
        say: whether rank 0 logs a line for each key.
    """
    config = translation.config
    lines = list(translation.lines)
    if BLOCK_VARIABLE in os.environ:
        used = (
            "has the block of this engine"
            if ROOT in config
            else "is not used: this engine is not of ZeRO stage 3"
        )
        lines.insert(0, f"{BLOCK_VARIABLE} {used}")
    if not lines:
        return {}
    if say and os.environ.get("RANK", "0") == "0":
        for line in lines:
            logger.warning(f"zero_topo: {line}")
    name = next((name for name in CONFIG_ARGUMENTS if arguments.get(name) is not None), None)
    if name is not None:
        return {name: config}
    # The user's object is left as it was.
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
    if (
        ROOT not in config
        or arguments.get("optimizer") is not None
        or not isinstance(named, Mapping)
    ):
        return {}
    from zero_topo.sync import OPTIMIZERS

    kind = OPTIMIZERS.get(str(named.get("type")).lower())
    if kind is None:
        return {}
    params = named.get("params") or {}
    unknown = sorted(set(params) - set(inspect.signature(kind).parameters))
    if unknown:
        raise ValueError(
            f"optimizer.params.{unknown[0]}: {named['type']} does not take it; remove it"
        )
    return {"optimizer": lambda parameters: kind(parameters, **params)}


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
    mpu = arguments.get("mpu")
    _refuse_stages(mpu)
    ranks = int(world) if world else None
    block = _checked(config)
    # An mpu's groups are read, and the ranks find the machine, once they have built the engine.
    if not _divides(mpu, ranks):
        members = tensor_parallel_groups(config, ranks)
        if block.topology != AUTO:
            resolve_block(config, ranks, members)
    _mesh(arguments.get("mesh_param"))
    # The signature of zero.Init has no optimizer: there the config shows whether the model is
    # trained.
    _remote_parameters(arguments.get("remote_device"), trains="optimizer" in config)


def sharding_group(mpu: Any) -> Any:
    """Return the process group over which DeepSpeed shards with an mpu; None is the world.

    Args:
        mpu: the ``mpu`` argument of ``deepspeed.initialize``, or None.
    """
    for name in ("get_sequence_data_parallel_group", "get_data_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return None


def _divides(mpu: Any, ranks: int | None) -> bool:
    """Return whether DeepSpeed shards over fewer than all ranks with an mpu."""
    for name in ("get_sequence_data_parallel_world_size", "get_data_parallel_world_size"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)()) != ranks
    return False


def _refuse_stages(mpu: Any) -> None:
    """Raise ValueError for an mpu with pipeline parallelism, which unmodified DeepSpeed refuses
    with ZeRO-3 too.
    """
    for name in ("get_pipe_parallel_world_size", "get_pipeline_model_parallel_world_size"):
        try:
            stages = int(getattr(mpu, name)())
        except (AttributeError, AssertionError, RuntimeError, ValueError):
            continue  # no mpu, or one without pipelines
        if stages > 1:
            raise ValueError(
                f"mpu = {type(mpu).__name__} with {stages} pipeline stages: ZeRO-3 shards the "
                "whole model, under unmodified DeepSpeed too; set the number of stages to 1"
            )


def _mesh(mesh: Sequence[int] | None) -> None:
    if mesh and len(mesh) > 1 and mesh[1] > 1:
        raise ValueError(
            f"mesh_param = {tuple(mesh)}, so DeepSpeed shards over {mesh[0]} ranks: zero_topo "
            "shards over all ranks of the launch; for Ulysses give deepspeed.initialize the mpu "
            "that deepspeed.runtime.sequence_parallel makes, as Hugging Face does"
        )


def _remote_parameters(device: str | None, trains: bool) -> None:
    if device not in (None, "none", *(() if trains else ("cpu",))):
        raise ValueError(
            f'remote_device = "{device}": parameter offload is not supported; leave it out and '
            "shard weights wider, "
            'such as "zero_topo": {"weights": "node"}'
        )


def resolve_block(
    config: dict[str, Any],
    world_size: int | None,
    members: Members = (),
    engine: Any | None = None,
    placements: Sequence[Placement] = (),
    memory: int | None = None,
    shared: Callable[[Job], Job] | None = None,
) -> ResolvedConfig:
    """Resolve the ``zero_topo`` block of a DeepSpeed config.

    Args:
        config: the DeepSpeed JSON as a dict, with a block.
        world_size: ranks of the launch, if known.
        members: the data-parallel groups over which DeepSpeed shards; empty for one group of all
            ranks.
        engine: DeepSpeed's engine, for whose model the plan is chosen or checked; None before it
            exists.
        placements: the placement of each rank, if the ranks have gathered them.
        memory: bytes of the job's smallest device (on CPUs, of its smallest host), if known.
        shared: returns the job that all ranks plan with, if their parts of the model may differ;
            collective.

    Raises:
        ValueError: for an invalid block, a rejected DeepSpeed setting, or a machine that does not
            fit.
    """
    block = _checked(config)
    if len(members) > 1 and isinstance(block.sync, ScapeSync):
        raise ValueError(SCAPE_WITH_TENSOR_PARALLEL)
    topology = resolve_topology(block.topology, world_size, placements)
    if engine is None:
        tree = Groups(topology, tuple(members)).trees[0] if members else topology
        return before_a_model(block, tree)
    if memory is not None and not topology.emulated:
        # On CPUs the device of a rank is its share of the host.
        memory //= topology.ranks_per_node if engine.device.type == "cpu" else 1
        memory = min(memory, topology.memory_per_rank or memory)
        topology = replace(topology, memory_per_rank=memory)
    groups = Groups(topology, tuple(members)) if members else None
    if groups is not None:
        topology = groups.tree(engine.global_rank)

    def plan_of(trains: bool) -> ResolvedConfig:
        job = job_of(engine, trains)
        if shared is not None:
            job = shared(job)
        return plan_for(block, topology, job)

    try:
        found = plan_of(trains=True)
    except ValueError:
        if engine.optimizer_name() is not None:
            raise
        found = plan_of(trains=False)  # without an optimizer more models fit
    return replace(found, groups=groups)


def resolve_experts(
    config: dict[str, Any],
    dense: ResolvedConfig,
    members: Members,
    rank: int,
) -> ResolvedConfig:
    """Resolve the block a second time, for experts, which DeepSpeed shards over smaller groups.

    Named degrees are domains of the experts' tree. An automatic block takes the dense plan's
    domains.

    Args:
        config: the DeepSpeed JSON as a dict, with a block.
        dense: the plan of all other parameters.
        members: the expert-data-parallel groups.
        rank: this rank.

    Raises:
        ValueError: if a degree does not divide the experts' groups.
    """
    block = _checked(config)
    machine = dense.machine
    groups = Groups(machine, tuple(members), "experts")
    tree = groups.tree(rank)
    # Degrees by domain: those of the dense plan, in ranks that the experts' tree has there.
    if is_automatic(block, dense.topology):
        return replace(on_tree(dense, tree), groups=groups, notes=())
    if dense.scheme is not None:  # else a scheme by default is that of the experts' tree
        block = block.model_copy(update={"scheme": dense.scheme})
    try:
        return replace(resolve_config(block, tree), groups=groups)
    except ValueError as error:
        raise ValueError(
            f"expert_parallel: {error} (experts are sharded over {tree.world_size} of "
            f"{machine.world_size} ranks)"
        ) from None


def _checked(config: dict[str, Any]) -> ZeroTopoConfig:
    block = ZeroTopoConfig.from_ds_config(config)
    assert block is not None
    if problems := deepspeed_problems(config):
        raise ValueError(problems[0])
    return block


def job_of(engine: Any, trains: bool = True) -> Job:
    """Return the job of an engine: its modules, with activation checkpointing, and its settings.

    Every rank has the same model, config and machine, and the rule is a pure function of them, so
    all ranks choose one plan without communication. ``agreement.py`` checks that they did.

    Args:
        engine: DeepSpeed's engine.
        trains: whether there are gradients and optimizer states. True for the reference model of a
            policy too: it uses the policy's plan, so that both round their weights identically.
    """
    return job_of_module(
        engine.module,
        trains=trains,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        micro_batches=engine.gradient_accumulation_steps(),
        itemsize=max((p.element_size() for p in engine.module.parameters()), default=4),
        live=engine.zero_max_live_parameters(),
        bucket=engine.zero_reduce_bucket_size(),
        sub_group=engine.zero_sub_group_size(),
        offload=engine.zero_cpu_offload(),
        loss_scaled=engine.fp16_enabled(),
    )
