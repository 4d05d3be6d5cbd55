# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements ``check``: whether YAML files would train, without NeoX and torch, so that it runs on
a login node.

Each problem is one line: the key and its value, why, and what to do instead.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero_topo.config import ZeroTopoConfig, deepspeed_problems, is_automatic, resolve_config
from zero_topo.config.parts import ROOT
from zero_topo.cost.candidates import before_a_model
from zero_topo.doctor.refusals import deepspeed_refusals
from zero_topo.neox.config import EXTRA, deepspeed_config, known_keys, load_configs, part
from zero_topo.strict import as_json, cut, nearest
from zero_topo.versions import default_clipping, installed

SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE]-?\d+|[-+]?\d+[eE][-+]?\d+")


def check(options: Namespace) -> str:
    """Check the configs, and return a one-line summary if they are valid.

    Raises:
        ValueError: one line per problem.
    """
    block = require(options)
    assert block is not None  # its absence is a problem
    name = (
        f"scheme {block.scheme}"
        if block.scheme
        else "the default plan"
        if block.weights is None
        else "a free-form plan"
    )
    if options.ranks is None:
        return f"ok: {name}; --ranks N shows the plan"
    from zero_topo.cli.inputs import machine

    found = machine(block.topology, options.ranks)
    if is_automatic(block, found):
        before_a_model(block, found)
        return (
            f"ok: {name} chooses a plan when training starts; to see it: zero-topo plan "
            "--recommend --model FILE"
        )
    plan = resolve_config(block, found).plan
    secondary = f", secondary {plan.secondary}" if plan.secondary else ""
    degrees = (
        f"weights {plan.weights}{secondary}, gradients {plan.gradients}, optimizer {plan.optimizer}"
    )
    return f"ok: {name} on {options.ranks} ranks: {degrees}"


def require(options: Namespace) -> ZeroTopoConfig | None:
    """Return the ``zero_topo`` block of valid configs; None if ``options.plain`` leaves it out.

    Raises:
        ValueError: one line per problem.
    """
    merged = load_configs(options.configs)
    found = problems(merged, known_keys(options.neox_path), options.plain)
    block = None
    try:
        block = ZeroTopoConfig.from_ds_config(deepspeed_config(merged))
    except ValueError as error:
        found += str(error).splitlines()
    if found:
        names = ", ".join(options.configs)
        raise ValueError("\n".join(f"{cut(names, 200)}: {line}" for line in found))
    return block


def problems(
    merged: Mapping[str, Any], known: frozenset[str] | None = None, plain: bool = False
) -> list[str]:
    """Return one line for each setting with which NeoX would not train, or would train differently.

    Args:
        merged: the result of :func:`load_configs`.
        known: NeoX's keys; None skips what needs them.
        plain: train with stock ZeRO, so the ``zero_topo`` block may be missing.
    """
    lines = [line for find in CHECKS if not (plain and find is _block) for line in find(merged)]
    lines += _unknown(merged, known)
    config = deepspeed_config(merged)
    said = {line.partition(":")[0] for line in lines}
    lines += [line for line in deepspeed_problems(config) if line.partition(":")[0] not in said]
    # DeepSpeed is run last: it would report some of these again
    return lines or deepspeed_refusals(config, None)


def _block(merged: Mapping[str, Any]) -> Iterator[str]:
    extra = merged.get(EXTRA)
    if extra is not None and not isinstance(extra, Mapping):
        yield f"{EXTRA} = {as_json(extra)}: must be a mapping; write {{{as_json(ROOT)}: ...}}"
    elif ROOT in merged:
        yield (
            f'{ROOT}: NeoX refuses unknown keys at the top level; move it into "{EXTRA}": '
            f'{{"{ROOT}": ...}}'
        )
    elif ROOT not in (extra or {}) and ROOT not in part(merged, "zero_optimization"):
        yield (
            f'{EXTRA}.{ROOT} is missing: this would be plain ZeRO; add "{EXTRA}": {{"{ROOT}": '
            f'{{"scheme": "topo"}}}}'
        )


def _parallelism(merged: Mapping[str, Any]) -> Iterator[str]:
    for key, least, why in (
        (
            "pipe_parallel_size",
            0,
            "ZeRO-3 in NeoX runs without its pipeline module, even one of a single stage",
        ),
        (
            "model_parallel_size",
            1,
            "NeoX ends a job of ZeRO stage 3 with tensor parallelism when it builds the model",
        ),
        ("moe_num_experts", 1, "NeoX's MoE does not work with ZeRO-3"),
    ):
        value = merged.get(key, least)
        if not isinstance(value, int) or value > least:
            yield f"{key} = {as_json(value)}: {why}; set it to {least}"


