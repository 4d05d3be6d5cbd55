# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Commands and options of earlier releases, and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

IN_A_CHECKOUT = "benchmarks are not installed with zero_topo; run in a checkout: python -m benchmarks"
MOVED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "bench": {
            name: f"{IN_A_CHECKOUT} {name}" for name in ("quantizers", "cluster", "convergence", "scale", "sparse")
        },
        "simulate": {name: f"{IN_A_CHECKOUT} fit RECORD {name} SCHEMES" for name in ("--on", "--predict")},
    }
)
"""Command -> word after it -> what to type instead."""


def check_moved(words: Sequence[str]) -> None:
    """Refuse a command line that has a word of an earlier release.

    Raises:
        ValueError: with what to type instead.
    """
    for word in words[1:]:
        name = word.partition("=")[0]
        if instead := MOVED.get(words[0], {}).get(name):
            raise ValueError(f"{words[0]} {name}: {instead}")
