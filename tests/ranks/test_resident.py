# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weights that are stored as INT8: every copy has the masters' INT8 values, after every publish,
edit, load and save.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.test_publish import masters_of, publish_step
from tests.ranks.worlds import PLAIN, World, either_placement, loaded, world
from zero_topo.engine.agreement import checksum
from zero_topo.engine.stage3 import Stage3
from zero_topo.engine.weights import Weights
from zero_topo.topology.model import Topology

BLOCK = 64
NUMELS = (8 * BLOCK, 5, 8 * 2 * BLOCK, 8 * 3 * BLOCK - 7, 100, 8 * BLOCK)
"""Six parameters on eight ranks, of which the second and fifth stay plain."""
PARAM_INDICES = tuple(range(len(NUMELS)))
CODED = (True, False, True, True, False, True)


def block(scheme: str = "topo", **more: Any) -> dict[str, Any]:
    """A block whose weights are codes."""
    return {"scheme": scheme, "quantize": {"resident": "int8"}, **more}


WORLDS = {
    "topo": block(),
    "whole": block(weights="rank", secondary=None),
    "node": block(weights="node", secondary="node"),
    "replicated optimizer": block(optimizer="node"),
}


def resident(engine: Stage3) -> Weights:
    """The engine's weights, which are codes."""
    assert engine.weights.storage.store is not None
    return engine.weights


def begun(w: World, chunk: int = 1 << 20, dtype: torch.dtype = torch.bfloat16) -> Stage3:
    """An engine that holds step 0 of the walk of masters."""
    engine, _ = loaded(w, dtype, chunk)
    engine.weights.storage.own_row.copy_(masters_of(w, engine.layout.rank, w.size, 0, 1e-2)[0])
    engine.restart(masters_of(w, engine.layout.rank, w.size, 0, 1e-2)[0])
    return engine


def walked(w: World, engine: Stage3, steps: range, rate: float = 1e-3) -> None:
    """Publish some steps of the walk."""
    for step in steps:
        engine.weights.mark_updated(
            masters=masters_of(w, engine.layout.rank, w.config.plan.optimizer, step, rate)
        )


def assert_near(found: list[Tensor], masters: Tensor, engine: Stage3) -> None:
    """Gathered parameters are the masters, each rounded to a code of its block; ``masters`` is
    ``[N, F]``, in order.
    """
    for index, whole in enumerate(found):
        rows = engine.layout.parameter(masters, index)
        wanted = engine.layout.flat_of(rows.flatten(), index)
        limit = rows.abs().max() * (0.5 / 119 + 2**-8)
        assert whole.dtype == torch.bfloat16
        assert (whole.float() - wanted).abs().max() <= limit


@pytest.mark.parametrize("name", WORLDS)
@either_placement
def test_every_copy_has_the_masters_codes(name: str, machine: Topology) -> None:
    """In every plan and placement, in any number of runs: copies are bit-identical, and gathers
    give the masters.
    """
    w = world(WORLDS[name], machine, NUMELS)

    def rank_main(rank: int) -> int:
        engine = begun(w, chunk=1000)
        walked(w, engine, range(1, 4))
        for phase in ("gather_forward", "gather_backward"):
            found = engine.weights.gather(PARAM_INDICES, phase).wait()
            assert_near(found, masters_of(w, rank, 1, 3, 1e-3), engine)
        return int(checksum(engine.weights.copies()[0]))

    sums = run_threads(w.size, rank_main)
    for group in w.config.plan.groups(w.config.plan.weights, w.size):
        assert len({sums[rank] for rank in group}) == 1


def gathered(w: World, chunk: int) -> list[list[Tensor]]:
    """By rank: what gathers bring in some steps of publishing in two parts."""

    def rank_main(rank: int) -> list[Tensor]:
        engine, seen = begun(w, chunk), []
        for step in range(1, 4):
            masters = masters_of(w, rank, w.config.plan.optimizer, step, 1e-2)
            cut = engine.layout.begins[3]
            publish_step(engine, masters[:, :cut], range(3))
            publish_step(engine, masters[:, cut:], range(3, 6))
            for param_indices in [(0, 1), (4, 2), (3,)]:
                seen += engine.weights.gather(param_indices, "gather_forward").wait()
            seen += engine.weights.gather(PARAM_INDICES, "gather_backward").wait()
            seen += engine.weights.gather((5, 4), "gather_exact").wait()
        return seen

    return run_threads(w.size, rank_main)