def _clipping(merged: Mapping[str, Any]) -> Iterator[str]:
    dropped = merged.get("gradient_clipping", 1.0) == 1.0 and "gradient_clipping" not in part(
        merged, EXTRA
    )
    version = installed("deepspeed")
    if dropped and version is not None and default_clipping(version) != 1.0:
        yield (
            "gradient_clipping = 1.0: NeoX drops it, being its own default, and DeepSpeed "
            f"{version} would not clip; "
            f'repeat it as "{EXTRA}": {{"gradient_clipping": 1.0}}, or 0 there for no clipping'
        )


def _contradictions(merged: Mapping[str, Any]) -> Iterator[str]:
    for key, value in part(merged, EXTRA).items():
        if key != ROOT and key in merged and merged[key] != value:
            yield (
                f"{key} = {as_json(merged[key])}, but {EXTRA}.{key} = {as_json(value)}: DeepSpeed "
                "gets the latter and NeoX the former; make them equal"
            )


def _precision(merged: Mapping[str, Any]) -> Iterator[str]:
    precision = merged.get("precision")
    for key, name in (("fp16", "fp16"), ("bf16", "bfloat16")):
        if part(merged, key).get("enabled") and precision not in (None, name):
            yield (
                f"precision = {as_json(precision)}, but {key} is enabled: NeoX refuses both; set "
                f'it to "{name}"'
            )
    if precision == "fp16" and not merged.get("fp16"):
        yield (
            'precision = "fp16" without an fp16 block: NeoX then writes {"type": "fp16"}, which '
            "DeepSpeed refuses; add "
            '"fp16": {"enabled": true}'
        )


def _optimizer(merged: Mapping[str, Any]) -> Iterator[str]:
    optimizer = merged.get("optimizer")
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("params"), Mapping):
        yield (
            'optimizer must name a type and params; write {"type": "Adam", "params": {"lr": '
            "0.0006}}"
        )
        return
    kind = str(optimizer.get("type", "Adam")).lower()
    offload = part(part(merged, "zero_optimization"), "offload_optimizer")
    if kind in ("onebitadam", "sm3", "madgrad_wd", "sgd"):
        yield (
            f"optimizer.type = {as_json(optimizer['type'])}: DeepSpeed has no ZeRO-3 for it; use "
            '"Adam" or "AdamS"'
        )
    elif kind == "adam" and offload.get("device") == "cpu":
        yield (
            'optimizer.type = "Adam" with offload_optimizer: NeoX would step on the GPU; set it '
            'to "cpu_adam"'
        )


def _attention(merged: Mapping[str, Any]) -> Iterator[str]:
    shown = as_json(merged.get("attention_config"))
    for kind in ("mamba", "rwkv"):
        if f'"{kind}"' in shown:
            yield (
                f"attention_config has {kind}: NeoX trains it up to ZeRO stage 2 only; use "
                "global or flash attention"
            )


def _batch(merged: Mapping[str, Any]) -> Iterator[str]:
    if (
        merged.get("train_batch_size") is None
        and merged.get("train_micro_batch_size_per_gpu") is None
    ):
        yield (
            "train_micro_batch_size_per_gpu is missing, and train_batch_size too: NeoX needs "
            "one; give the former"
        )


def _numbers(merged: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in merged.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, str) and SCIENTIFIC.fullmatch(value):
            yield (
                f'{prefix}{key} = "{value}": YAML 1.1 reads this as text; write it with a point '
                "and a sign, 1.0e-8"
            )


def _unknown(merged: Mapping[str, Any], known: frozenset[str] | None) -> list[str]:
    lines = []
    for key in sorted(set(merged) - (known or set(merged)) - {ROOT}):
        near = nearest(key, known or (), cutoff=0.6)
        hint = f"did you mean {near}?" if near else f"DeepSpeed's own keys go into {EXTRA}"
        lines.append(f"{key}: NeoX has no such key and would end with an error; {hint}")
    return lines


CHECKS: tuple[Callable[[Mapping[str, Any]], Iterator[str]], ...] = (
    _block,
    _parallelism,
    _clipping,
    _contradictions,
    _precision,
    _optimizer,
    _attention,
    _batch,
    _numbers,
)
