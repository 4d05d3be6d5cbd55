# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Options and settings of all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# One machine's scheduling must not fail a test of arithmetic. `make test` draws the same examples
# each time; `--hypothesis-profile=thorough` draws others, and more.
hypothesis.settings.register_profile(
    "zero_topo", max_examples=15, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile("thorough", max_examples=150, deadline=None)
hypothesis.settings.load_profile("zero_topo")


@pytest.fixture(autouse=True, scope="module")
def reference_again() -> Iterator[None]:
    """An engine selects the best kernels for its whole process: tests of another file start with
    the reference.
    """
    yield
    if operators := sys.modules.get("zero_topo.quant.operators"):
        operators.use("reference", operators.CPU)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the launch that runs tests/launcher."""
    group = parser.getgroup("launcher", "the launch that runs tests/launcher")
    group.addoption(
        "--launcher-k",
        default="",
        metavar="EXPRESSION",
        help="as -k, for the tests in tests/launcher",
    )
    group.addoption(
        "--launcher-ranks", type=int, default=4, metavar="N", help="ranks of the launch (default 4)"
    )
    group.addoption(
        "--launcher-real",
        action="store_true",
        help="ranks of DeepSpeed's launcher, not forked ones",
    )
