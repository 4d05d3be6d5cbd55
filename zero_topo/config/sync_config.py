# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The settings of ``sync``, one model for each mode.

To add a mode, write its model below and add the class to :data:`SYNC_MODES`. Nothing else in the config needs to know
it: the ``mode`` key selects the class, and the engine and the cost model dispatch on the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from zero_topo.config.sparse_config import (
    GaussianKSync,
    GTopkSync,
    OkTopkSync,
    RadiusSync,
    ScapeSync,
    SparseSync,
    TopkASync,
    TopkDsaSync,
)
from zero_topo.config.sync_settings import BlockSize, Dtype, SyncSettings
from zero_topo.config.tagc_config import TagcSync
from zero_topo.config.ternary_config import TernarySync
from zero_topo.quant.spec import BlockSpec


class DenseSync(SyncSettings):
    """Every element of the gradient shard is reduced, unquantized."""

    mode: Literal["dense"] = Field("dense", description="Reduce every element, unquantized.")
    reduce: Literal["reduce_scatter", "all_reduce"] = Field(
        "reduce_scatter",
        description='"reduce_scatter" reduces a gradient shard straight to the optimizer shards; "all_reduce" reduces '
        "it to every rank that holds it, as step 4 of the ZeRO-topo paper does, at twice the bytes.",
    )
    dtype: Dtype | None = Field(
        None, description="Type of the values on the wire; null takes the type the gradients are accumulated in."
    )


class QuantizedSync(SyncSettings):
    """Every element is reduced straight to the optimizer shard, block-quantized, with the error fed back."""

    mode: Literal["quantized"] = Field("quantized", description="Block-quantize what crosses between gradient domains.")
    bits: Literal[8, 4] = Field(4, description="Bits per value on the wire, next to one FP32 scale per block.")
    block_size: BlockSize = Field(
        256, description="Elements that share one scale; no block holds values of two parameters."
    )
    error_feedback: bool = Field(
        True,
        strict=True,
        description="Keep what quantization took away and add it at the next step. It stays in the gradient shard, "
        "rounded to its type, and costs nothing; in FP16, which may skip steps, 4 bytes for each gradient element a "
        "rank sends.",
    )

    @property
    def spec(self) -> BlockSpec:
        """The wire format."""
        return BlockSpec(self.bits, self.block_size)


SPARSE_MODES: tuple[type[SparseSync], ...] = (
    TopkASync,
    TopkDsaSync,
    GTopkSync,
    GaussianKSync,
    OkTopkSync,
    RadiusSync,
    ScapeSync,
    TagcSync,
    TernarySync,
)
AGED_REFUSED = (
    'it divides what comes by the steps it waited for, and here nothing waits; set it to "AdamW", or sync.mode to a '
    "sparse one with error_feedback"
)
"""Why AgedAdamW does not work with a mode that keeps no residual, and the way out."""
SYNC_MODES: tuple[type[SyncSettings], ...] = (DenseSync, QuantizedSync, *SPARSE_MODES)


class _OneOfModes:
    """Validates a ``sync`` block with the model its ``mode`` names; a block without ``mode`` is dense."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.tagged_union_schema(
            {cls.MODE: handler.generate_schema(cls) for cls in SYNC_MODES}, discriminator=_mode_of
        )


def _mode_of(value: object) -> str | None:
    if isinstance(value, SyncSettings):
        return value.MODE
    return str(value.get("mode", DenseSync.MODE)) if isinstance(value, Mapping) else None


SyncConfig = Annotated[SyncSettings, _OneOfModes()]
