# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Units are written so that people read them right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.data import table
from zero_topo.units import format_bytes, format_count, format_seconds

WRITTEN = table("units")


@pytest.mark.parametrize("write", [format_bytes, format_seconds, format_count])
def test_numbers_are_written_in_the_unit_people_use(write: Callable[[float], str]) -> None:
    """The largest fitting one; counts to three digits."""
    for number, text in WRITTEN[write.__name__.removeprefix("format_")]:
        assert write(number) == text
