# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Translates DeepSpeed's own keys for ZeRO++, LoCo and MiCS to keys of the block.

Stock keys
    Their meaning in DeepSpeed 0.18 and 0.19 (0.19.7 refuses MiCS's keys whatever the value, 0.19.8
    those of LoCo): ``zero_hpz_partition_size`` is the number of ranks that share a 16-bit secondary
    copy. ``zero_quantized_weights`` sends every gather of weights in INT8, that of the secondary
    copy too. ``zero_quantized_gradients`` reduces in INT4 hierarchically, but only on more than one
    node. ``zeropp_loco_param`` feeds the error of that reduction back, and has no effect alone.
    ``mics_shard_size`` is the number of ranks that share one copy of everything; with it, ZeRO++'s
    keys have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from zero_topo.config.deepspeed_parts import ZERO, lookup, part_of, switch
from zero_topo.config.parts import ROOT
from zero_topo.strict import as_json, describe


class StockKeys(BaseModel):
    """DeepSpeed's keys with the types of its own fields, and values without an effect."""

    zero_quantized_weights: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_gradients: bool = False
    zeropp_loco_param: dict[str, Any] | None = None
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False


QUANTIZED_WEIGHTS, HPZ, QUANTIZED_GRADIENTS, LOCO, MICS, MICS_HIERARCHICAL = KEYS = tuple(
    StockKeys.model_fields
)
GONE = (LOCO, MICS, MICS_HIERARCHICAL)
PERSISTENCE = "stage3_param_persistence_threshold"
"""TRL writes it for a reference model under a dotted name at the top level, where DeepSpeed ignores
it.
"""
PLACES = ("scheme", "weights", "secondary", "gradients", "optimizer")
OFFLOADED = (
    "in training zero_topo stores each rank's shard of the weights on the device, and the "
    "plan must fit there"
)
_FETCH = "zero_topo gathers each bucket in one collective of its own, which sends half as much"
IGNORED: Mapping[str, tuple[bool, str]] = {
    "stage3_use_all_reduce_for_fetch_params": (True, _FETCH),
    "use_all_reduce_for_fetch_params": (True, _FETCH),
    "reduce_scatter": (
        False,
        "zero_topo scatters gradients to their shards, which sends half of an all-reduce",
    ),
    "pipeline_loading_checkpoint": (
        True,
        "each rank reads only its own files, and no state changes before all have",
    ),
}
"""Stage-3 settings that zero_topo supersedes -> the value that asks for something else, and why it
has no effect.
"""


