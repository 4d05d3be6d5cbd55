# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What options of benchmarks name: schemes, files of more, a machine's shape."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.schemes import KNOWN, BenchScheme
from zero_topo.strict import did_you_mean


def schemes_named(
    names: Iterable[str], extra: Mapping[str, BenchScheme] = MappingProxyType({})
) -> list[BenchScheme]:
    """Schemes by name.

    Args:
        names: of :data:`KNOWN` or ``extra``.
        extra: more schemes, from :func:`load_blocks`.

    Raises:
        ValueError: for an unknown name, naming the nearest, or the same twice.
    """
    known = {**KNOWN, **extra}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"unknown scheme {name!r}{did_you_mean(name, known)} (known: {list(known)})"
            )
    if len(set(wanted)) < len(wanted) or not wanted:
        raise ValueError(f"schemes {wanted} must be at least one, each named once")
    return [known[name] for name in wanted]


def load_blocks(path: Path | None) -> dict[str, BenchScheme]:
    """More schemes from a JSON file: an object of name -> ``zero_topo`` block without its topology.

    Where another optimizer than AdamW steps: name ->
    ``{"block": the block, "optimizer": its type}``.

    Raises:
        ValueError: if the file is missing or of another form.
    """
    if path is None:
        return {}
    data = _read("blocks", path)
    if not isinstance(data, dict) or not all(isinstance(entry, dict) for entry in data.values()):
        raise ValueError(
            f"blocks {path}: must be an object of name -> zero_topo block, got {data!r}"
        )
    return {name: _scheme(name, entry) for name, entry in data.items()}


def _scheme(name: str, entry: dict[str, Any]) -> BenchScheme:
    if entry.keys() == {"block", "optimizer"} and isinstance(entry["block"], dict):
        return BenchScheme(name, entry["block"], optimizer=str(entry["optimizer"]))
    return BenchScheme(name, entry)


def load_record(path: Path | None, benchmark: str) -> dict[str, Any]:
    """A record that an earlier run of a benchmark wrote.

    Raises:
        ValueError: if no file is named, or it is missing or something else.
    """
    if path is None:
        raise ValueError("name the record to go on with: --record FILE")
    data = _read("record", path)
    if not isinstance(data, dict) or data.get("benchmark") != benchmark:
        raise ValueError(f"record {path}: was not written by python -m benchmarks {benchmark}")
    return data


def read_shape(text: str) -> tuple[int, int, int]:
    """``"2x4x2"``: nodes, GPUs of a node, GCDs of a GPU.

    Raises:
        ValueError: for anything else.
    """
    words = text.lower().split("x")
    if len(words) != 3 or not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"shape {text!r} is not nodes x GPUs x GCDs; write it as 2x2x2")
    nodes, gpus, dies = map(int, words)
    return nodes, gpus, dies


def read_rate(text: str) -> float:
    """``"1e-3"``: a learning rate.

    Raises:
        ValueError: for anything that is not positive.
    """
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise ValueError(f"rate {text!r} is not a positive number; write it as 1e-3")
    return rate


def _read(what: str, path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} {path}: {error}") from None
