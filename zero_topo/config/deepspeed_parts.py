# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads values of DeepSpeed's keys as DeepSpeed's own fields do, and refuses values of a wrong
type.

Truth
    DeepSpeed reads most switches as pydantic does: true, 1, "on" and "yes" are true, false, 0,
    "off" and "no" are false, anything else is refused. The switches of :data:`TRUTHS` are read as
    Python does, where the text "false" is true. A value that means on there and off elsewhere is
    refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zero_topo.strict import as_json

ABSENT = object()
ZERO = "zero_optimization"
_OBJECT = "object"
_NULL = "null"
_AUTO = "auto"
PARTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            ZERO,
            "bfloat16",
            "fp16",
            "optimizer",
            "scheduler",
            "activation_checkpointing",
            "comms_logger",
            "flops_profiler",
            "data_types",
            "checkpoint",
            "pipeline",
            "compile",
            "timers",
            "tensor_parallel",
            "hybrid_engine",
            "torch_autocast",
            "data_efficiency",
        ),
        (_OBJECT,),
    ),
    **dict.fromkeys(("bf16", "aio", "expert_parallel"), (_OBJECT, _NULL)),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), (_OBJECT, _AUTO)),
    **dict.fromkeys(("optimizer.params", "scheduler.params"), (_OBJECT, _NULL)),
}
"""Parts of a config that DeepSpeed reads as JSON objects -> the kinds of values that it accepts
there.
"""
TRUTHS = (
    "prescale_gradients",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "disable_allgather",
    "disable_python_gc",
    "dataloader_drop_last",
    "managed_gradient_accumulation",
    "use_data_before_expert_parallelism",
    "torch_autocast.enabled",
    "data_efficiency.enabled",
    "flops_profiler.enabled",
    "flops_profiler.detailed",
    "checkpoint.load_universal",
    "checkpoint.use_node_local_storage",
    "optimizer.legacy_fusion",
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.profile",
    "activation_checkpointing.synchronize_checkpoint_boundary",
)
"""Switches that DeepSpeed reads without a conversion, so that a text is true."""
NUMBERS = tuple(
    f"optimizer.params.{key}"
    for key in ("lr", "eps", "weight_decay", "momentum", "muon_lr", "adam_lr")
)
WAYS_OUT = {
    ZERO: 'write {"stage": 3}',
    "optimizer": 'write {"type": "AdamW", "params": {"lr": 0.001}}',
}
"""What to write in place of a part that is no object; for other parts the switch is shown, or it is
removed.
"""

_FLAG: TypeAdapter[bool] = TypeAdapter(bool)


def lookup(ds_config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a key of a part, such as ``"bf16.enabled"``; :data:`ABSENT` for "auto"
    too.
    """
    value: Any = ds_config
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return ABSENT
        value = value[key]
    return ABSENT if isinstance(value, str) and value == "auto" else value


def part_of(ds_config: Mapping[str, Any], dotted: str) -> Mapping[str, Any]:
    """Return a part of a config; an empty one if it is absent, "auto" or no JSON object."""
    found = lookup(ds_config, dotted)
    return found if isinstance(found, Mapping) else {}


def switch(value: Any) -> bool | None:
    """Return whether DeepSpeed's fields take a value as true or as false; None if they refuse
    it.
    """
    try:
        return _FLAG.validate_python(value)
    except ValidationError:
        return None


def on(value: Any) -> bool:
    """Return whether DeepSpeed's fields take a value as true."""
    return switch(value) is True


def off(value: Any) -> bool:
    """Return whether DeepSpeed's fields take a value as false."""
    return switch(value) is False


def half_precision(ds_config: Mapping[str, Any]) -> bool:
    """Return whether training is in 16 bits."""
    return any(on(lookup(ds_config, f"{part}.enabled")) for part in ("bf16", "bfloat16", "fp16"))


def wrong_values(ds_config: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each part of a wrong type, and each switch or number of one that means
    another value.

    The keys are dotted names, such as ``"optimizer.params"``.
    """
    reasons = {
        **dict(_no_objects(ds_config)),
        **dict(_no_names(ds_config)),
        **dict(_no_values(ds_config)),
    }
    lines = {}
    for name, reason in reasons.items():
        parent, _, key = name.rpartition(".")
        holder = _holder(ds_config, parent)
        written = f" = {as_json(holder[key])}:" if key in holder else " is missing:"
        lines[name] = f"{name}{written} {reason}"
    return lines


def _holder(ds_config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    return part_of(ds_config, part) if part else ds_config


def _no_objects(ds_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for part, kinds in PARTS.items():
        parent, _, key = part.rpartition(".")
        holder = _holder(ds_config, parent)
        if key in holder and _kind(holder[key]) not in kinds:
            way_out = WAYS_OUT.get(part, "write an object with its keys, or remove it")
            yield part, f"DeepSpeed reads a JSON object there; {way_out}"


def _no_names(ds_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for part in ("optimizer", "scheduler"):
        found = part_of(ds_config, part)
        if "type" in found and not isinstance(found["type"], str):
            yield f"{part}.type", "it names a class; give a name in quotes"
        elif "params" in found and "type" not in found:
            yield f"{part}.type", f"DeepSpeed would build no {part}, and ignore its params; add it"


def _no_values(ds_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in TRUTHS:
        value = lookup(ds_config, name)
        if value is not ABSENT and value not in (True, False, None):
            yield name, "DeepSpeed would take it as true, whatever it says; write true or false"
    for name in NUMBERS:
        value = lookup(ds_config, name)
        if value is not ABSENT and not _is_number(value):
            yield name, "DeepSpeed computes with it; give a number, without quotes"
    betas = lookup(ds_config, "optimizer.params.betas")
    if betas is not ABSENT and not _is_pair(betas):
        yield "optimizer.params.betas", "it is a pair; give two numbers, such as [0.9, 0.95]"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return _OBJECT
    if value is None:
        return _NULL
    return _AUTO if isinstance(value, str) and value == "auto" else type(value).__name__


def _is_number(value: Any) -> bool:
    """Return whether a value may be a number: a config written in Python may hold those of other
    libraries.
    """
    return value is not None and not isinstance(value, str | bool | list | tuple | Mapping)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))
