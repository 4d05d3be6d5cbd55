# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Lists the DeepSpeed names that zero_topo uses, and checks that the installed release has them.

With ``install.py``, ``optimizer.py`` and ``inference.py``, which override these names, and
``start.py``, this is the seam: the only code that uses DeepSpeed's private names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from types import MappingProxyType, ModuleType
from typing import Any

import deepspeed
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401  (subclasses the stage-3 class: first)
from deepspeed.runtime.zero import stage3 as ds_stage3
from deepspeed.runtime.zero.partition_parameters import Init

from zero_topo.versions import SUPPORTED, release

Stock = ds_stage3.DeepSpeedZeroOptimizer_Stage3

SINCE: Mapping[str, str] = MappingProxyType(
    {
        "_backward_active_depth": "0.18.3",
        "backward_prologue": "0.18.3",
        "use_muon": "0.18.9",
        "is_gradient_accumulation_boundary()": "0.19.5",
        "_apply_muon_to_accumulated_grads": "0.19.8",
        "sub_groups_lacking_loss_scale": "0.19.8",
    }
)
"""All differences between the supported releases: a later addition to :data:`Stock` -> the first
release with it.

``name()`` is an attribute before that release, and a method from then on.
"""

MANGLED = "_DeepSpeedZeroOptimizer_Stage3"
MODEL_FILES = "_get_all_ckpt_names"
RECOVERY_SCRIPT = "_copy_recovery_script"
REQUIRED: tuple[tuple[type | ModuleType, str], ...] = (
    (DeepSpeedEngine, "_configure_zero_optimizer(self, optimizer)"),
    (DeepSpeedEngine, "_configure_distributed_model(self, model)"),
    (DeepSpeedEngine, "_configure_basic_optimizer(self, model_parameters)"),
    (DeepSpeedEngine, "_scheduler_from_config(self, optimizer)"),
    (DeepSpeedEngine, "_do_optimizer_sanity_check(self, basic_optimizer)"),
    (DeepSpeedEngine, "load_module_state_dict"),
    (DeepSpeedEngine, "_get_param_fragment_func(self, param)"),
    (
        DeepSpeedEngine,
        "load_checkpoint(self, load_dir, tag, load_module_strict, load_optimizer_states, "
        "load_lr_scheduler_states, load_module_only, custom_load_fn)",
    ),
    (ds_engine, "DeepSpeedZeRoOffload"),
    (ds_engine, "get_fp32_state_dict_from_zero_checkpoint"),
    (
        DeepSpeedEngine,
        "save_checkpoint(self, save_dir, tag, client_state, save_latest, "
        "exclude_frozen_parameters)",
    ),
    (DeepSpeedEngine, f"{MODEL_FILES}(self, checkpoints_path, tag)"),
    (DeepSpeedEngine, f"{RECOVERY_SCRIPT}(self, save_path)"),
    (CheckpointEngine, "makedirs(self, path, exist_ok)"),
    (CheckpointEngine, "save(self, state_dict, path)"),
    (CheckpointEngine, "commit(self, info)"),
    (Init, "_convert_to_deepspeed_param(self, param)"),
    (Stock, "load_state_dict"),
    (Stock, "offload_states(self, include, device, pin_memory, non_blocking)"),
    (Stock, "reload_states(self, non_blocking)"),
    (Stock, "checkpoint_event_prologue(self)"),
    (Stock, "empty_partition_cache(self)"),
    (Stock, "_set_fp16_partitioned_groups_flat(self)"),
    (Stock, "_setup_for_real_optimizer(self)"),
    (Stock, "set_grad_positions(self)"),
    (Stock, "get_fp32_grad_partitions(self)"),
    (Stock, "destroy(self)"),
    (Stock, "_rigid_state_dict(self)"),
    (Stock, "_restore_from_bit16_weights(self)"),
    (Stock, "_create_fp16_partitions_with_defragmentation(self, fp16_param_groups)"),
    (Stock, f"{MANGLED}__avg_scatter_grads(self, params_to_reduce, communication_data_type)"),
    (Stock, "partition_grads(self, params_to_release, grad_partitions)"),
    (Stock, "_constant_buffered_norm2(self, input, buffer_size)"),
    (Stock, "_unflatten_partitioned_parameters(self, sub_group_id)"),
    (Stock, "_optimizer_step(self, sub_group_id)"),
    (Stock, "_prepare_fp32_grad_for_sub_group(self, sub_group_id)"),
    (Stock, "_reassign_or_swap_out_partitioned_parameters(self, sub_group_id)"),
    (Stock, "step(self, closure)"),
    (Stock, "zero_grad(self, set_to_none)"),
    (Stock, "_get_norm_groups(self)"),
    (Stock, "get_grad_norm_direct(self, gradients, params, norm_type)"),
    (Stock, "independent_gradient_partition_epilogue(self)"),
    (Stock, "_get_fp32_grad_state_partition(self, param, release_swap_buffers)"),
    (Stock, "_fp32_state_allgather(self, param, fp32_state_partition)"),
    (Stock, "update_fp32_grad_for_param_vectorized(self, update_func, param_list)"),
    (Stock, "set_fp32_grad_for_param(self, value, param)"),
    (Stock, "set_full_hp_param(self, value, param, optim_state_key)"),
    (Stock, "set_local_hp_param(self, value, param, optim_state_key)"),
    (Stock, "get_param_id(self, param)"),
    (Stock, "reduce_independent_p_g_buckets_and_remove_grads(self, param)"),
)
"""Every DeepSpeed name used; a function that is called or overridden with its parameters."""
ATTRIBUTES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        DeepSpeedEngine,
        (
            "_config",
            "seq_data_parallel_group",
            "expert_data_parallel_group",
            "checkpoint_engine",
            "param_names",
            "mp_world_size",
            "mpu",
        ),
    ),
    (deepspeed.DeepSpeedConfig, ("_param_dict", "zero_config")),
    (
        Stock,
        (
            f"{MANGLED}__param_id_to_grad_partition",
            "grad_partitions_flat_buffer",
            "grad_position",
            "fp16_groups",
            "fp16_partitioned_groups_flat",
            "fp16_partitioned_groups_flat_numel",
            "lp_param_buffer",
            "fp32_partitioned_groups_flat",
            "averaged_gradients",
            "inf_or_nan_tracker",
            "norm_for_param_grads",
            "optimizer",
            "offload_optimizer",
            "param_names",
            "reduce_bucket_size",
            "loss_scale",
            "ipg_buckets",
            "persistent_parameters",
            "reduce_and_partition_stream",
            "offload_optimizer_pin_memory",
            "communication_data_type",
            "gradient_accumulation_dtype",
            "overflow",
            "module",
            "sub_group_to_group_id",
            "is_gradient_accumulation_boundary",
            "offloaded_states",
            "reduce_scatter",
            "torch_autocast_gradscaler",
            "backward",
            "model_parallel_group",
        ),
    ),
    (ds_stage3.IPGBucketZ3, ("params", "elements")),
)
"""Attributes of instances that are used: some method of the class must name them."""


