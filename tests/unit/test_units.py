# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Units are written so that people read them right, and say the number they were given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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


@pytest.mark.parametrize(
    ("write", "number", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 1, "1 B"),
        (format_bytes, 0.5, "0.5 B"),
        (format_bytes, 999, "999 B"),
        (format_bytes, 999.7, "1.00 KB"),
        (format_bytes, 1000, "1.00 KB"),
        (format_bytes, 999_994, "999.99 KB"),
        (format_bytes, 999_999, "1.00 MB"),
        (format_bytes, 1.5 * GB, "1.50 GB"),
        (format_bytes, 12_345 * PB, "12345.00 PB"),
        (format_seconds, 0, "0 s"),
        (format_seconds, 3.2e-6, "3.2 us"),
        (format_seconds, 5e-10, "0.5 ns"),
        (format_seconds, 0.012, "12.0 ms"),
        (format_seconds, 0.99999, "1.00 s"),
        (format_seconds, 1.5, "1.50 s"),
        (format_seconds, 59.999, "1 min 00 s"),
        (format_seconds, 125, "2 min 05 s"),
        (format_seconds, 3599.9, "1 h 00 min"),
        (format_seconds, 3720, "1 h 02 min"),
    ],
)
def test_numbers_are_written_in_the_unit_people_use(
    write: Callable[[float], str], number: float, text: str
) -> None:
    """Bytes in the largest fitting one."""
    assert write(number) == text


@given(st.integers(0, 10**19))
def test_a_written_size_says_the_number_within_its_rounding(n: int) -> None:
    number, unit = format_bytes(n).split()
    sizes = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "PB": PB}
    assert abs(float(number) * sizes[unit] - n) <= 0.005 * max(n, 1)
    assert float(number) < 1000 or unit == "PB"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999"),
        (124_439_808, "124M"),
        (999_999_999, "1.00B"),
        (19_999_824_231, "20.0B"),
        (4 * 10**15, "4,000T"),
    ],
)
def test_counts_are_written_to_three_digits(count: int, text: str) -> None:
    assert format_count(count) == text
