# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The ``zero-topo`` command: its numbers, its one-line errors, and that it needs no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import Run
from tests.launching import ended
from tests.plans import config_file
from zero_topo.cli.inputs import read_count


def test_check_does_not_say_ok_alone_of_a_plan_that_is_not_likely_to_fit(
    run: Run, tmp_path: Path
) -> None:
    path = config_file(tmp_path, {"scheme": "topo"})
    small, large = (
        run("check", path, "--machine", "frontier", "--nodes", "4", "--params", n)
        for n in ("1B", "45B")
    )
    assert small[0] == large[0] == 0 and small[1].endswith("\nok\n")
    assert "- warning: scheme topo needs" in large[1] and large[1].endswith(
        "\nok, with a warning\n"
    )


def test_a_reader_that_stops_early_gets_no_traceback(tmp_path: Path) -> None:
    machine = tmp_path / "m.json"
    order = list(range(80_000))[::-1]  # more text than a pipe holds
    machine.write_text(
        json.dumps({"nodes": 10_000, "gpus_per_node": 8, "ranks_per_gpu": 1, "order": order})
    )
    command = f"{sys.executable} -m zero_topo.cli topology --from {machine} --json | head -c 10"
    assert ended(["sh", "-c", command], timeout=60).stderr == ""


@given(number=st.integers(1, 10**15))
def test_a_count_is_read_as_written(number: int) -> None:
    assert read_count(str(number), "n") == number
    assert read_count(f"{number}B", "n") == number * 10**9
    assert read_count(f"{number}e3", "n") == number * 1000


@pytest.mark.parametrize(
    ("text", "value"), [("1.3b", 1_300_000_000), ("350M", 350_000_000), ("2.5e9", 2_500_000_000)]
)
def test_decimal_counts_are_exact(text: str, value: int) -> None:
    assert read_count(text, "n") == value
