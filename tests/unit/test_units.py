# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Units are written so that people read them right, and read back to what was written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.units import GB, GIB, KB, MB, PB, format_bytes, format_rate, format_seconds, parse_bytes


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


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("512", 512),
        ("64 GB", 64 * GB),
        ("64gb", 64 * GB),
        ("1.5 GiB", 3 * GIB // 2),
        ("5e8", 500_000_000),
        (" .5 MB ", MB // 2),
        ("2. KB", 2 * KB),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_bytes_are_read_with_decimal_and_binary_units(text: str, n: int) -> None:
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["", "GB", "-1 GB", "1 2", "1.2.3", "ten GB", "nan", "inf"])
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="64 GB"):
        parse_bytes(text)


def test_an_unknown_unit_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=re.escape("'gbi' is not a unit of bytes; did you mean 'GB'")):
        parse_bytes("3 gbi")


@given(st.integers(0, 10**19))
def test_a_written_size_reads_back_within_its_rounding(n: int) -> None:
    text = format_bytes(n)
    assert abs(parse_bytes(text) - n) <= 0.005 * max(n, 1)
    assert float(text.split()[0]) < 1000 or text.endswith("PB")