def deepspeed_json(engine: Any) -> dict[str, Any]:
    """Return the DeepSpeed JSON of an engine."""
    return dict(engine._config._param_dict)


def has(name: str) -> bool:
    """Return whether the installed release has an entry of :data:`SINCE`."""
    return release(deepspeed.__version__) >= release(SINCE[name])


def wrapping(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for functions of DeepSpeed: ``call`` gets the decorated function, then its
    arguments.
    """

    @wraps(call)
    def decorate(stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(stock, *args, **kwargs)

        return wrapper

    return decorate


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Bind a name of DeepSpeed to another value within the context."""
    stock = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def at_boundary(optimizer: Any) -> bool:
    """Return whether the current micro-batch is the last of its step."""
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if has("is_gradient_accumulation_boundary()") else boundary)


def forget_backward(optimizer: Any) -> None:
    """Reset DeepSpeed's count of active backward passes, where it has one, after a pass that failed
    half-way.
    """
    if has("_backward_active_depth"):
        optimizer._backward_active_depth = 0


def empty_bucket(bucket: Any) -> None:
    """Drop the parameters of a bucket and keep its buffer, like ``clear_params``, which early
    releases lack.
    """
    bucket.params.clear()
    bucket.elements = 0
    bucket.process_group = None


def check_deepspeed() -> None:
    """Compare the installed DeepSpeed with :data:`REQUIRED`, :data:`ATTRIBUTES` and :data:`SINCE`.

    Raises:
        ImportError: naming everything that is missing or changed, and the version to install.
    """
    if problems := list(_differences()):
        known = SUPPORTED["deepspeed"]
        raise ImportError(
            f"zero_topo is built for DeepSpeed {known.oldest} to {known.newest}, but this "
            f"DeepSpeed {deepspeed.__version__} differs where it matters: {'; '.join(problems)}. "
            f"Install deepspeed=={known.pinned}, or a zero_topo for your version"
        )