@pytest.mark.parametrize(
    "of",
    [
        block(),
        *({"scheme": scheme, "quantize": PLAIN} for scheme in ("topo", "zero++", "zero3")),
    ],
    ids=str,
)
def test_overlap_and_the_size_of_runs_change_no_bit(of: dict[str, Any]) -> None:
    """Publish under the next forward, in any number of runs, gathers what one blocking publish
    gathers.
    """
    first, *others = (
        gathered(world({**of, "overlap": overlap}, numels=NUMELS), chunk)
        for overlap, chunk in ((False, 1 << 20), (True, 1 << 20), (True, 600), (True, 1))
    )
    for found in others:
        for ours, theirs in zip(first, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@either_placement
def test_only_an_edit_that_changes_a_bit_changes_codes(machine: Topology) -> None:
    """A saved model is written back unchanged: no code moves. An edit of one element reaches all
    copies.
    """
    w = world(block(), machine, NUMELS)

    def rank_main(rank: int) -> int:
        engine = begun(w)
        walked(w, engine, range(1, 3))
        engine.weights.wait_for_publish()
        before = engine.weights.copies()[0]
        for param_index, whole in zip(
            PARAM_INDICES, engine.weights.gather(PARAM_INDICES, "gather_exact").wait(), strict=True
        ):
            engine.weights.write_back(param_index, whole)
        assert torch.equal(engine.weights.copies()[0], before)
        for param_index in (2, 4):
            (whole,) = engine.weights.gather((param_index,), "gather_exact").wait()
            whole[3] = 7.0
            engine.weights.write_back(param_index, whole)
            (now,) = engine.weights.gather((param_index,), "gather_forward").wait()
            assert abs(float(now[3]) - 7.0) < 0.05
        assert not torch.equal(engine.weights.copies()[0], before)
        walked(w, engine, range(3, 4))
        assert_near(
            engine.weights.gather(PARAM_INDICES, "gather_forward").wait(),
            masters_of(w, rank, 1, 3, 1e-3),
            engine,
        )
        return int(checksum(engine.weights.copies()[0]))

    sums = run_threads(w.size, rank_main)
    assert len({sums[rank] for rank in w.config.plan.group(0, 2, 8)}) == 1


def test_codes_go_on_bit_for_bit_from_a_checkpoint() -> None:
    """Scales have a history: saved with the masters they give the same codes, without them others;
    zeros among them.
    """
    w = world(block(), numels=NUMELS)

    def rank_main(rank: int) -> tuple[bool, bool]:
        engine = begun(w)
        walked(w, engine, range(1, 3), rate=0.1)
        rows, masters = (
            masters_of(w, rank, degree, 3, 0.1) for degree in (w.config.plan.optimizer, w.size)
        )
        kept = torch.arange(rows.shape[1]) % 3 == 0
        engine.weights.mark_updated(masters=rows * kept)
        engine.weights.wait_for_publish()
        masters = masters[0] * kept
        fresh = []
        for saved in (engine.state_dict(), {}):
            other = w.engine(torch.bfloat16)
            other.weights.storage.own_row.copy_(masters)
            other.load_state_dict(saved)
            other.restart(masters)
            fresh.append(other.weights.copies()[0])
        stored = engine.weights.copies()[0]
        return torch.equal(fresh[0], stored), torch.equal(fresh[1], stored)

    assert set(run_threads(w.size, rank_main)) == {(True, False)}


def test_what_is_not_finite_reaches_every_gather() -> None:
    """A NaN among the masters is a NaN block in all copies, not a code that froze."""
    w = world(block(), numels=NUMELS)

    def rank_main(rank: int) -> list[bool]:
        engine = begun(w)
        masters = masters_of(w, rank, w.size, 1, 1e-3).clone()
        if rank == 3:
            masters[0, 2] = torch.nan
        engine.weights.mark_updated(masters=masters)
        (found,) = engine.weights.gather((0,), "gather_forward").wait()
        return found.isnan().view(8, BLOCK).any(1).tolist()

    assert all(seen == [rank == 3 for rank in range(8)] for seen in run_threads(w.size, rank_main))
