# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which parameters take part in a sparse mode, what the others cost, and in how many runs each mode takes them."""

from __future__ import annotations

from tests.harness import run_threads
from tests.ranks.test_sparse_modes import DATA_PARALLEL, HIERARCHY, mode_of, sparse_world
from tests.ranks.worlds import NUMELS, PLAIN, world
from zero_topo.topology.presets import emulated


def test_what_does_not_take_part_costs_nothing() -> None:
    """Without a parameter, a peer or feedback no residual is kept."""
    w = sparse_world(DATA_PARALLEL, 2, "topk_a", NUMELS, exclude=["*"])
    forgets = sparse_world(DATA_PARALLEL, 2, "topk_a", NUMELS, error_feedback=False)
    alone = world({**HIERARCHY["topo"], "quantize": PLAIN, "sync": {"mode": "topk_a"}}, emulated(1, 1, 2))

    def rank_main(rank: int) -> list[int]:
        assert not mode_of(w.engine()).active
        return [mode_of(of.engine()).state_bytes() for of in (w, forgets, alone)]

    assert run_threads(2, rank_main) == [[0, 0, 0]] * 2


def test_whole_gradients_are_one_run_and_others_a_bucket_each() -> None:
    """What a mode selects of all is not cut into DeepSpeed's buckets, dense sync is; neither sees updates."""
    dense = world({**DATA_PARALLEL, "quantize": PLAIN}, emulated(2, 1, 1))
    sparse = (sparse_world(DATA_PARALLEL, 2, "topk_a", NUMELS, select=select) for select in ("all", "run"))
    worlds = (*sparse, dense)

    def rank_main(rank: int) -> list[int | None]:
        engines = [w.engine(chunk=640) for w in worlds]
        assert [engine.gradients.mode.wants_updates for engine in engines] == [False] * 3
        return [engine.run_numel for engine in engines]

    assert run_threads(2, rank_main) == [[None, 640, 640]] * 2