def _differences() -> Iterator[str]:
    """Yield one phrase for each name that is missing, has other parameters, or came with another
    release.
    """
    for owner, required in REQUIRED:
        name, takes, expected = required.rstrip(")").partition("(")
        found = getattr(owner, name, None)
        if found is None:
            yield f"{owner.__name__}.{name} is gone"
        elif takes and (actual := ", ".join(_parameters(found))) != expected:
            yield f"{owner.__name__}.{name}({actual}) was expected as ({expected})"
    for owner, names in ATTRIBUTES:
        # Set in methods, so no instance is needed.
        there = attributes(owner)
        yield from (f"{owner.__name__}.{name} is gone" for name in names if name not in there)
    there = attributes(Stock)
    for name, since in SINCE.items():
        plain = name.removesuffix("()")
        exists = callable(getattr(Stock, plain, None)) if name != plain else plain in there
        if exists != has(name):
            yield (
                f"{Stock.__name__}.{name} is {'there' if exists else 'gone'}, which came with "
                f"{since}"
            )


def attributes(owner: type) -> set[str]:
    """Return the attributes of a class, and all names in its methods: some attributes exist only on
    instances.
    """
    package = owner.__module__.partition(".")[0]
    bases = [base for base in owner.__mro__ if base.__module__.partition(".")[0] == package]
    methods = [f for base in bases for f in vars(base).values() if inspect.isfunction(f)]
    return {
        *dir(owner),
        *(name for method in methods for f in _layers(method) for name in f.__code__.co_names),
    }


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return a function's parameter names, also through DeepSpeed's tracing decorator
    (``*args, **kwargs``).
    """
    # The innermost layer that names its parameters is the function itself.
    every = [tuple(inspect.signature(layer).parameters) for layer in _layers(function)]
    return next((names for names in every if names != ("args", "kwargs")), every[-1])


def _layers(function: Any) -> list[Any]:
    """Return a function and all functions in its closures, each once: a closure may contain
    itself.
    """
    found = [function]
    # The list grows while it is walked, until no closure adds a function.
    for layer in found:
        for cell in getattr(layer, "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                if inspect.isfunction(cell.cell_contents) and cell.cell_contents not in found:
                    found.append(cell.cell_contents)
    return found


class Builder:
    """Runs the code of DeepSpeed's engine that builds an optimizer and a schedule from a config,
    without an engine.

    Args:
        config: DeepSpeed's parsed config.
    """

    client_optimizer = None
    global_rank = None
    has_moe_layers = False
    zenflow = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        # Methods of the engine, bound to this object, which has only what they read.
        return inspect.getattr_static(DeepSpeedEngine, name).__get__(self, DeepSpeedEngine)

    def optimizer(self, parameters: list[Any]) -> Any:
        """Return the config's optimizer for some parameters, checked as the engine checks it."""
        built = self._configure_basic_optimizer(parameters)
        self._do_optimizer_sanity_check(built)
        return built

    def scheduler(self, optimizer: Any) -> Any:
        """Return the config's schedule for an optimizer, or None."""
        return self._scheduler_from_config(optimizer)
