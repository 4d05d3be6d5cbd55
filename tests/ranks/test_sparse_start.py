# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sparse modes begin gently if they are asked to: first everything, then ever fewer elements."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.marks import often
from tests.ranks.test_sparse_modes import (
    HIERARCHY,
    MODES,
    PLACES,
    check_nothing_is_lost,
    mode_of,
    run,
    sparse_world,
)
from tests.ranks.worlds import NUMELS, owned, synced

START = 2
ALL = [*MODES, "tagc"]


@pytest.mark.parametrize("setting", often(("topo", "data parallel"), PLACES))
@pytest.mark.parametrize("mode", ALL)
def test_the_first_steps_are_those_of_dense_sync(mode: str, setting: str) -> None:
    """All of the gradient arrives, and the residual is zero; then the mode begins, and nothing is
    lost.
    """
    peers = 4 if setting == "data parallel" else None
    w = sparse_world(PLACES[setting], peers, mode, NUMELS, start=START, value_dtype="fp32")
    results = run(w, START + 3)
    for rank, found in enumerate(results):
        for step in range(START):
            torch.testing.assert_close(
                found[step].own, w.own_mean(rank, step), atol=1e-6, rtol=1e-6
            )
            assert not any(bool(part.any()) for _, part in found[step].residuals)
            assert found[step].report["density"] == found[step].report["density_asked"] == 1
        assert any(bool(part.any()) for _, part in found[START].residuals)
    check_nothing_is_lost(w, results)


def test_the_residual_of_another_run_comes_with_the_first_dense_step() -> None:
    """After a checkpoint of other ranks the steps are counted anew; its residuals do not wait for
    the last of them.
    """
    w = sparse_world(HIERARCHY["topo"], None, "oktopk", NUMELS, start=START)

    def rank_main(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        engine = w.engine()
        mode_of(engine).residual.fill_(1.0)
        synced(engine, w.grads(rank, 0))
        first = owned(engine)
        engine.end_step(skipped=False)
        synced(engine, w.grads(rank, 1))
        return first, mode_of(engine).residual, owned(engine)

    for rank, (first, residual, second) in enumerate(run_threads(w.size, rank_main)):
        added = torch.full((w.columns,), 2.0)  # of two peers
        added[: w.config.plan.shard_numel(NUMELS[0])] = 0  # a vector, which is not sparse
        torch.testing.assert_close(first, w.own_mean(rank, 0) + added, atol=1e-5, rtol=0)
        torch.testing.assert_close(second, w.own_mean(rank, 1), atol=1e-6, rtol=1e-6)
        assert not residual.any()


@pytest.mark.parametrize("mode", ALL)
def test_the_density_goes_down_geometrically(mode: str) -> None:
    """Equal factors apart from DGC's quarter, counted from the end of the dense steps; what is
    selected follows.
    """
    warmup, steps = 4, START + 6
    last = {"theta": 0.99} if mode == "tagc" else {"density": 0.01}
    gently = {"start": START, "warmup": warmup, "start_density": 0.25, "value_dtype": "fp32"}
    w = sparse_world(HIERARCHY["topo"], None, mode, (65_536,), **gently, **last)
    results = run(w, steps)
    expected = (
        [1.0] * START + [0.25 * 0.04 ** (step / warmup) for step in range(warmup)] + [0.01, 0.01]
    )
    for found in results:
        assert [step.report["density_asked"] for step in found] == pytest.approx(expected)
        about = 0.3 if mode == "oktopk" else 0.02  # within 0.8 and 1.25 k
        assert [step.report["density"] for step in found] == pytest.approx(expected, rel=about)
        assert all(
            more.sent > less.sent for more, less in pairwise(found[START : START + warmup + 1])
        )
    check_nothing_is_lost(w, results)
