# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed 0.19.8 itself refuses in a config, told before a job waits for it and without importing it.

``"auto"`` counts as absent: Hugging Face puts a value in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from zero_topo.config.errors import ROOT, describe
from zero_topo.config.stock_keys import ZERO, translate
from zero_topo.strict import StrictModel, as_json

REMOVED = (
    "sparse_gradients",
    "sparse_attention",
    "elasticity",
    "amp",
    "compression_training",
    "curriculum_learning",
    "quantize_training",
    "eigenvalue",
    "progressive_layer_drop",
    "graph_harvesting",
    "nebula",
)
"""Keys that DeepSpeed refuses whatever their value."""

BATCH, MICRO_BATCH, ACCUMULATION = BATCHES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def _model(name: str, **kinds: tuple[Any, str]) -> type[StrictModel]:
    """A block whose keys are listed by kind."""
    fields: dict[str, Any] = {key: (kind, None) for kind, keys in kinds.values() for key in keys.split()}
    return create_model(name, __base__=StrictModel, **fields)


_SIZE, _SHARE = Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0, le=1)]
_STAGE_3_FLAGS = "gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params allgather_sequential"
_STAGE_3_SIZES = "prefetch_bucket_size param_persistence_threshold max_live_parameters max_reuse_distance"
_OFFLOAD: dict[str, Any] = {
    "devices": (Literal["none", "cpu", "nvme"], "device"),
    "paths": (str | None, "nvme_path"),
}
_PARAM = _model(
    "offload_param",
    **_OFFLOAD,
    sizes=(_SIZE, "buffer_count buffer_size max_in_cpu"),
    flags=(bool, "pin_memory"),
)
_OPTIMIZER = _model(
    "offload_optimizer",
    **_OFFLOAD,
    sizes=(_SIZE, "buffer_count"),
    flags=(bool, "pin_memory pipeline_read pipeline_write fast_init super_offload"),
    shares=(_SHARE, "ratio cpuadam_cores_perc"),
)
BLOCKS: Mapping[str, type[StrictModel]] = {
    ZERO: _model(
        ZERO,
        flags=(
            bool,
            "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
            "compute_grad_norm load_from_fp32_weights elastic_checkpoint ignore_unused_parameters legacy_stage1 "
            "round_robin_gradients parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights "
            "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
            "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory "
            "stage3_gather_fp16_weights_on_model_save "
            f"{_STAGE_3_FLAGS} stage3_{_STAGE_3_FLAGS.replace(' ', ' stage3_')}",
        ),
        choices=(bool | None, "overlap_comm cpu_offload_param cpu_offload_use_pin_memory cpu_offload"),
        positives=(Annotated[int, Field(gt=0)], "reduce_bucket_size"),
        sizes=(
            _SIZE,
            "allgather_bucket_size sub_group_size zero_hpz_partition_size model_persistence_threshold "
            "stage3_model_persistence_threshold "
            f"{_STAGE_3_SIZES} stage3_{_STAGE_3_SIZES.replace(' ', ' stage3_')}",
        ),
        whole=(int, "module_granularity_threshold stage3_module_granularity_threshold"),
        others=(Any, "stage zenflow leaf_module"),
        parameters=(_PARAM | None, "offload_param"),
        optimizers=(_OPTIMIZER | None, "offload_optimizer"),
    ),
    "fp16": _model(
        "fp16",
        flags=(bool, "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads"),
        scales=(float, "loss_scale"),
        whole=(int, "initial_scale_power loss_scale_window hysteresis min_loss_scale"),
    ),
    "bf16": _model(
        "bf16",
        flags=(
            bool,
            "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
        ),
    ),
}
"""The blocks whose keys DeepSpeed checks, with the kinds of values that it takes."""


def deepspeed_refusals(ds_config: Mapping[str, Any], ranks: int | None) -> list[str]:
    """One line for each setting with which DeepSpeed would not start.

    Args:
        ds_config: the whole config.
        ranks: of the job, or None if they are not known.
    """
    return [*setting_refusals(ds_config), *_two_precisions(ds_config), *_batches(ds_config, ranks)]


def setting_refusals(ds_config: Mapping[str, Any]) -> list[str]:
    """One line for each key, or value of a key, that DeepSpeed does not take and the block does not take over."""
    ds_config = translate(ds_config).config
    lines = [
        f"{key} = {as_json(ds_config[key])}: DeepSpeed 0.19.8 has it no more and refuses the key; remove it"
        for key in REMOVED
        if key in ds_config
    ]
    for name in BLOCKS:
        try:
            _block(ds_config, name)
        except ValidationError as error:
            lines.append(f"DeepSpeed would refuse {describe(error, name)}")
    return lines


def _block(ds_config: Mapping[str, Any], name: str) -> Any:
    """A block as DeepSpeed reads it; of a ``zero_optimization`` that is no object zero_topo complains itself."""
    block = ds_config.get(name, {})
    absent = (name == "bf16" and block is None) or (name == ZERO and not isinstance(block, Mapping))
    return BLOCKS[name].model_validate({} if absent else _without_auto(block))


def _without_auto(block: Any) -> Any:
    if not isinstance(block, Mapping):
        return block
    return {key: _without_auto(value) for key, value in block.items() if value != "auto" and key != ROOT}


def _two_precisions(ds_config: Mapping[str, Any]) -> Iterator[str]:
    try:
        both = all(_block(ds_config, name).enabled for name in ("fp16", "bf16"))
    except ValidationError:
        return
    if both:
        yield "fp16.enabled = true and bf16.enabled = true: DeepSpeed trains in one of the two; set the other to false"


def _batches(ds_config: Mapping[str, Any], ranks: int | None) -> Iterator[str]:
    stated = {key: ds_config[key] for key in BATCHES if ds_config.get(key) is not None}
    wrong = [key for key, value in stated.items() if value != "auto" and not _is_count(value)]
    for key in wrong:
        yield f"{key} = {as_json(stated[key])}: it counts sequences or passes; give a whole number of at least 1"
    if wrong or "auto" in stated.values():
        return
    if BATCH not in stated:
        if MICRO_BATCH not in stated:
            yield f"{MICRO_BATCH} is missing, and {BATCH} too: DeepSpeed needs one; give the former"
        return
    per_step = int(stated.get(MICRO_BATCH, 1) * stated.get(ACCUMULATION, 1)) * (ranks or 1)
    whole = stated[BATCH] == per_step if len(stated) == len(BATCHES) and ranks else stated[BATCH] % per_step == 0
    if not whole:
        factors = [f"{key} {stated[key]}" for key in (MICRO_BATCH, ACCUMULATION) if key in stated]
        product = " x ".join([*factors, *([f"{ranks} ranks"] if ranks else [])])
        yield f"{BATCH} = {stated[BATCH]} is no multiple of {per_step:,}, which is {product}; leave {BATCH} out"


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value % 1 == 0
