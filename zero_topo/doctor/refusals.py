# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reports what DeepSpeed itself refuses in a config, before a job is queued.

A separate process runs the installed DeepSpeed (``judge.py``), because planning commands import
neither it nor torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from threading import Timer
from typing import Any

from zero_topo.config.parts import ROOT
from zero_topo.config.stock_keys import translate
from zero_topo.strict import cut
from zero_topo.versions import installed

PATIENCE_S = 180.0
"""Time limit in seconds of DeepSpeed's import, which waits forever for a lock of a crashed job, and
of an answer.
"""


def deepspeed_refusals(ds_config: Mapping[str, Any], ranks: int | None) -> list[str]:
    """Return in one line, in DeepSpeed's words, why it would not start with a config; empty if it
    would, or if DeepSpeed cannot be run, see :func:`unasked`.

    Args:
        ds_config: the whole config, of which :func:`~zero_topo.config.deepspeed_problems` finds
            nothing.
        ranks: data-parallel ranks of the job, or None if they are not known.
    """
    if unasked() is not None:
        return []
    config = {key: value for key, value in translate(ds_config).config.items() if key != ROOT}
    return list(_ask(json.dumps([config, ranks])))


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
