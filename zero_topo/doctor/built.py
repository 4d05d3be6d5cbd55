# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Builds the optimizer and the schedule of a config on two small parameters, and reports what they refuse.

DeepSpeed's own code selects and builds them (``Builder`` in ``hook/seam.py``). Its kernels are not compiled: what loads
them is replaced while an optimizer is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.optim import Optimizer

from zero_topo.hook.seam import Builder, replaced
from zero_topo.strict import as_json, cut, did_you_mean
from zero_topo.sync import OPTIMIZERS

AUTO = "auto"
OF_ADAM = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters of "Adam" and "AdamW" that select the class and are not passed to it."""
REPORTED = (ValueError, AssertionError, RuntimeError)
"""Errors whose text is written for users; that of others speaks of Python."""
NUMBER_NAMES = (int, float, "int", "float")
Params = Mapping[str, Any]
Make = Callable[[Params], Any]


def optimizer_lines(read: Any, name: str, given: Params) -> Iterator[str]:
    """Yield a line for each parameter of the optimizer that it refuses.

    Args:
        read: DeepSpeed's parsed config, which names an optimizer.
        name: the optimizer's name as the user wrote it.
        given: the parameters of the JSON, where "auto" may stand for a value that Hugging Face fills in.
    """
    plain = name.lower()
    if plain == "muon":
        # DeepSpeed selects the keys of Muon and of its Adam; others are ignored.
        yield from _refused("optimizer", name, given, lambda params: _optimizer(read, params), (), None)
        return
    extra = OF_ADAM if plain in ("adam", "adamw") else ()
    selecting = {key: given[key] for key in extra if given.get(key, AUTO) != AUTO}
    try:
        kind = type(_optimizer(read, selecting))
    except Exception:
        return  # this machine lacks what the optimizer needs: nothing can be said of its parameters
    yield from _refused("optimizer", name, given, lambda params: _optimizer(read, params), extra, kind)


def scheduler_lines(read: Any, kind: type, given: Params) -> Iterator[str]:
    """Yield a line for each parameter of the learning-rate schedule that it refuses.

    Args:
        read: DeepSpeed's parsed config, which names a schedule.
        kind: the class that it names.
        given: as for :func:`optimizer_lines`.
    """
    yield from _refused("scheduler", kind.__name__, given, lambda params: _scheduler(read, params), (), kind)


def _optimizer(read: Any, params: Params) -> Optimizer:
    """Build the optimizer, and step where that needs no kernel of DeepSpeed."""
    matrix, vector = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,)))
    for parameter in (matrix, vector):
        parameter.use_muon = parameter is matrix
        parameter.grad = torch.zeros_like(parameter)
    ours = OPTIMIZERS.get(read.optimizer_name.lower())
    if ours is not None:
        return ours([matrix, vector], **params)
    with ExitStack() as stack:
        for builder in (OpBuilder, *subclasses(OpBuilder)):
            if "load" in vars(builder):
                stack.enter_context(replaced(builder, "load", MagicMock()))
        built = Builder(read, optimizer_params=dict(params)).optimizer([matrix, vector])
    if type(built).__module__.startswith("torch."):
        built.step()
    return built


def _scheduler(read: Any, params: Params) -> Any:
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    built = Builder(read, scheduler_params=dict(params)).scheduler(plain)
    plain.step()
    built.step()
    return built


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield all classes that derive from a class."""
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def _refused(
    block: str, name: str, given: Params, make: Make, extra: tuple[str, ...], kind: type | None
) -> Iterator[str]:
    """Yield a line for each wrong name, each missing parameter and each value; values are tried if names are right."""
    params = {key: value for key, value in given.items() if value != AUTO}
    taken = {} if kind is None else _taken(kind)
    wrong = False
    if taken:
        for key in sorted(set(given) - set(taken) - set(extra)):
            wrong = True
            yield f"{block}.params.{key}: {name} does not take it{_similar(key, (*taken, *extra))}"
    for key in (key for key, of in taken.items() if of.default is of.empty):
        if key not in given:
            wrong = True
            yield f"{block}.params.{key} is missing: {name} needs it; add it"
        params.setdefault(key, 1)  # stands for the value that is missing, or that Hugging Face fills in
    for key, value in params.items():
        expected = _expected(taken[key], value, block) if key in taken else None
        if expected is not None:
            wrong = True
            yield f"{block}.params.{key} = {as_json(value)}: {name} computes with it; give {expected}"
    error = None if wrong else _error(make, params)
    if error is not None:
        yield _line(block, name, make, params, error)


def _similar(word: str, known: tuple[str, ...]) -> str:
    return did_you_mean(word, known, cutoff=0.8) or "; remove it"


def _taken(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class after the first; none if it takes any."""
    _, *parameters = inspect.signature(kind).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return {}
    return {parameter.name: parameter for parameter in parameters}


def _expected(parameter: inspect.Parameter, value: Any, block: str) -> str | None:
    """Return what a value must be, judged by the parameter's default and annotation; None if it may be that."""
    default = parameter.default
    if value == default:
        return None
    if isinstance(default, bool):
        return None if value in (True, False) else "true or false"
    if isinstance(default, str):
        return None if isinstance(value, str) else f"a name in quotes, such as {as_json(default)}"
    if isinstance(default, tuple):
        right = isinstance(value, list | tuple) and len(value) == len(default) and all(map(_is_number, value))
        return None if right else f"{len(default)} numbers, such as {as_json(default)}"
    if not isinstance(default, int | float) and parameter.annotation not in NUMBER_NAMES:
        return None
    each = value if isinstance(value, list) and block == "scheduler" else [value]  # of each parameter group
    return None if all(map(_is_number, each)) else "a number, without quotes"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _error(make: Make, params: Params) -> Exception | None:
    try:
        make(params)
    except Exception as error:
        return error
    return None


def _line(block: str, name: str, attempt: Attempt, error: Exception) -> str:
    """Return the line of an error, which names the parameter whose usual value would not end in one."""
    params = attempt.params
    guilty = next((key for key in params if attempt.usual(key)), None)
    written = f"{block}.params = {as_json(params)}"
    if guilty is not None:
        written = f"{block}.params.{guilty} = {as_json(params[guilty])}"
    if not isinstance(error, REPORTED):
        return f"{written}: {name} does not work with it; see its documentation"
    return f"{written}: {name} refuses it: {cut(' '.join(str(error).split()))}"
