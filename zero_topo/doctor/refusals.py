# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reports the settings that DeepSpeed itself refuses in a config, before a job is queued.

A separate process runs the installed DeepSpeed, because planning commands import neither it nor
torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from threading import Timer
from typing import Any

from zero_topo.config.deepspeed_parts import ZERO, part_of, wrong_values
from zero_topo.config.parts import ROOT
from zero_topo.config.stock_keys import read_stock, translate
from zero_topo.strict import as_json, cut
from zero_topo.versions import installed

PATIENCE_S = 180.0
"""Time limit in seconds of DeepSpeed's import, which waits forever for a lock of a crashed job, and
of an answer.
"""

BATCH, MICRO_BATCH, ACCUMULATION = BATCHES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def deepspeed_refusals(ds_config: Mapping[str, Any], ranks: int | None) -> list[str]:
    """Return one line for each setting with which DeepSpeed would not start.

    Args:
        ds_config: the whole config.
        ranks: number of ranks of the job, or None if it is not known.
    """
    return [*setting_refusals(ds_config), *_batches(ds_config, ranks)]


def setting_refusals(ds_config: Mapping[str, Any]) -> list[str]:
    """Return one line for each key or value, except batch sizes, that neither DeepSpeed nor the
    block accepts.

    The list is empty if DeepSpeed cannot be run, see :func:`unasked`.
    """
    if unasked() is not None:
        return []
    wrong = wrong_values(ds_config)
    config = deepcopy(translate(ds_config).config)
    zero = part_of(ds_config, ZERO)
    _, stock_lines = read_stock(zero)
    for name in (
        *wrong,
        *(f"{ZERO}.{key}" for key in (*stock_lines, ROOT) if key in zero),
        ROOT,
        *BATCHES,
    ):
        _drop(config, name)
    return [
        *wrong.values(),
        *stock_lines.values(),
        *_ask(json.dumps({**config, MICRO_BATCH: 1}, sort_keys=True)),
    ]


def _drop(config: dict[str, Any], dotted: str) -> None:
    *parents, key = dotted.split(".")
    place: Any = config
    for parent in parents:
        place = place[parent]
    place.pop(key, None)


def unasked() -> str | None:
    """Return in one line why the installed DeepSpeed cannot be run; None if it can."""
    if installed("deepspeed") is None:
        return "DeepSpeed is not installed here, so what it refuses itself is not checked"
    _, reason = _program()
    if reason is None:
        return None
    return (
        f"DeepSpeed does not start, so what it refuses itself is not checked: {reason}; see "
        "zero-topo doctor"
    )


def torch_state() -> Mapping[str, Any]:
    """Return the state of torch and DeepSpeed, see ``probe.py``; ``{"error": one line}`` if they do
    not start.
    """
    _, reason = _program()
    try:
        state: dict[str, Any] = {"error": reason} if reason else _ask("null")
    except ValueError as error:
        return {"error": str(error)}
    return state


@cache
def _program() -> tuple[subprocess.Popen[str], str | None]:
    """Return the process that runs DeepSpeed until this one ends, and why its import failed, or
    None.
    """
    command = [sys.executable, "-m", "zero_topo.doctor.judge"]
    pipe = subprocess.PIPE
    program = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace"
    )
    if _line(program):
        return program, None
    assert program.stderr
    *_, last = [
        f"it did not answer within {PATIENCE_S:.0f} s",
        *program.stderr.read().strip().splitlines(),
    ]
    return program, cut(last)


@cache
def _ask(request: str) -> Any:  # cached for the next call, so it must not be changed
    program, _ = _program()
    assert program.stdin
    try:
        print(request, file=program.stdin, flush=True)
        return json.loads(_line(program))
    except (BrokenPipeError, ValueError):
        raise ValueError(
            "DeepSpeed ended while it read this config; see zero-topo doctor"
        ) from None


def _line(program: subprocess.Popen[str]) -> str:
    """Return the program's next line; an empty one if it ends, or does not answer in time and is
    ended.
    """
    assert program.stdout
    timer = Timer(PATIENCE_S, program.kill)
    timer.start()
    try:
        return program.stdout.readline()
    finally:
        timer.cancel()


def _batches(ds_config: Mapping[str, Any], ranks: int | None) -> Iterator[str]:
    stated = {key: ds_config[key] for key in BATCHES if ds_config.get(key) is not None}
    wrong = [key for key, value in stated.items() if value != "auto" and not _is_count(value)]
    for key in wrong:
        yield (
            f"{key} = {as_json(stated[key])}: it counts sequences or passes; give a whole number "
            "of at least 1"
        )
    if wrong or "auto" in stated.values():
        return
    if BATCH not in stated:
        if MICRO_BATCH not in stated:
            yield f"{MICRO_BATCH} is missing, and {BATCH} too: DeepSpeed needs one; give the former"
        return
    per_step = int(stated.get(MICRO_BATCH, 1) * stated.get(ACCUMULATION, 1)) * (ranks or 1)
    whole = (
        stated[BATCH] == per_step
        if len(stated) == len(BATCHES) and ranks
        else stated[BATCH] % per_step == 0
    )
    if not whole:
        factors = [f"{key} {stated[key]}" for key in (MICRO_BATCH, ACCUMULATION) if key in stated]
        product = " x ".join([*factors, *([f"{ranks} ranks"] if ranks else [])])
        yield (
            f"{BATCH} = {stated[BATCH]} is no multiple of {per_step:,}, which is {product}; "
            f"leave {BATCH} out"
        )


def _is_count(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value >= 1
        and value % 1 == 0
    )
