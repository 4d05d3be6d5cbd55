# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""These tests run in a launch; those that are not marked ``core`` are long."""

from __future__ import annotations

import pytest

from tests.plans import BLOCK
from zero_topo.quant import spec


def pytest_configure(config: pytest.Config) -> None:
    """They need the fixtures of `tests/rank_plugin.py`, and its process group."""
    if not config.pluginmanager.hasplugin("tests.rank_plugin"):
        raise pytest.UsageError(
            "these tests run on every rank of a launch: `make test-launcher K=<part of a name>`"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A launched test takes four core-seconds: ``make test`` runs one of each kind."""
    for item in items:
        if not item.get_closest_marker("core"):
            item.add_marker("long")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of few elements have several blocks."""
    monkeypatch.setattr(spec, "BLOCK", BLOCK)
