# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tests of ranks create their tensors where ``ZERO_TOPO_TEST_DEVICE`` says, in the ranks' threads
and outside them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device import on_device
from tests.plans import BLOCK
from zero_topo.observe.log import LOGGER
from zero_topo.quant import spec


@pytest.fixture(autouse=True, scope="session")
def tests_device() -> Iterator[None]:
    """In the main thread; `run_threads` does it in each rank's."""
    with on_device():
        yield


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of few elements have several blocks."""
    monkeypatch.setattr(spec, "BLOCK", BLOCK)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What a test's ranks set of the package's log, as a host does at its start, ends with the
    test.
    """
    level, handlers = LOGGER.level, list(LOGGER.handlers)
    yield
    LOGGER.setLevel(level)
    LOGGER.handlers[:] = handlers
