# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The settings of ``sync``, one model for each mode.

To add a mode, write its model below and add the class to :data:`SYNC_MODES`. Nothing else in the config needs to know
it: the ``mode`` key selects the class, and the engine and the cost model dispatch on the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from zero_topo.config.errors import StrictModel

Dtype = Literal["fp32", "bf16", "fp16"]


class SyncMode(StrictModel):
    """What all modes of sync have in common: the name of the mode."""

    MODE: ClassVar[str]


class DenseSync(SyncMode):
    """Every element of the gradient shard is reduced, unquantized."""

    MODE: ClassVar[str] = "dense"

    mode: Literal["dense"] = Field("dense", description="Reduce every element, unquantized.")
    reduce: Literal["reduce_scatter", "all_reduce"] = Field(
        "reduce_scatter",
        description='"reduce_scatter" reduces a gradient shard straight to the optimizer shards; "all_reduce" reduces '
        "it to every rank that holds it, as step 4 of the ZeRO-topo paper does, at twice the bytes.",
    )
    dtype: Dtype | None = Field(
        None, description="Type of the values on the wire; null takes the type the gradients are accumulated in."
    )


SYNC_MODES: tuple[type[SyncMode], ...] = (DenseSync,)


class _OneOfModes:
    """Validates a ``sync`` block with the model its ``mode`` names; a block without ``mode`` is dense."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.tagged_union_schema(
            {cls.MODE: handler.generate_schema(cls) for cls in SYNC_MODES}, discriminator=_mode_of
        )


def _mode_of(value: object) -> str | None:
    if isinstance(value, SyncMode):
        return value.MODE
    return str(value.get("mode", DenseSync.MODE)) if isinstance(value, Mapping) else None


SyncConfig = Annotated[SyncMode, _OneOfModes()]
