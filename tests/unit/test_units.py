# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Units are written so that people read them right, and say the number they were given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.units import GB, KB, MB, PB, TB, format_bytes, format_rate, format_seconds


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (0.5, "0.5 B"),
        (999, "999 B"),
        (999.7, "1.00 KB"),
        (1000, "1.00 KB"),
        (999_994, "999.99 KB"),
        (999_999, "1.00 MB"),
        (1.5 * GB, "1.50 GB"),
        (-2 * KB, "-2.00 KB"),
        (12_345 * PB, "12345.00 PB"),
    ],
)
def test_bytes_are_written_in_the_largest_fitting_unit(n: float, text: str) -> None:
    assert format_bytes(n) == text


def test_rates_are_bytes_per_second() -> None:
    assert format_rate(12.5 * GB) == "12.50 GB/s"


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (0, "0 s"),
        (3.2e-6, "3.2 us"),
        (5e-10, "0.5 ns"),
        (0.012, "12.0 ms"),
        (0.99999, "1.00 s"),
        (1.5, "1.50 s"),
        (59.999, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.9, "1 h 00 min"),
        (3720, "1 h 02 min"),
        (-1.5, "-1.50 s"),
    ],
)
def test_seconds_are_written_in_the_unit_people_use(s: float, text: str) -> None:
    assert format_seconds(s) == text


@given(st.integers(0, 10**19))
def test_a_written_size_says_the_number_within_its_rounding(n: int) -> None:
    number, unit = format_bytes(n).split()
    sizes = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "PB": PB}
    assert abs(float(number) * sizes[unit] - n) <= 0.005 * max(n, 1)
    assert float(number) < 1000 or unit == "PB"
