# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the ``"zero_topo"`` block of a DeepSpeed JSON config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, ValidationError, model_validator

from zero_topo.config.modes import SyncConfig
from zero_topo.config.parts import (
    ROOT,
    DegreeSetting,
    QuantizeConfig,
    SecondarySetting,
)
from zero_topo.config.removed import reject_removed
from zero_topo.config.stock_keys import translate
from zero_topo.config.sync_config import DenseSync, Dtype
from zero_topo.strict import StrictModel, as_json, describe

SchemeSetting = Literal["zero3", "zero++", "hsdp", "paper", "topo", "topo-zero2", "auto"]
NEEDED_WITHOUT_SCHEME = ("weights", "gradients", "optimizer")
AUTO = "auto"


def _check_topology(value: Any) -> Any:
    if isinstance(value, Mapping) or (isinstance(value, str) and value):
        return value
    raise ValueError(
        'must be "auto", a preset\'s name, a path to a .json file or an object, got '
        f"{as_json(value)}"
    )


class ZeroTopoConfig(StrictModel):
    """Over which ranks ZeRO-3's weights, gradients and optimizer states are sharded, and what is
    quantized.
    """

    topology: Annotated[str | dict[str, Any], BeforeValidator(_check_topology)] = Field(
        "auto",
        description='The machine: "auto" is found by the ranks as training starts; else a '
        "preset's name, a path to a .json file, or the description itself, such as "
        '{"emulated": {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}}.',
    )
    scheme: SchemeSetting | None = Field(
        None,
        description='Named set of defaults that the keys below override. "auto" shards, when '
        "training starts, weights over as few ranks as fits into memory, then gradients over as "
        "few as fits, optimizer states over all; the keys below are kept. Without a scheme and "
        'degrees it is "topo" where a GPU has several ranks, else "auto".',
    )
    weights: DegreeSetting = Field(
        None, description="Ranks that share one copy of the weights: a domain or a degree."
    )
    secondary: SecondarySetting = Field(
        None,
        description="Ranks that share one secondary copy of the weights, from which the backward "
        "pass gathers; null "
        'or "none" keeps no copy and gathers the weights again.',
    )
    gradients: DegreeSetting = Field(
        None, description="Ranks that share one gradient buffer; a multiple of weights."
    )
    optimizer: DegreeSetting = Field(
        None,
        description="Ranks that share one copy of the optimizer states; a multiple of gradients.",
    )
    quantize: QuantizeConfig = Field(
        QuantizeConfig(),
        description="What is quantized before it is sent or stored; keys left out keep the "
        "scheme's.",
    )
    sync: SyncConfig = Field(
        DenseSync(),
        description="How gradient shards are reduced across gradient domains, once per optimizer "
        "step; keys left out keep the scheme's.",
    )
    accumulation_dtype: Dtype | None = Field(
        None,
        description="Type of the gradient buffer; null takes DeepSpeed's "
        "data_types.grad_accum_dtype, which is the "
        "model's own type unless set. fp32 doubles its memory in 16-bit training.",
    )
    report: str | None = Field(
        None,
        min_length=1,
        description="Folder into which rank 0 writes the run's log and, at its end, tables, plots "
        "and an HTML page.",
    )
    debug_checks: StrictBool = Field(
        False,
        description="After each step check that all holders of a weight shard agree bit for bit.",
    )
    overlap: StrictBool = Field(
        True,
        description="Sync under the last backward pass and publish under the next forward pass; "
        "same bits without it.",
    )

    @model_validator(mode="after")
    def _all_degrees_or_a_scheme(self) -> ZeroTopoConfig:
        given = [
            role
            for role in (*NEEDED_WITHOUT_SCHEME, "secondary")
            if getattr(self, role) is not None
        ]
        missing = [role for role in NEEDED_WITHOUT_SCHEME if role not in given]
        if self.scheme is None and given and missing:
            raise ValueError(
                f"{ROOT}: {', '.join(given)} given without a scheme, and {', '.join(missing)} "
                "missing; "
                "give weights, gradients and optimizer, or name a scheme whose other degrees you "
                'keep, such as "topo"'
            )
        return self

    @classmethod
    def parse(cls, block: Mapping[str, Any]) -> ZeroTopoConfig:
        """Parse a ``zero_topo`` block.

        Raises:
            ValueError: in one line, naming the key, the value, and the nearest known key or the
                allowed values.
        """
        reject_removed(block, ROOT)
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            raise ValueError(describe(error, f"{ROOT}.")) from None

    @classmethod
    def from_ds_config(cls, ds_config: Mapping[str, Any]) -> ZeroTopoConfig | None:
        """Parse a DeepSpeed config's ``zero_topo`` block and stock keys; return None if there is no
        such block.

        Raises:
            ValueError: raised by :meth:`parse`.
        """
        if ROOT not in ds_config:
            return None
        config = cls.parse(translate(ds_config).config[ROOT])
        if config.quantize.publish is not None:
            raise ValueError(
                f'{ROOT}.quantize.publish = "int4": is of FSDP2; leave it out, as INT8 weights '
                '("resident": "int8") send only what changed'
            )
        return config
