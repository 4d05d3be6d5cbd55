# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the sparse modes send: the meter counts what formulas say of the actual picks, and the papers' bounds hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.ranks.test_sparse_modes import DATA_PARALLEL, HIERARCHY, run, sparse_world
from zero_topo.cost import Workload, step_bytes
from zero_topo.sync.picks import message_bytes, share

NUMEL = 19_200
WORD = 4


def counts(peers: int) -> int:
    """Bytes that tell each peer a length, and that all is finite."""
    return (peers - 1) * (8 + 1)


@pytest.mark.parametrize("value_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("peers", [2, 3, 8])
def test_topk_a_sends_its_picks_to_every_peer(peers: int, value_dtype: str) -> None:
    """2 k words to each of P - 1 peers, exactly."""
    w = sparse_world(DATA_PARALLEL, peers, "topk_a", (NUMEL,), density=0.01, value_dtype=value_dtype)
    k = share(0.01, NUMEL)
    expected = (peers - 1) * message_bytes(k, 4 if value_dtype == "fp32" else 2) + counts(peers)
    assert {found[0].sent for found in run(w, 1)} == {expected}


def test_gtopk_sends_k_picks_at_each_level() -> None:
    """Up and down a tree of P ranks there are 2 (P - 1) messages of 2 k words, at most 2 log P from one rank."""
    for peers in (2, 3, 4, 8):
        w = sparse_world(DATA_PARALLEL, peers, "gtopk", (NUMEL,), density=0.01)
        message = message_bytes(share(0.01, NUMEL), 4)
        sent = [found[0].sent - (peers - 1) for found in run(w, 1)]
        assert sum(sent) == 2 * (peers - 1) * message
        assert max(sent) <= 2 * (peers - 1).bit_length() * message


@pytest.mark.parametrize("peers", [2, 3, 4, 8, 16])
def test_oktopk_stays_under_its_bound_and_topk_a_grows(peers: int) -> None:
    """On the steps that reuse thresholds, at most 6 k (P - 1) / P words on average; TopkA's 2 k (P - 1) grow with P."""
    density, steps = 0.01, 6
    k = share(density, NUMEL)
    settings: dict[str, Any] = {"density": density, "tau": 64, "tau_prime": 4}
    results = run(sparse_world(DATA_PARALLEL, peers, "oktopk", (NUMEL,), **settings), steps)
    bound = 6 * k * (peers - 1) / peers * WORD
    for step in range(4, steps):
        if step % 4:
            assert sum(found[step].sent for found in results) / peers <= bound + 4 * counts(peers)
    naive = run(sparse_world(DATA_PARALLEL, peers, "topk_a", (NUMEL,), density=density), 1)
    assert naive[0][0].sent >= 2 * k * (peers - 1) * WORD


def test_sharded_oktopk_sends_a_third() -> None:
    """Sums that stay with their owners: about 2 k (P - 1) / P words, on the steps that reuse thresholds."""
    settings: dict[str, Any] = {"density": 0.01, "tau_prime": 2}
    w = sparse_world(HIERARCHY["topo"], None, "oktopk", (NUMEL,), sharded=True, **settings)
    n = 2 * w.columns
    k, results = share(0.01, n), run(w, 4)
    assert max(found[3].sent for found in results) <= 1.25 * 2 * k * WORD + 4 * counts(2)
    assert min(found[2].sent for found in results) > max(found[3].sent for found in results)


@pytest.mark.parametrize("mode", ["topk_a", "topk_dsa", "oktopk", "gtopk"])
def test_the_cost_formula_is_what_is_sent_but_for_counts(mode: str) -> None:
    """Averaged over ranks, on picks that do not coincide; an upper bound for gtopk, whose root sends most."""
    w = sparse_world(DATA_PARALLEL, 4, mode, (NUMEL,), density=0.01, **({"tau_prime": 2} if mode == "oktopk" else {}))
    (formula,) = step_bytes(w.config, replace(Workload.uniform([NUMEL], itemsize=4), sync_itemsize=4)).values()
    results = run(w, 4)
    sent = sum(found[3].sent for found in results) / 4
    if mode == "gtopk":
        assert max(found[3].sent for found in results) <= 2 * formula + counts(4)
    else:
        assert sent == pytest.approx(formula, rel=0.35 if mode == "oktopk" else 0.02, abs=4 * counts(4))
