# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Refuses to run these tests outside a launch."""

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


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of few elements have several blocks."""
    monkeypatch.setattr(spec, "BLOCK", BLOCK)
