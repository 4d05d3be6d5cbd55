# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Units are written so that people read them right, and say the number they were given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zero_topo.units import (
    GB,
    KB,
    MB,
    PB,
    TB,
    format_bytes,
    format_count,
    format_seconds,
)

WRITTEN: list[tuple[Callable[[Any], str], float, str]] = [
    (format_bytes, 0.5, "0.5 B"),
    (format_bytes, 999.7, "1.00 KB"),
    (format_bytes, 999_999, "1.00 MB"),
    (format_bytes, 12_345 * PB, "12345.00 PB"),
    (format_seconds, 0, "0 s"),
    (format_seconds, 5e-10, "0.5 ns"),
    (format_seconds, 0.99999, "1.00 s"),
    (format_seconds, 59.999, "1 min 00 s"),
    (format_seconds, 3720, "1 h 02 min"),
    (format_count, 999, "999"),
    (format_count, 999_999_999, "1.00B"),
    (format_count, 4 * 10**15, "4,000T"),
]


def test_numbers_are_written_in_the_unit_people_use() -> None:
    """The largest fitting one; counts to three digits."""
    assert [write(number) for write, number, _ in WRITTEN] == [text for *_, text in WRITTEN]


@given(st.integers(0, 10**19))
def test_a_written_size_says_the_number_within_its_rounding(n: int) -> None:
    number, unit = format_bytes(n).split()
    sizes = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "PB": PB}
    assert abs(float(number) * sizes[unit] - n) <= 0.005 * max(n, 1)
    assert float(number) < 1000 or unit == "PB"