@dataclass(frozen=True)
class Translation:
    """Holds a DeepSpeed config whose stock keys have been translated to keys of the block.

    Attributes:
        config: the config without the translated keys; keys that are wrong or contradict the block
            remain.
        lines: one line for each translated key, with its replacement.
        problems: one line for each key that is wrong or contradicts the block.
    """

    config: dict[str, Any]
    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def switched_on(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stock keys set to a value that has an effect, or had one in DeepSpeed 0.18, as
    DeepSpeed reads it.

    Raises:
        ValueError: in one line, for values that DeepSpeed's fields refuse.
    """
    zero = part_of(ds_config, ZERO)
    given = {key: zero[key] for key in KEYS if zero.get(key, "auto") != "auto"}
    try:
        stock = StockKeys.model_validate(given)
    except ValidationError as error:
        raise ValueError(describe(error, f"{ZERO}.")) from None
    works = {
        QUANTIZED_WEIGHTS: stock.zero_quantized_weights,
        HPZ: stock.zero_hpz_partition_size > 1,
        QUANTIZED_GRADIENTS: stock.zero_quantized_gradients,
        LOCO: stock.zeropp_loco_param is not None,
        MICS: stock.mics_shard_size > 0,
        MICS_HIERARCHICAL: stock.mics_hierarchical_params_gather,
    }
    return {key: getattr(stock, key) for key, has_effect in works.items() if has_effect}


def base_block(active: Mapping[str, Any]) -> dict[str, Any]:
    """Return the placement that DeepSpeed's keys imply for a block without one; empty for MiCS,
    itself a scheme.
    """
    if MICS in active:
        return {}
    if active.keys() >= {LOCO, QUANTIZED_GRADIENTS}:
        return {"weights": "node", "gradients": "node", "optimizer": "world"}
    return {
        "scheme": "zero++"
        if active.keys() >= {QUANTIZED_WEIGHTS, HPZ, QUANTIZED_GRADIENTS}
        else "zero3"
    }


def translate(ds_config: Mapping[str, Any], optimizer: bool = False) -> Translation:
    """Translate the stock keys of a config with a block to keys of the block; without a block
    change nothing.

    A key of the block that the user wrote is never replaced: a different value is reported as a
    contradiction.

    Args:
        ds_config: the DeepSpeed config; it is not changed.
        optimizer: whether the caller passes an optimizer; a config may also name one.
    """
    block = ds_config.get(ROOT)
    if not isinstance(block, Mapping):
        return Translation(dict(ds_config))
    try:
        active = switched_on(ds_config)
    except ValueError as error:
        return Translation(dict(ds_config), problems=(str(error),))
    zero = part_of(ds_config, ZERO)
    # The policy gets the number that is meant: with another one the reference would round other
    # parameters.
    meant = ds_config.get(f"{ZERO}.{PERSISTENCE}") if zero.get(PERSISTENCE) == "auto" else None
    config = deepcopy(dict(ds_config))
    lines = []
    problems = []
    if meant is not None:
        config[ZERO][PERSISTENCE] = meant
        lines.append(
            f'{ZERO}.{PERSISTENCE} = "auto" is taken as {meant}, the value of '
            f'"{ZERO}.{PERSISTENCE}"'
        )
    for key, why in _without_effect(ds_config, active, optimizer).items():
        lines.append(f"{ZERO}.{key} = {as_json(config[ZERO].pop(key))} is left out: {why}")
    if {HPZ, LOCO} & active.keys() and not any(block.get(key) is not None for key in PLACES):
        base = base_block(active)
        config[ROOT] |= base
        if base:
            lines.append(
                f'"{ROOT}" names no scheme, and DeepSpeed\'s keys imply {json.dumps(base)}'
            )
    wishes = _wishes(active)
    for key in active:
        written = f"{ZERO}.{key} = {as_json(zero[key])}"
        wish = wishes.get(key, {})
        if contradiction := _contradiction(block, wish, ROOT):
            problems.append(f"{written}: it means {contradiction}; remove one of the two")
            continue
        del config[ZERO][key]
        lines.append(f"{written} {_effect(key, active, wish)}")
        config[ROOT] = _filled(config[ROOT], wish)
    return Translation(config, tuple(lines), tuple(problems))


def _without_effect(
    ds_config: Mapping[str, Any], active: Mapping[str, Any], optimizer: bool
) -> dict[str, str]:
    """Return the keys that have no effect, with the reason."""
    zero = part_of(ds_config, ZERO)
    gone = [key for key in GONE if key in zero and key not in active]
    off = dict.fromkeys(gone, "DeepSpeed 0.19 refuses the key")
    for key, (value, why) in IGNORED.items():
        if switch(zero.get(key)) is value:
            off[key] = why
    device = str(lookup(ds_config, f"{ZERO}.offload_param.device")).lower()
    # Others keep them there, and gather from there
    if device == "cpu" and (optimizer or "optimizer" in ds_config):
        off["offload_param"] = OFFLOADED
    return off


def _wishes(active: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of the block for which each stock key stands; none or empty if the other keys
    disable it.
    """
    if MICS in active:
        return {
            MICS: dict.fromkeys(("weights", "gradients", "optimizer"), int(active[MICS])),
            MICS_HIERARCHICAL: {},
        }
    loco, gradients, weights = (
        each in active for each in (LOCO, QUANTIZED_GRADIENTS, QUANTIZED_WEIGHTS)
    )
    fed_back = {"mode": "quantized"}
    return {
        HPZ: {
            "secondary": int(active.get(HPZ, 0)),
            **({"quantize": {"secondary": "int8"}} if weights else {}),
        },
        QUANTIZED_WEIGHTS: {"quantize": {"weights": "int8"}},
        QUANTIZED_GRADIENTS: {} if loco else {"quantize": {"gradients": "int4"}},
        LOCO: {"gradients": "node", "sync": fed_back} if gradients else {},
    }


def _effect(key: str, active: Mapping[str, Any], wish: Mapping[str, Any]) -> str:
    if wish:
        return f'is taken as "{ROOT}": {json.dumps(wish)}'
    if key == QUANTIZED_GRADIENTS and MICS not in active:
        return f"is taken together with {LOCO}"
    return f"is left out: it does nothing with {' and '.join(active)}"


def _contradiction(block: Mapping[str, Any], wish: Mapping[str, Any], path: str) -> str | None:
    """Return the first key that the block sets to a different value, with both values; missing keys
    do not differ.
    """
    for key, wanted in wish.items():
        theirs = block.get(key, wanted)
        name = f"{path}.{key}"
        if isinstance(theirs, Mapping) and isinstance(wanted, Mapping):
            if found := _contradiction(theirs, wanted, name):
                return found
        elif theirs != wanted:
            return f"{name} = {json.dumps(wanted)}, which is {as_json(theirs)}"
    return None


def _filled(block: Mapping[str, Any], wish: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block with the keys of the wish that it lacks."""
    both = {
        key: _filled(block[key], value)
        for key, value in wish.items()
        if isinstance(value, dict) and key in block
    }
    return {**block, **{key: value for key, value in wish.items() if key not in block}, **both}
