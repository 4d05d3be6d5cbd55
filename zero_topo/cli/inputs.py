# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What several commands read from the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from zero_topo.config.deepspeed_json import parse_object
from zero_topo.strict import cut
from zero_topo.topology import Topology, resolve_topology

LIKE_PARAMS = "20e9, 20B or 350M"
MOST = 10**24
_COUNT = re.compile(
    r"(?P<number>\d{1,99}(?:\.\d{0,99})?(?:[eE]\+?\d{1,3})?)(?P<suffix>[kKmMbBtT]?)", re.ASCII
)
_SUFFIXES: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def read_count(text: str, what: str, like: str = "8 or 4K", most: int = MOST) -> int:
    """A positive whole number such as ``"20e9"``, ``"20B"`` or ``"350M"``.

    Args:
        text: what the user wrote.
        what: the option.
        like: numbers that the option may have, for the error.
        most: the largest.

    Raises:
        ValueError: for anything else, or more than ``most``.
    """
    match = _COUNT.fullmatch(text.strip())
    value = Decimal(match["number"]) * _SUFFIXES[match["suffix"].lower()] if match else Decimal(0)
    if value < 1 or value != value.to_integral_value():
        raise ValueError(f"{what} {cut(text)!r} is not a positive whole number, such as {like}")
    if value > most:
        raise ValueError(
            f"{what} {cut(text)!r} is more than {most:,}, the most that is planned for"
        )
    return int(value)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Begin every line of a refusal with the file that it is about, unless the line names it."""
    try:
        yield
    except ValueError as error:
        lines = [
            line if source in line else f"{cut(source, 200)}: {line}"
            for line in str(error).splitlines()
        ]
        raise ValueError("\n".join(lines)) from None


def refuse(problems: Iterable[str]) -> None:
    """Raise ValueError with all problems, each on one line and once, if there are any."""
    if lines := list(dict.fromkeys(problems)):
        raise ValueError("\n".join(lines))


def machine(setting: str | Mapping[str, Any], world_size: int | None) -> Topology:
    """The machine that an option or a config's ``topology`` names.

    A preset without a number of ranks is one node of that machine.

    Args:
        setting: as the config's ``topology`` key; a string that starts with ``{`` is an inline
            object.
        world_size: ranks, or None.

    Raises:
        ValueError: if there is no such machine or its ranks do not add up.
    """
    if isinstance(setting, str) and setting.lstrip().startswith("{"):
        setting = parse_object(setting, "topology")
    return resolve_topology(setting, world_size)
