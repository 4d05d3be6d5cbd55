# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the small blocks of the config: degrees and ``quantize``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from zero_topo.quant.spec import BlockSpec
from zero_topo.strict import StrictModel, as_json, did_you_mean

ROOT = "zero_topo"
"""The key of the block in a DeepSpeed config."""
Domain = Literal["rank", "gpu", "node", "world"]
GradientBits = Literal["int8", "int4", "nf4"]


def _check_degree(value: Any) -> Any:
    if value is None or value in get_args(Domain) or (type(value) is int and value >= 1):
        return value
    names = ", ".join(f"'{name}'" for name in get_args(Domain))
    hint = did_you_mean(value, get_args(Domain), cutoff=0.5)
    raise ValueError(
        f"{as_json(value)} is neither a domain nor a degree{hint} (one of {names}, or an integer "
        ">= 1)"
    )


_DegreeValue = Domain | Annotated[int, Field(ge=1)] | None
DegreeSetting = Annotated[_DegreeValue, BeforeValidator(_check_degree)]
SecondarySetting = Annotated[
    DegreeSetting,
    BeforeValidator(
        lambda value: None if value == "none" else value,
        json_schema_input_type=_DegreeValue | Literal["none"],
    ),
]


class QuantizeConfig(StrictModel):
    """What is quantized, in blocks of elements that share one scale."""

    weights: Literal["int8"] | None = Field(
        None, description="Weights in the gather before a forward; null sends them as stored."
    )
    secondary: Literal["int8"] | None = Field(
        None,
        description="The secondary copy, as stored and as gathered before a backward; null keeps "
        "16 bits.",
    )
    gradients: GradientBits | None = Field(
        None,
        description='Gradients in the scatter; null sends them unquantized. "nf4" has 4 bits in a '
        "codebook and blocks "
        'of 64 with scales of one byte: about half of the squared error of "int4" in blocks of '
        "256, or less, at the "
        "same bytes.",
    )
    resident: Literal["int8"] | None = Field(
        None,
        description="Store the weight shard only as INT8. These weights are gathered as they are "
        "and updated from the FP32 masters; the all-gather after a step sends their changes. Null "
        "keeps the model's type.",
    )
    publish: Literal["int4"] | None = Field(
        None,
        description="With FSDP2: the all-gather after a step sends the quantized differences "
        "between the new weights and those that all ranks store. The FP32 masters keep the "
        "rounding error, which is part of the next difference. Null sends the weights.",
    )

    def spec(self, role: str) -> BlockSpec | None:
        """Return the format of a quantization key; None if it quantizes nothing."""
        name = getattr(self, role)
        return None if name is None else BlockSpec.named(name)
