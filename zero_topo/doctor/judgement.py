# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed refuses in a config, one line each; runs in the process of ``judge.py``, as it
imports DeepSpeed.

DeepSpeed's own config parser decides. It checks optimizers, schedules and a few numbers only when
it builds an engine: this module compares those with the installed DeepSpeed and torch, and
``built.py`` builds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import (
    DEEPSPEED_OPTIMIZERS,
    DeepSpeedConfig,
    DeepSpeedConfigError,
    DtypeEnum,
)
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from pydantic import ValidationError

from zero_topo.config.deepspeed_parts import part_of
from zero_topo.doctor.built import optimizer_lines, scheduler_lines, subclasses
from zero_topo.strict import as_json, cut, describe, did_you_mean
from zero_topo.sync import OPTIMIZERS

NUMBERS = ("gradient_clipping", "gradient_predivide_factor", "steps_per_print")
ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
REPORTED = (ValueError, AssertionError, DeepSpeedConfigError)
"""Errors whose text DeepSpeed wrote for users; that of others speaks of Python."""


def refusals(given: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that DeepSpeed refuses; ``"auto"`` counts as absent.

    DeepSpeed reports only the first error. The key whose removal changes the error is removed, and
    the rest parsed again.
    """
    config = _without_auto(given)
    while (error := _error(config)) is not None:
        guilty = next(
            (key for key in config if str(_error(_without(config, key))) != str(error)), ""
        )
        yield _line(guilty, config.get(guilty), error)
        if not guilty:
            return
        config = _without(config, guilty)
    yield from _built_later(config, given)


def _without_auto(block: Any) -> Any:
    """Return a config without what Hugging Face fills in."""
    if not isinstance(block, Mapping):
        return block
    return {key: _without_auto(value) for key, value in block.items() if value != "auto"}


def _without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {other: value for other, value in config.items() if other != key}


def _error(config: Mapping[str, Any]) -> Exception | None:
    try:
        DeepSpeedConfig(json.loads(json.dumps(config)))  # DeepSpeed changes the dict that it reads
    except Exception as error:
        return error
    return None


def _line(key: str, value: Any, error: Exception) -> str:
    if isinstance(error, ValidationError):
        return (
            f"DeepSpeed would refuse {describe(error, f'{key}.', near=partial(_near, error.title))}"
        )
    written = f"{key} = {as_json(value)}: " if key else ""
    if not isinstance(error, REPORTED):
        return (
            f"{written}DeepSpeed cannot read it; write it as DeepSpeed's documentation of its "
            "JSON shows"
        )
    reason = cut(" ".join(str(error).split()) or type(error).__name__)
    return f"{written}DeepSpeed would refuse it: {reason}"


def _near(title: str, path: Sequence[str]) -> str:
    """Return what to do about an unknown key, as the end of a sentence: the keys of the part it
    stands in decide.

    Args:
        title: the class of DeepSpeed's that reads the outermost part.
        path: the keys below that part; the last is unknown.
    """
    *parents, word = path
    known = _keys_of(title, parents)
    if word in known:
        return "it is given by two names; remove one"
    return did_you_mean(word, known, cutoff=0.8).removeprefix("; ") or "remove it"


def _keys_of(title: str, parents: Sequence[str]) -> set[str]:
    """Return the names and aliases of the keys of a part; none if its class is not known."""
    models = [model for model in subclasses(DeepSpeedConfigModel) if model.__name__ == title]
    for parent in parents:
        fields = [field for model in models for field in _named(model, parent)]
        models = [kind for field in fields for kind in _models_in(field.annotation)]
    names = {name for model in models for name in model.model_fields}
    aliases = {
        field.alias for model in models for field in model.model_fields.values() if field.alias
    }
    return names | aliases


def _named(model: Any, key: str) -> Iterator[Any]:
    """Yield the fields of a model that a key of the JSON names."""
    for name, field in model.model_fields.items():
        if key in (name, field.alias):
            yield field


def _models_in(annotation: Any) -> Iterator[Any]:
    """Yield the models in an annotation, such as that of ``Optional[Model]``."""
    if isinstance(annotation, type) and issubclass(annotation, DeepSpeedConfigModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _built_later(config: dict[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that an engine refuses when it is built.

    Args:
        config: what DeepSpeed reads without an error.
        given: the config with "auto".
    """
    read = DeepSpeedConfig(json.loads(json.dumps(config)))
    for key in NUMBERS:
        if isinstance(value := config.get(key), str | bool | list | dict):
            yield f"{key} = {as_json(value)}: DeepSpeed computes with it; give a number"
    if read.grad_accum_dtype is not None:
        try:
            DtypeEnum(read.grad_accum_dtype)
        except ValueError:
            names = ", ".join(DtypeEnum.__members__)
            yield (
                f"data_types.grad_accum_dtype = {as_json(read.grad_accum_dtype)}: DeepSpeed has "
                f"{names}; give one"
            )
    if read.prescale_gradients and config.get("gradient_predivide_factor", 1.0) != 1.0:
        factor = as_json(config["gradient_predivide_factor"])
        yield (
            f"gradient_predivide_factor = {factor}: DeepSpeed's ZeRO-3 does not divide before it "
            "reduces; remove it"
        )
    if read.optimizer_name is not None:
        yield from _optimizer(read, part_of(given, "optimizer"))
    if read.scheduler_name is not None:
        yield from _scheduler(read, part_of(given, "scheduler.params"))


def _optimizer(read: Any, block: Mapping[str, Any]) -> Iterator[str]:
    name = read.optimizer_name
    params = part_of(block, "params")
    shown = f"optimizer.type = {as_json(name)}"
    of_torch = getattr(torch.optim, name, None)
    plain = name.lower()
    if name in ONE_BIT:
        yield f'{shown}: 1-bit optimizers do not work with ZeRO; use "AdamW"'
    elif not (name in DEEPSPEED_OPTIMIZERS or plain in OPTIMIZERS or isinstance(of_torch, type)):
        yield f'{shown}: neither DeepSpeed nor torch.optim has it; use "AdamW"'
    else:
        kinds = {plain, f"fused{plain.removesuffix('w')}", f"deepspeedcpu{plain.removesuffix('w')}"}
        tested = (
            any(kind.__name__.lower() in kinds for kind in ZERO_SUPPORTED_OPTIMIZERS)
            or plain == "muon"
        )
        if not tested and not read.zero_allow_untested_optimizer:
            yield (
                f"{shown}: DeepSpeed has not tested it with ZeRO; set "
                '"zero_allow_untested_optimizer": true'
            )
        if "max_grad_norm" in params:
            yield (
                'optimizer.params.max_grad_norm: DeepSpeed clips by "gradient_clipping"; set '
                "that instead"
            )
        yield from optimizer_lines(read, block["type"], _without(params, "max_grad_norm"))


def _scheduler(read: Any, params: Mapping[str, Any]) -> Iterator[str]:
    name = read.scheduler_name
    kind = getattr(lr_schedules, name, None)
    known = as_json(lr_schedules.VALID_LR_SCHEDULES)
    if isinstance(getattr(torch.optim.lr_scheduler, name, None), type) and kind is None:
        yield (
            f"scheduler.type = {as_json(name)}: a schedule of torch does not take ZeRO's "
            f"optimizer; choose one of {known}, or pass lr_scheduler to deepspeed.initialize"
        )
    elif not isinstance(kind, type):
        yield (
            f"scheduler.type = {as_json(name)}: neither DeepSpeed nor torch has it; choose one "
            f"of {known}"
        )
    elif read.scheduler_params is None:
        yield 'scheduler.params is missing: DeepSpeed passes it on; add "params", which may be {}'
    else:
        yield from scheduler_lines(read, kind, params)
