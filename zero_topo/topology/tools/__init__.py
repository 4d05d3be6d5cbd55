# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads a node's devices from device tools; each file runs one tool, and recognises and parses its
output.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from zero_topo.topology.devices import DeviceTree

TIMEOUT = 10.0
"""Seconds that a tool may take; a driver in trouble can make it hang for good."""

Runner = Callable[[tuple[str, ...]], str | None]
"""Runs a command: its output; None if it is not installed. Raises ValueError if it fails or does
not answer.
"""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[\d{0,2}(?:;\d{1,2})*m")
"""Colours and underlines of a terminal, also without the escape character, which some forms
drop.
"""
_PREFIX = re.compile(r" *(?:#|[\w.-]+:)(?= |$)", re.MULTILINE)
_JSON = re.compile(r"^[\[{]\s*(?:$|[\[{\"].*)", re.MULTILINE)


@dataclass(frozen=True)
class Tool:
    """Describes a source of device trees.

    Attributes:
        name: name in the sources of a topology.
        ask: runs it on this node: the tree, or None if it is not installed or finds no device.
            ValueError if it fails.
        matches: whether a captured text is its output; None if its output cannot be captured.
        parse: the tree of a captured text. ValueError if the text is broken.
    """

    name: str
    ask: Callable[[Runner], DeviceTree | None]
    matches: Callable[[str], bool] | None = None
    parse: Callable[[str], DeviceTree] | None = None


def run_tool(command: tuple[str, ...]) -> str | None:
    """Run a tool if it is installed.

    Returns:
        Its output, or None if there is no such program.

    Raises:
        ValueError: if it fails or takes more than 10 s.
    """
    path = shutil.which(command[0])
    if path is None:
        return None
    line = " ".join(command)
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, errors="replace", timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"`{line}` did not answer within {TIMEOUT:.0f} s") from None
    except OSError as error:
        raise ValueError(f"`{line}` cannot be run ({error.strerror})") from None
    if done.returncode:
        raise ValueError(f"`{line}` failed with exit status {done.returncode}")
    return done.stdout


def asking(
    command: tuple[str, ...], parse: Callable[[str], DeviceTree]
) -> Callable[[Runner], DeviceTree | None]:
    """Return the ``ask`` of a tool that is a program."""

    def ask(run: Runner) -> DeviceTree | None:
        text = run(command)
        return parse(clean(text)) if text and text.strip() else None

    return ask


def clean(text: str) -> str:
    """Return a tool's output without additions of a terminal, a shell or a collecting program.

    These are escape sequences, carriage returns, a prefix that every line has (``host: `` of pdsh,
    ``# `` of a comment), and around JSON the lines of prompts and warnings.
    """
    text = _ESCAPE.sub("", text).replace("\r", "")
    lines = [line for line in text.splitlines() if line.strip()]
    if (
        lines
        and (prefix := _PREFIX.match(lines[0]))
        and all(line.startswith(prefix[0]) for line in lines)
    ):
        text = "\n".join(
            line.removeprefix(prefix[0]).removeprefix(" ") for line in text.splitlines()
        )
    if start := _JSON.search(text):
        text = text[start.start() : max(text.rfind("}"), text.rfind("]")) + 1]
    return text
