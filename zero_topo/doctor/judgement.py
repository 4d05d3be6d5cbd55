# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed refuses in a config; runs in the process of ``judge.py``, as it imports DeepSpeed.

DeepSpeed's own code decides: it reads the config, then builds the optimizer and the schedule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed import comm
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from pydantic import ValidationError

from zero_topo.config.deepspeed_parts import BATCHES
from zero_topo.hook.seam import Builder, replaced
from zero_topo.strict import as_json, cut, describe
from zero_topo.sync import OPTIMIZERS

FILLED_IN = (*BATCHES, "gradient_clipping", "sequence_parallel_size")
"""Keys outside of any part whose "auto" Hugging Face replaces."""
OF_SCHEDULES = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
"""Numbers that Hugging Face fills in, some of which a schedule needs; 1 takes their place."""
REPORTED = (ValueError, AssertionError, DeepSpeedConfigError)
"""Errors whose text is written for users; that of others needs the error's name."""


class NoKernels:
    """Takes the place of a compiled module of DeepSpeed: every function of it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def refusals(config: Mapping[str, Any], ranks: int | None) -> list[str]:
    """Return the first error of DeepSpeed with a config, in one line; empty if there is none.

    Args:
        config: the config without a block; "auto" counts as absent.
        ranks: data-parallel ranks of the job, if they are known.
    """
    whole = _without_auto(config)
    if "auto" in [config.get(key) for key in BATCHES]:
        own = {key: value for key, value in whole.items() if key not in BATCHES}
        whole = {"train_micro_batch_size_per_gpu": 1, **own}
    answers = {"get_rank": 0, "get_world_size": ranks or _fitting(whole)}
    with ExitStack() as stack:
        for name, number in answers.items():
            answer = replaced(comm, name, lambda group=None, number=number: number)
            stack.enter_context(answer)
        try:
            read = _read(whole)
        except Exception as error:
            return [_refusal(_cause(whole, error), whole, error)]
        for part, build in (("optimizer", _optimizer), ("scheduler", _scheduler)):
            try:
                build(read)
            except Exception as error:
                return [_refusal(part, whole, error)]
    return []


def _without_auto(part: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return a part of a config without what Hugging Face fills in."""
    found: dict[str, Any] = {}
    for key, value in part.items():
        if isinstance(value, Mapping):
            found[key] = _without_auto(value, depth + 1)
        elif value == "auto" and key in OF_SCHEDULES:
            found[key] = 1
        elif value != "auto" or (depth == 0 and key not in FILLED_IN):
            found[key] = value
    return found


def _read(config: Mapping[str, Any]) -> Any:
    """Return the config as DeepSpeed reads it."""
    return DeepSpeedConfig(json.loads(json.dumps(config)))  # DeepSpeed changes what it reads


def _fitting(config: Mapping[str, Any]) -> int:
    """Return the number of ranks that a config's batch sizes make; 1 if they are no numbers."""
    batch, micro_batch, accumulation = (config.get(key) or 1 for key in BATCHES)
    try:
        return max(1, int(batch // (micro_batch * accumulation)))
    except TypeError:
        return 1


def _cause(config: Mapping[str, Any], error: Exception) -> str:
    """Return the key without which DeepSpeed reports something else, or an empty string."""
    for key in config:
        try:
            _read({other: value for other, value in config.items() if other != key})
        except Exception as other_error:
            if str(other_error) == str(error):
                continue
        return key
    return ""


def _refusal(key: str, config: Mapping[str, Any], error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]["loc"][:1]  # the class of all monitors has a field for each
        return f"DeepSpeed refuses {describe(error, '' if first == (key,) else f'{key}.')}"
    written = f"{key} = {as_json(config.get(key))}: " if key else ""
    kind = "" if isinstance(error, REPORTED) else f"{type(error).__name__}: "
    return cut(f"{written}DeepSpeed refuses it: {kind}{' '.join(str(error).split())}")


def _optimizer(read: Any) -> None:
    """Build the config's optimizer for two parameters, without DeepSpeed's kernels."""
    if read.optimizer_name is None:
        return
    matrix: Any = torch.nn.Parameter(torch.zeros(2, 2))
    vector: Any = torch.nn.Parameter(torch.zeros(2))
    matrix.use_muon = True
    vector.use_muon = False
    ours = OPTIMIZERS.get(read.optimizer_name.lower())
    if ours is not None:
        ours([matrix, vector], **(read.optimizer_params or {}))
        return
    with ExitStack() as stack:
        for builder in (OpBuilder, *_subclasses(OpBuilder)):
            if "load" in vars(builder):
                stack.enter_context(replaced(builder, "load", lambda *args, **kwargs: NoKernels()))
        built = Builder(read).optimizer([matrix, vector])
    # DeepSpeed's kernels, which are not here, would be the first to compute with them.
    for group in built.param_groups:
        math.fsum(group.get(key, 0.0) for key in ("lr", "eps", "weight_decay"))


def _scheduler(read: Any) -> None:
    """Build the config's schedule for as many groups as its lists have values, and step."""
    lists = [value for value in (read.scheduler_params or {}).values() if isinstance(value, list)]
    groups = max(map(len, lists), default=1)
    plain = torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)]
    )
    # As DeepSpeed's, which is no Optimizer
    zero = SimpleNamespace(optimizer=plain, param_groups=plain.param_groups)
    schedule = Builder(read).scheduler(zero)
    if schedule is not None:
        schedule.step()


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
