# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ok-Topk: its thresholds hold, its words are those of the paper, and what is not finite is seen;
what it shares with the other sparse modes is tested with them.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.bare import fake_world
from tests.marks import often
from tests.ranks.sync_cases import mode_of, run, sync_world
from tests.ranks.worlds import NUMELS, World
from zero_topo.config.sparse_config import OkTopkSync, share
from zero_topo.sync import oktopk
from zero_topo.sync.selection import above
from zero_topo.topology.presets import emulated

DENSITY = 0.02
NUMEL = 19_200
WORD = 4


def selecting(peers: int, numel: int = NUMEL, **sync: Any) -> World:
    """Data parallelism with the mode on one parameter."""
    sync = {"tau": 64, "tau_prime": 32, "density": DENSITY, **sync}
    place = "owned" if sync.get("sharded") else "data parallel"
    return sync_world("oktopk", place, peers, (numel,), **sync)


def test_selections_stay_about_k() -> None:
    """What a rank selects and what all choose is 0.8 to 1.25 k in every step, though thresholds are
    found now and then, and gradients become smaller; the words stay under 5 k (P - 1) / P where
    thresholds are reused. Thresholds that only drifted fell behind.
    """
    reuse = 5
    numel = 8000
    k = share(DENSITY, numel)
    w = selecting(4, numel, tau_prime=reuse)
    found = run(w, 3 * reuse, lambda rank, step: [0.93**step * w.grads(rank, step)[0]])
    exact = 0.0
    for step, ranks in enumerate(zip(*found, strict=True)):
        for seen in ranks:
            for of in ("density", "union"):
                assert 0.79 <= seen.report[of] / DENSITY <= 1.26, (step, of)
        if step >= reuse and step % reuse:
            words = sum(seen.sent for seen in ranks) / 4 / WORD
            assert words <= 5 * k * 3 / 4 + 40, "counts and flags next to the selections"
            exact += sum(seen.report.get("recomputed", 0.0) for seen in ranks)
    assert exact <= 2 * reuse / 4, "they are reused"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("peers", often((2, 3, 8), (2, 3, 4, 8, 16)))
