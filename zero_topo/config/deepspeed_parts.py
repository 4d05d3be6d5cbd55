# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads values of DeepSpeed's keys as DeepSpeed's own fields do.

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
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
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
    "optimizer.params.adam_w_mode",
    "optimizer.params.bias_correction",
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.profile",
    "activation_checkpointing.synchronize_checkpoint_boundary",
)
"""Switches that DeepSpeed reads without a conversion, so that a text is true."""
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


def misread(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that DeepSpeed would take for another, without an error."""
    for name in TRUTHS:
        value = lookup(ds_config, name)
        if value is not ABSENT and value not in (True, False, None):
            yield (
                f"{name} = {as_json(value)}: DeepSpeed would take it as true, whatever it says; "
                "write true or false"
            )
    for name in BATCHES:
        value = lookup(ds_config, name)
        if isinstance(value, float) and not value.is_integer():
            yield f"{name} = {value}: it counts sequences or passes; give a whole number"
    for part in ("optimizer", "scheduler"):
        found = part_of(ds_config, part)
        if "params" in found and "type" not in found:
            yield (
                f"{part}.type is missing: DeepSpeed would build no {part}, and ignore its params; "
                "add it"
            )
