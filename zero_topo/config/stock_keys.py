# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Translates DeepSpeed's own keys for ZeRO++, LoCo and MiCS to keys of the block.

Note [Stock keys]
    Their meaning in DeepSpeed 0.18 and 0.19 (0.19.7 refuses MiCS's keys whatever the value, 0.19.8 those of LoCo):
    ``zero_hpz_partition_size`` is the number of ranks that share a 16-bit secondary copy. ``zero_quantized_weights``
    sends every gather of weights in INT8, that of the secondary copy too. ``zero_quantized_gradients`` reduces in INT4
    hierarchically, but only on more than one node. ``zeropp_loco_param`` feeds the error of that reduction back, and
    has no effect alone. ``mics_shard_size`` is the number of ranks that share one copy of everything; with it, ZeRO++'s
    keys have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from zero_topo.config.parts import ROOT
from zero_topo.strict import as_json

ZERO = "zero_optimization"
QUANTIZED_WEIGHTS, HPZ, QUANTIZED_GRADIENTS, LOCO, MICS, MICS_HOPS = KEYS = (
    "zero_quantized_weights",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zeropp_loco_param",
    "mics_shard_size",
    "mics_hierarchical_params_gather",
)
ABSENT = object()
GONE = (LOCO, MICS, MICS_HOPS)
PERSISTENCE = "stage3_param_persistence_threshold"
"""TRL writes it for a reference model under a dotted name at the top level, where DeepSpeed ignores it."""
PLACES = ("scheme", "weights", "secondary", "gradients", "optimizer")
OFFLOADED = "in training zero_topo stores each rank's shard of the weights on the device, and the plan must fit there"
ALL_REDUCED_FETCH = "zero_topo gathers each bucket in one collective of its own, which sends half as much"


@dataclass(frozen=True)
class Translation:
    """Holds a DeepSpeed config whose stock keys have been translated to keys of the block.

    Attributes:
        config: the config without the translated keys; keys that contradict the block remain.
        lines: one line for each translated key, with its replacement.
        problems: one line for each key that contradicts the block.
    """

    config: dict[str, Any]
    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def on(value: Any) -> bool:
    """Return whether DeepSpeed treats a value as true."""
    return value.lower() in ("1", "true", "yes", "on") if isinstance(value, str) else bool(value)


def lookup(ds_config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a key of a block, such as ``"bf16.enabled"``; :data:`ABSENT` for "auto" too."""
    value: Any = ds_config
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return ABSENT
        value = value[key]
    return ABSENT if isinstance(value, str) and value == "auto" else value


def switched_on(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stock keys set to a value that has an effect, or had one in DeepSpeed 0.18."""
    zero = _zero(ds_config)
    given = {key: zero[key] for key in KEYS if key in zero}
    effective = {
        QUANTIZED_WEIGHTS: on(given.get(QUANTIZED_WEIGHTS)),
        HPZ: _ranks(given.get(HPZ), least=2),
        QUANTIZED_GRADIENTS: on(given.get(QUANTIZED_GRADIENTS)),
        LOCO: given.get(LOCO) is not None,
        MICS: _ranks(given.get(MICS), least=1),
        MICS_HOPS: on(given.get(MICS_HOPS)),
    }
    return {key: given[key] for key, works in effective.items() if works and given[key] != "auto"}


def base_block(active: Mapping[str, Any]) -> dict[str, Any]:
    """Return the placement that DeepSpeed's keys imply for a block without one; empty for MiCS, itself a scheme."""
    if MICS in active:
        return {}
    if active.keys() >= {LOCO, QUANTIZED_GRADIENTS}:
        return {"weights": "node", "gradients": "node", "optimizer": "world"}
    return {"scheme": "zero++" if active.keys() >= {QUANTIZED_WEIGHTS, HPZ, QUANTIZED_GRADIENTS} else "zero3"}


def translate(ds_config: Mapping[str, Any], optimizer: bool = False) -> Translation:
    """Translate the stock keys of a config with a block to keys of the block; without a block change nothing.

    A key of the block that the user wrote is never replaced: a different value is reported as a contradiction.

    Args:
        ds_config: the DeepSpeed config; it is not changed.
        optimizer: whether the caller passes an optimizer; a config may also name one.
    """
    block, active, zero = ds_config.get(ROOT), switched_on(ds_config), _zero(ds_config)
    off = {key: "DeepSpeed 0.19 refuses the key" for key in GONE if key in zero and key not in active}
    off |= dict(_asks_for_less(zero))
    device = str(lookup(ds_config, f"{ZERO}.offload_param.device")).lower()
    if device == "cpu" and (optimizer or "optimizer" in ds_config):  # others keep them there, and gather from there
        off["offload_param"] = OFFLOADED
    # The policy gets the number that is meant: with another one the reference would round other parameters.
    meant = ds_config.get(f"{ZERO}.{PERSISTENCE}") if zero.get(PERSISTENCE) == "auto" else None
    if not isinstance(block, Mapping) or not (active or off or meant is not None):
        return Translation(dict(ds_config))
    config, lines, problems = deepcopy(dict(ds_config)), [], []
    if meant is not None:
        config[ZERO][PERSISTENCE] = meant
        lines.append(f'{ZERO}.{PERSISTENCE} = "auto" is taken as {meant}, the value of "{ZERO}.{PERSISTENCE}"')
    for key, why in off.items():
        lines.append(f"{ZERO}.{key} = {as_json(config[ZERO].pop(key))} is left out: {why}")
    if {HPZ, LOCO} & active.keys() and not any(block.get(key) is not None for key in PLACES):
        base = base_block(active)
        config[ROOT] |= base
        if base:
            lines.append(f'"{ROOT}" names no scheme, and DeepSpeed\'s keys imply {json.dumps(base)}')
    wishes = _wishes(active)
    for key, value in active.items():
        written, wish = f"{ZERO}.{key} = {as_json(value)}", wishes.get(key, {})
        if contradiction := _contradiction(block, wish, ROOT):
            problems.append(f"{written}: it means {contradiction}; remove one of the two")
            continue
        del config[ZERO][key]
        lines.append(f"{written} {_effect(key, active, wish)}")
        config[ROOT] = _filled(config[ROOT], wish)
    return Translation(config, tuple(lines), tuple(problems))


def _zero(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return DeepSpeed's block of ZeRO settings; an empty one if there is none."""
    zero = ds_config.get(ZERO)
    return zero if isinstance(zero, Mapping) else {}


def _asks_for_less(zero: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for stock settings of gathers and reductions that zero_topo supersedes."""
    for key in ("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"):
        if zero.get(key, "auto") != "auto" and on(zero[key]):
            yield key, ALL_REDUCED_FETCH
    if zero.get("reduce_scatter") in (False, "false", "False"):
        yield "reduce_scatter", "zero_topo scatters gradients to their shards, which sends half of an all-reduce"


def _wishes(active: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of the block for which each stock key stands; none or empty if the other keys disable it."""
    if MICS in active:
        return {MICS: {"scheme": "mics", "weights": int(active[MICS])}, MICS_HOPS: {"two_hop": True}}
    loco, gradients, weights = (each in active for each in (LOCO, QUANTIZED_GRADIENTS, QUANTIZED_WEIGHTS))
    fed_back = {"mode": "quantized", "bits": 4, "error_feedback": True}
    return {
        HPZ: {"secondary": int(active.get(HPZ, 0)), **({"quantize": {"secondary": "int8"}} if weights else {})},
        QUANTIZED_WEIGHTS: {"quantize": {"weights": "int8"}},
        QUANTIZED_GRADIENTS: {} if loco else {"quantize": {"gradients": "int4"}},
        LOCO: {"gradients": "node", "sync": fed_back} if gradients else {},
    }


def _effect(key: str, active: Mapping[str, Any], wish: Mapping[str, Any]) -> str:
    if wish:
        return f'is taken as "{ROOT}": {json.dumps(wish)}'
    if key == QUANTIZED_GRADIENTS and MICS not in active:
        return f"is taken together with {LOCO}"
    missing = {LOCO: f"does nothing without {QUANTIZED_GRADIENTS}", MICS_HOPS: f"does nothing without {MICS}"}
    return f"is left out: it {f'does nothing with {MICS}' if MICS in active else missing[key]}"


def _contradiction(block: Mapping[str, Any], wish: Mapping[str, Any], path: str) -> str | None:
    """Return the first key that the block sets to a different value, with both values; missing keys do not differ."""
    for key, wanted in wish.items():
        theirs, name = block.get(key, wanted), f"{path}.{key}"
        if isinstance(theirs, Mapping) and isinstance(wanted, Mapping):
            if found := _contradiction(theirs, wanted, name):
                return found
        elif theirs != wanted:
            return f"{name} = {json.dumps(wanted)}, which is {as_json(theirs)}"
    return None


def _filled(block: Mapping[str, Any], wish: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block with the keys of the wish that it lacks."""
    both = {key: _filled(block[key], value) for key, value in wish.items() if isinstance(value, dict) and key in block}
    return {**block, **{key: value for key, value in wish.items() if key not in block}, **both}


def _ranks(value: Any, least: int) -> bool:
    whole = value.is_integer() if isinstance(value, float) else type(value) is int
    return whole and value >= least