def test_what_is_sent_stays_under_its_bound(peers: int, sharded: bool) -> None:
    """At most 6 k (P - 1) / P words from the busiest rank on the steps that reuse thresholds, and 9
    on the others. If sums stay with their owners, 2 on those, 6 on the others: to find thresholds,
    an owner sends the magnitudes of four times its share of k.
    """
    density, steps = 0.01, 6
    reusing, finding = (2.5, 6.5) if sharded else (6, 9)
    k = share(density, NUMEL)
    w = selecting(peers, density=density, tau_prime=4, sharded=sharded)
    uneven = torch.rand(NUMEL, generator=torch.Generator().manual_seed(7)) ** 4

    def moving(rank: int, step: int) -> list[Tensor]:
        """Gradients whose largest elements move on through the regions."""
        return [w.grads(rank, step)[0] * uneven.sort().values.roll(step * NUMEL // 60)]

    word = k * (peers - 1) / peers * WORD
    # Lengths for each peer, and flags that a value is not finite
    counts = 4 * 8 * (peers - 1)
    for step, found in enumerate(zip(*run(w, steps, moving), strict=True)):
        sent = [one.sent - counts for one in found]
        # The first step also gathers P - 1 bounds of regions, which are small next to k in a model.
        assert not step or max(sent) <= (reusing if step >= 4 and step % 4 else finding) * word


def test_a_spike_is_not_taken_whole() -> None:
    """Where nearly all of a gradient suddenly reaches the threshold, it is found anew: nobody holds
    all as selections.
    """
    w = selecting(2, 5000, tau_prime=4)
    grads = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    with patch.object(oktopk, "above", side_effect=above) as selected:
        run(w, 7, lambda rank, step: [(100.0 if step == 6 else 1.0) * grads[rank]])
    taken = [call.args[2] for call in selected.call_args_list]
    assert max(taken) <= 8 * share(DENSITY, 5000) < 5000 / 5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_in_an_owners_row_is_said_too(bad: float) -> None:
    """It is not among what that rank selects, and all ranks are to know: each clips by the norm of
    all rows.
    """
    columns = 100
    w = selecting(3, 3 * columns, density=0.1, sharded=True)

    def grads(rank: int, _: int) -> list[Tensor]:
        grad = torch.ones(3 * columns)
        if rank == 1:
            grad[columns + 7] = bad
        return [grad]

    for (found,) in run(w, 1, grads):
        assert found.own.isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_said_before_sums_are_cut(bad: float) -> None:
    """Alone among few where others have too many, it would have no share of what all choose: nobody
    would see it.
    """
    w = selecting(4, 4_000, density=0.01, tau_prime=4)

    def grads(rank: int, step: int) -> list[Tensor]:
        """In the sixth step, the first that reuses thresholds, all is far above them but for the
        last quarter.
        """
        grad = w.grads(rank, step)[0]
        if step == 5:
            grad[:3_000] *= 1.3
            grad[3_000:] = 0
            grad[3_500] = bad if rank == 0 else 0
        return [grad]

    assert all(bool(found[5].rows.isnan().all()) for found in run(w, 6, grads))


def test_regions_fit_the_selections_from_the_first_step_on() -> None:
    """If all large elements are in one rank's quarter, all four reduce a part of them and send as
    much each; with equal regions that rank would send nearly twice what the others do.
    """
    w = selecting(4)
    quiet = torch.ones(NUMEL).index_fill_(0, torch.arange(NUMEL // 4, NUMEL), 1e-6)
    sent = [steps[0].sent for steps in run(w, 1, lambda rank, _: [w.grads(rank)[0] * quiet])]
    assert max(sent) / min(sent) < 1.1


def test_sums_that_crowd_on_one_rank_are_sent_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are of an earlier step: where one rank has far more sums than its share, all send
    equal parts of them, and the result has the same bits as if that rank sent all.
    """
    w = selecting(8, 16_000, tau_prime=3)
    end = torch.where(torch.arange(16_000) < 1_000, 1.0, 1e-6)

    def moving(rank: int, step: int) -> list[Tensor]:
        """In the fifth step, the first that reuses thresholds, the large elements are at the other
        end.
        """
        return [w.grads(rank, step)[0] * (end.flip(0) if step == 4 else end)]

    monkeypatch.setattr(oktopk, "CROWDED", 8)
    alone = [steps[4] for steps in run(w, 5, moving)]
    monkeypatch.setattr(oktopk, "CROWDED", 1)
    spread = [steps[4] for steps in run(w, 5, moving)]
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(alone, spread, strict=True))
    assert 1.5 * max(step.sent for step in spread) < max(step.sent for step in alone)


@pytest.mark.parametrize(
    ("exclude", "dense"), [(("p4", "p1*"), [0, 1, 4]), (("*",), [0, 1, 2, 3, 4])], ids=str
)
def test_excluded_parameters_and_vectors_are_reduced_densely(
    exclude: tuple[str, ...], dense: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, at every step."""
    monkeypatch.setattr(OkTopkSync, "EXCLUDED", exclude)
    w = sync_world("oktopk", density=0.01)
    widths = [w.config.plan.shard_numel(n) for n in NUMELS]
    for rank, (found,) in enumerate(run(w, 1)):
        parts = zip(found.own.split(widths), w.own_mean(rank, 0).split(widths), strict=True)
        exact = [torch.allclose(part, due, atol=1e-6) for part, due in parts]
        assert [index for index, is_exact in enumerate(exact) if is_exact] == dense


def test_what_does_not_take_part_costs_nothing() -> None:
    """Without a parameter, a peer or feedback no residual is kept."""
    vectors = selecting(2, 1)
    forgets = selecting(2, error_feedback=False)
    alone = sync_world("oktopk", machine=emulated(1, 1, 2))
    with fake_world(2):
        modes = [mode_of(w.engine()) for w in (vectors, forgets, alone)]
    assert not modes[0].active and [mode.state_bytes() for mode in modes] == [0, 0, 0]
