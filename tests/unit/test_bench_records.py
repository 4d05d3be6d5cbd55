# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Records: what every benchmark's result carries."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from zero_topo.bench import records
from zero_topo.bench.records import Spread


def test_a_record_says_where_and_with_what_it_was_measured(tmp_path: Path) -> None:
    """Machine, versions and settings stand beside the numbers, and survive the file."""
    content = records.record("quantizers", {"sizes": [1, 2]}, {"results": [3]})
    path = tmp_path / "new" / "record.json"
    records.write(path, content)
    read = json.loads(path.read_text())
    assert read == content and read["results"] == [3] and read["settings"] == {"sizes": [1, 2]}
    assert read["format"] == records.FORMAT and read["benchmark"] == "quantizers"
    assert read["machine"]["processor"] and read["machine"]["cores"] >= 1 and read["machine"]["memory_bytes"] > 2**20
    assert read["versions"]["python"] == platform.python_version() and read["versions"]["torch"]


def test_a_library_that_is_not_there_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record made without a library says so rather than failing."""
    monkeypatch.setattr(records, "LIBRARIES", ("torch", "no-such-library"))
    assert records.versions()["no-such-library"] is None


def test_outside_of_a_checkout_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed from a wheel, or without git, the record has the version alone."""
    monkeypatch.setenv("PATH", "")
    assert records.versions()["commit"] is None


def test_a_spread_is_median_and_extremes() -> None:
    """Of an even number of values the median is the mean of the middle two."""
    assert Spread.of([4.0, 1.0, 2.0, 10.0]) == Spread(median=3.0, min=1.0, max=10.0, repeats=4)
