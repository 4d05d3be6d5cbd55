# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m zero_topo.doctor.judge``: reads configs, a line of JSON each, and prints what DeepSpeed refuses.

For ``null`` in place of a config it prints the state of torch and DeepSpeed, see ``probe.py``.
DeepSpeed's own config parser decides. It checks optimizers, schedulers and a few numbers only when it builds an engine;
this module compares those with the installed DeepSpeed and torch.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from zero_topo.doctor.probe import state
from zero_topo.strict import as_json, cut, describe

NUMBERS = ("gradient_clipping", "gradient_predivide_factor", "steps_per_print")
ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
OF_ADAM = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters of "Adam" and "AdamW" that select the class and are not passed to it."""


def main() -> None:
    """Answer one config per line until standard input ends."""
    logging.disable(logging.WARNING)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints
    import deepspeed  # noqa: F401  (with it comes the hook, whose optimizers DeepSpeed then knows)

    print("[]", file=answers, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    for line in sys.stdin:
        config = json.loads(line)
        try:
            answer = state() if config is None else list(refusals(config))
        except Exception as error:
            said = cut(" ".join(str(error).split()))
            answer = {"error": said} if config is None else [f"DeepSpeed cannot read this config: {said}"]
        print(json.dumps(answer), file=answers, flush=True)


def refusals(config: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that DeepSpeed refuses.

    DeepSpeed reports only the first error. The key whose removal changes the error is removed, and the rest parsed
    again.
    """
    while (error := _error(config)) is not None:
        guilty = next((key for key in config if str(_error(_without(config, key))) != str(error)), "")
        yield _line(guilty, config.get(guilty), error)
        if not guilty:
            return
        config = _without(config, guilty)
    yield from _built_later(config)


def _without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {other: value for other, value in config.items() if other != key}


def _error(config: Mapping[str, Any]) -> Exception | None:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(json.loads(json.dumps(config)))  # DeepSpeed changes the dict that it reads
    except Exception as error:
        return error
    return None


def _line(key: str, value: Any, error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"DeepSpeed would refuse {describe(error, f'{key}.', near=_near)}"
    reason = cut(" ".join(str(error).split()) or type(error).__name__)
    return f"{f'{key} = {as_json(value)}: ' if key else ''}DeepSpeed would refuse it: {reason}"


def _near(word: str) -> str:
    """Return the key of DeepSpeed's blocks that is spelled most like a word, as the end of a sentence."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    known = {name for model in _subclasses(DeepSpeedConfigModel) for name in model.model_fields}
    return "it is given by two names; remove one" if word in known else _similar(word, known)


def _similar(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.8)
    return f"did you mean {found[0]!r}?" if found else "remove it"


def _subclasses(model: type[Any]) -> Iterator[type[Any]]:
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)


def _built_later(config: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that an engine refuses when it is built."""
    from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum

    read = DeepSpeedConfig(json.loads(json.dumps(config)))
    for key in NUMBERS:
        if isinstance(value := config.get(key), str | bool | list | dict):
            yield f"{key} = {as_json(value)}: DeepSpeed computes with it; give a number"
    if read.grad_accum_dtype is not None:
        try:
            DtypeEnum(read.grad_accum_dtype)
        except ValueError:
            names = ", ".join(DtypeEnum.__members__)
            yield f"data_types.grad_accum_dtype = {as_json(read.grad_accum_dtype)}: DeepSpeed has {names}; give one"
    if read.prescale_gradients and config.get("gradient_predivide_factor", 1.0) != 1.0:
        factor = as_json(config["gradient_predivide_factor"])
        yield f"gradient_predivide_factor = {factor}: DeepSpeed's ZeRO-3 does not divide before it reduces; remove it"
    yield from _optimizer(read)
    yield from _scheduler(read)


def _optimizer(read: Any) -> Iterator[str]:
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    from zero_topo.sync import OPTIMIZERS

    name, params = read.optimizer_name, read.optimizer_params or {}
    if name is None or name.lower() == "muon":  # its parameters are read by DeepSpeed's engine, not by a class
        return
    shown = f"optimizer.type = {as_json(name)}"
    of_torch, plain = getattr(torch.optim, name, None), name.lower()
    if name in ONE_BIT:
        yield f'{shown}: 1-bit optimizers do not work with ZeRO; use "AdamW"'
    elif not (name in DEEPSPEED_OPTIMIZERS or plain in OPTIMIZERS or isinstance(of_torch, type)):
        yield f'{shown}: neither DeepSpeed nor torch.optim has it; use "AdamW"'
    else:
        kinds = {plain, f"fused{plain.removesuffix('w')}", f"deepspeedcpu{plain.removesuffix('w')}"}
        classes = [kind for kind in ZERO_SUPPORTED_OPTIMIZERS if kind.__name__.lower() in kinds]
        if not classes and not read.zero_allow_untested_optimizer:
            yield f'{shown}: DeepSpeed has not tested it with ZeRO; set "zero_allow_untested_optimizer": true'
        if "max_grad_norm" in params:
            yield 'optimizer.params.max_grad_norm: DeepSpeed clips by "gradient_clipping"; set that instead'
        classes = classes or ([of_torch] if isinstance(of_torch, type) else [])
        yield from _unknown("optimizer", params, classes, (*OF_ADAM, "max_grad_norm"))


def _scheduler(read: Any) -> Iterator[str]:
    import torch
    from deepspeed.runtime import lr_schedules

    name = read.scheduler_name
    if name is None:
        return
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(kind, type):
        known = as_json(lr_schedules.VALID_LR_SCHEDULES)
        yield f"scheduler.type = {as_json(name)}: neither DeepSpeed nor torch has it; choose one of {known}"
    else:
        yield from _unknown("scheduler", read.scheduler_params or {}, [kind])


def _unknown(
    block: str, params: Mapping[str, Any], classes: list[type[Any]], more: Iterable[str] = ()
) -> Iterator[str]:
    """Yield a line for each parameter that none of the classes accepts."""
    taken = [inspect.signature(kind).parameters for kind in classes]
    if not taken or any(p.kind is p.VAR_KEYWORD for of in taken for p in of.values()):
        return
    known = {name for of in taken for name in of} | set(more)
    for name in sorted(set(params) - known):
        yield f"{block}.params.{name}: {classes[0].__name__} does not take it; {_similar(name, known)}"


if __name__ == "__main__":
    main()
