# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sparse sync under DeepSpeed: every mode trains, over real messages."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.launcher.training import DATA_PARALLEL, Job, block, largest_difference, train

MODES: dict[str, dict[str, Any]] = {
    "topk_a": {"mode": "topk_a"},
    "topk_dsa": {"mode": "topk_dsa"},
    "gtopk": {"mode": "gtopk"},
    "gaussian_k": {"mode": "gaussian_k"},
    "oktopk": {"mode": "oktopk", "tau": 4, "tau_prime": 4},
    "sharded": {"mode": "oktopk", "tau_prime": 4, "sharded": True},
}
PLANS: dict[str, dict[str, Any]] = {"hierarchy": {}, "data parallel": DATA_PARALLEL}


def sparse(mode: str, plan: str = "hierarchy", density: float = 0.1) -> dict[str, Any]:
    """A block with a sparse mode, copies compared at every step."""
    return block("topo", **PLANS[plan], sync={**MODES[mode], "density": density})


@pytest.mark.parametrize(
    ("mode", "plan"),
    [
        ("topk_a", "hierarchy"),
        ("topk_dsa", "data parallel"),
        ("gtopk", "data parallel"),
        ("gaussian_k", "hierarchy"),
        ("oktopk", "data parallel"),
        ("sharded", "hierarchy"),
    ],
)
def test_a_tenth_of_the_gradient_trains(mode: str, plan: str) -> None:
    """The loss falls, and at density 1 it is that of dense sync."""
    expected = dense()
    assert train(Job(zero_topo=sparse(mode, plan), steps=20))[-1] < 0.6 * expected[0]
    exact = train(Job(zero_topo=sparse(mode, plan, 1.0), steps=len(expected)))
    assert largest_difference(expected, exact) <= 1e-5 * expected[0]


@cache
def dense() -> list[float]:
    """Losses with dense sync."""
    return train(Job(zero_topo=block("topo"), steps=6))


def test_a_quarter_of_the_update_trains() -> None:
    """Radius: the loss falls."""
    sync = {"mode": "radius", "density": 0.25, "interval": 4, "start": 2}
    losses = train(Job(zero_topo=block("topo", **DATA_PARALLEL, sync=sync), steps=12))
    assert losses[-1] < 0.7 * losses[0]
