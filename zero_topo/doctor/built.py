# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Builds the optimizer and the schedule of a config on two small parameters, and reports what they
refuse.

DeepSpeed's own code selects and builds them (``Builder`` in ``hook/seam.py``). Its kernels are not
compiled: what loads them is replaced while an optimizer is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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


class NoKernels:
    """Takes the place of a compiled module of DeepSpeed: every function of it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@dataclass(frozen=True)
class Trial:
    """Parameters of a class, and how DeepSpeed builds it.

    Attributes:
        block: "optimizer" or "scheduler".
        name: the name of the class in the JSON.
        given: the parameters in the JSON; "auto" stands for a value that Hugging Face fills in.
        make: builds it with other parameters.
        taken: the parameters that the class takes; empty if it takes any.
        selecting: parameters that DeepSpeed reads to select the class.
    """

    block: str
    name: str
    given: Params
    make: Callable[[Params], Any]
    taken: Mapping[str, inspect.Parameter]
    selecting: tuple[str, ...] = ()

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters as they are tried: 1 stands for a required one that Hugging Face
        fills in.
        """
        params = {key: value for key, value in self.given.items() if value != AUTO}
        for key, of in self.taken.items():
            if of.default is of.empty:
                params.setdefault(key, 1)
        return params

    def lines(self) -> Iterator[str]:
        """Yield a line for each wrong name, missing parameter and wrong type; without any, for what
        the class says.
        """
        wrong = [*self._names(), *self._types()]
        yield from wrong
        error = None if wrong else self._error(self.params)
        if error is not None:
            yield self._refusal(error)

    def _names(self) -> Iterator[str]:
        known = (*self.taken, *self.selecting)
        for key in sorted(set(self.given) - set(known)) if self.taken else ():
            hint = did_you_mean(key, known, cutoff=0.8) or "; remove it"
            yield f"{self.block}.params.{key}: {self.name} does not take it{hint}"
        for key, of in self.taken.items():
            if of.default is of.empty and key not in self.given:
                yield f"{self.block}.params.{key} is missing: {self.name} needs it; add it"

    def _types(self) -> Iterator[str]:
        for key, value in self.params.items():
            expected = _expected(self.taken[key], value, self.block) if key in self.taken else None
            if expected is not None:
                yield (
                    f"{self.block}.params.{key} = {as_json(value)}: {self.name} computes with "
                    f"it; give {expected}"
                )

    def _error(self, params: Params) -> Exception | None:
        try:
            self.make(params)
        except Exception as error:
            return error
        return None

    def _refusal(self, error: Exception) -> str:
        """Return the line of an error, which names the parameter whose usual value would not end in
        one.
        """
        params = self.params
        written = f"{self.block}.params = {as_json(params)}"
        for key in params:
            if key not in self.selecting and self._error(self._usual(key)) is None:
                written = f"{self.block}.params.{key} = {as_json(params[key])}"
                break
        if not isinstance(error, REPORTED):
            return f"{written}: {self.name} does not work with it; see its documentation"
        return f"{written}: {self.name} refuses it: {cut(' '.join(str(error).split()))}"

    def _usual(self, key: str) -> dict[str, Any]:
        """Return the parameters without one, or with 1 for it where it is required."""
        params = {other: value for other, value in self.params.items() if other != key}
        if key in self.taken and self.taken[key].default is inspect.Parameter.empty:
            params[key] = 1
        return params


def optimizer_lines(read: Any, name: str, given: Params) -> Iterator[str]:
    """Yield a line for each parameter of the optimizer that it refuses.

    Args:
        read: DeepSpeed's parsed config, which names an optimizer.
        name: the optimizer's name as the user wrote it.
        given: the parameters in the JSON.
    """
    plain = name.lower()
    selecting = OF_ADAM if plain in ("adam", "adamw") else ()
    chosen = {key: given[key] for key in selecting if given.get(key, AUTO) != AUTO}
    try:
        kind = type(_optimizer(read, chosen))
    except Exception:
        return  # this machine lacks what the optimizer needs: nothing can be said of its parameters
    # DeepSpeed selects the keys of Muon and of its Adam, and ignores others.
    taken = {} if plain == "muon" else _taken(kind)
    yield from Trial(
        "optimizer", name, given, lambda params: _optimizer(read, params), taken, selecting
    ).lines()


def scheduler_lines(read: Any, kind: type[Any], given: Params) -> Iterator[str]:
    """Yield a line for each parameter of the learning-rate schedule that it refuses.

    Args:
        read: DeepSpeed's parsed config, which names a schedule.
        kind: the class that it names.
        given: the parameters in the JSON.
    """
    name = kind.__name__
    yield from Trial(
        "scheduler", name, given, lambda params: _scheduler(read, params), _taken(kind)
    ).lines()


def _optimizer(read: Any, params: Params) -> Optimizer:
    """Build the optimizer, and step where that needs no kernel of DeepSpeed."""
    matrix: Any = torch.nn.Parameter(torch.zeros(2, 2))
    vector: Any = torch.nn.Parameter(torch.zeros(2))
    for parameter in (matrix, vector):
        parameter.use_muon = parameter is matrix
        parameter.grad = torch.zeros_like(parameter)
    ours = OPTIMIZERS.get(read.optimizer_name.lower())
    if ours is not None:
        return ours([matrix, vector], **params)
    with ExitStack() as stack:
        for builder in (OpBuilder, *subclasses(OpBuilder)):
            if "load" in vars(builder):
                stack.enter_context(replaced(builder, "load", lambda *args, **kwargs: NoKernels()))
        built = Builder(read, optimizer_params=dict(params)).optimizer([matrix, vector])
    if type(built).__module__.startswith("torch."):
        built.step()
    return built


def _scheduler(read: Any, params: Params) -> Any:
    """Build the schedule for as many parameter groups as the params list values for, and step."""
    groups = max((len(value) for value in params.values() if isinstance(value, list)), default=1)
    plain = torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)]
    )
    # As DeepSpeed's, which is no Optimizer
    zero = SimpleNamespace(optimizer=plain, param_groups=plain.param_groups)
    built = Builder(read, scheduler_params=dict(params)).scheduler(zero)
    built.step()
    return built


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield all classes that derive from a class."""
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def _taken(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class after the first; none if it takes any."""
    _, *parameters = inspect.signature(kind).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return {}
    return {parameter.name: parameter for parameter in parameters}


def _expected(parameter: inspect.Parameter, value: Any, block: str) -> str | None:
    """Return what a value must be, judged by the parameter's default and annotation; None if it may
    be that.
    """
    default = parameter.default
    if value == default:
        return None
    if isinstance(default, bool):
        return None if value in (True, False) else "true or false"
    if isinstance(default, str):
        return None if isinstance(value, str) else f"a name in quotes, such as {as_json(default)}"
    if isinstance(default, tuple):
        right = (
            isinstance(value, list | tuple)
            and len(value) == len(default)
            and all(map(_is_number, value))
        )
        return None if right else f"{len(default)} numbers, such as {as_json(default)}"
    if not isinstance(default, int | float) and parameter.annotation not in NUMBER_NAMES:
        return None
    # Of each parameter group
    each = value if isinstance(value, list) and block == "scheduler" else [value]
    return None if all(map(_is_number, each)) else "a number, without quotes"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
