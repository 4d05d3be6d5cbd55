# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The sparse modes of sync: nothing is lost, density 1 is dense, all copies agree, only finished
steps count; bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.bare import fake_world
from tests.harness import run_threads
from tests.marks import late, often
from tests.ranks.worlds import NUMELS, PLAIN, World, owned, residual_table, synced, world
from zero_topo import AgedAdamW
from zero_topo.config.sparse_config import OkTopkSync, share
from zero_topo.config.sync_config import DenseSync
from zero_topo.cost import Workload, step_bytes
from zero_topo.engine.stage3 import Stage3
from zero_topo.sync.sparse import Sparse
from zero_topo.topology.presets import emulated

MODES: dict[str, dict[str, Any]] = {
    "oktopk": {"tau": 3, "tau_prime": 2},
    "ternary": {},
}
HIERARCHY: dict[str, dict[str, Any]] = {
    "topo": {"scheme": "topo"},
    # A dense group inside the node comes first
    "gradients in a GPU": {"weights": "gpu", "gradients": "gpu", "optimizer": "gpu"},
    "replicated optimizer": {"scheme": "topo", "optimizer": "node"},
}
DATA_PARALLEL = {"weights": "rank", "gradients": "rank", "optimizer": "rank"}
PLACES = {**HIERARCHY, "data parallel": DATA_PARALLEL}


class Step(NamedTuple):
    """What one rank sees of one step: its own row and all its optimizer rows, synced; its residual
    then; the report.
    """

    own: Tensor
    rows: Tensor
    residuals: list[tuple[int, Tensor]]
    sent: int
    report: dict[str, float]


def sparse_world(
    setting: dict[str, Any], peers: int | None, mode: str, numels: tuple[int, ...], **sync: Any
) -> World:
    """A world with a sparse mode and nothing quantized; plain data parallelism on so many peers, or
    2 x 2 x 2.
    """
    machine = emulated(2, 2, 2) if peers is None else emulated(peers, 1, 1)
    block = {**setting, "quantize": PLAIN, "sync": {"mode": mode, **MODES.get(mode, {}), **sync}}
    return world(block, machine, numels)


def mode_of(engine: Stage3) -> Sparse:
    """The mode of an engine."""
    assert isinstance(engine.gradients.mode, Sparse)
    return engine.gradients.mode


def observed(engine: Stage3) -> Step:
    """After sync and commit."""
    mode, plan = mode_of(engine), engine.layout.plan
    rows, own = engine.gradients.optimizer_rows().clone(), owned(engine)
    engine.end_step(skipped=False)
    lo, hi = (
        plan.stages(plan.gradients, plan.world_size)[-1]
        if plan.gradients < plan.world_size
        else (1, 1)
    )
    residuals = list(zip(plan.group(engine.layout.rank, lo, hi), residual_table(mode), strict=True))
    sent = sum(n for (phase, _), n in engine.meter.last_step.items() if phase == "sync")
    return Step(own, rows, residuals, sent, mode.report())


def run(
    w: World,
    steps: int,
    grads: Callable[[int, int], list[Tensor]] | None = None,
    peeks_at: int = -1,
) -> list[list[Step]]:
    """Steps of every rank, on the world's gradients or others; at one, the synced gradient is
    looked at first.
    """

    def rank_main(rank: int) -> list[Step]:
        engine, found = w.engine(), []
        for step in range(steps):
            synced(engine, (grads or w.grads)(rank, step), step == peeks_at)
            found.append(observed(engine))
        return found

    return run_threads(w.size, rank_main)


def check_nothing_is_lost(w: World, results: list[list[Step]]) -> None:
    """After every step: the sum of all gradients = what arrived + all residuals, for each owner."""
    steps = len(results[0])
    arrived = [torch.zeros(w.columns) for _ in range(w.size)]
    due = [torch.zeros(w.columns) for _ in range(w.size)]
    for step in range(steps):
        residuals: dict[int, Tensor] = defaultdict(lambda: torch.zeros(w.columns))
        for found in results:
            for member, part in found[step].residuals:
                residuals[member] += part
        for rank in range(w.size):
            arrived[rank] += results[rank][step].own
            due[rank] += w.own_mean(rank, step)
            torch.testing.assert_close(
                arrived[rank] + residuals[rank], due[rank], atol=2e-5, rtol=1e-5
            )


@pytest.mark.parametrize("numels", [NUMELS, (5000,)], ids=["several", "one"])
def test_nothing_is_lost_where_sums_stay_with_their_owners(numels: tuple[int, ...]) -> None:
    """Sharded Ok-Topk: a rank does not learn which of its selections were chosen, the owner keeps
    the sums that were not.
    """
    w = sparse_world(HIERARCHY["topo"], None, "oktopk", numels, density=0.05, sharded=True)
    check_nothing_is_lost(w, run(w, 6))


def test_sums_stay_only_with_owners_of_one_row() -> None:
    """Where several ranks store the same optimizer shard, all of them need the sums."""
    with pytest.raises(ValueError, match=r'sync\.sharded = true: .*"optimizer": "world"'):
        sparse_world(DATA_PARALLEL, 2, "oktopk", NUMELS, sharded=True)


@pytest.mark.parametrize(
    ("setting", "peers", "numels", "sync"),
    [
        *((setting, None, NUMELS, {"value_dtype": "bf16"}) for setting in HIERARCHY),
        ("topo", None, NUMELS, {"value_dtype": "fp32"}),
        ("topo", None, NUMELS, {"value_dtype": "bf16", "start": 2}),
        *(("data parallel", peers, NUMELS, {}) for peers in (1, 3)),
        *(
            ("data parallel", 4, (n,), {"density": d})
            for d, n in ((1.0, 2), (0.1, 1000), (0.01, 30_000), (0.001, 1))
        ),
        *(
            late(setting, None, NUMELS, {"value_dtype": "fp32"})
            for setting in HIERARCHY
            if setting != "topo"
        ),
        *(late("data parallel", peers, NUMELS, {}) for peers in (2, 4, 8)),
        *(
            late("data parallel", 4, (n,), {"density": d})
            for d in (1.0, 0.1, 0.001)
            for n in (1, 2, 1000, 30_000)
        ),
        late("data parallel", 4, (1_000_000,), {"density": 0.001}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_lost(
    mode: str, setting: str, peers: int | None, numels: tuple[int, ...], sync: dict[str, Any]
) -> None:
    """What has not arrived is in the residual, at every step: whatever the shape of the hierarchy,
    in data parallelism (the papers' setting, where all ranks get the same bits), from a single
    element to a million, at any density. Also of a step whose synced gradient is read before, and
    of dense first steps in the mode's type.
    """
    w = sparse_world(PLACES[setting], peers, mode, numels, **{"density": 0.05, **sync})
    results = run(w, 5 if numels == NUMELS else 4, peeks_at=2)
    check_nothing_is_lost(w, results)
    if peers is not None:
        for step, found in product(range(len(results[0])), results):
            assert torch.equal(found[step].rows, results[0][step].rows)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "ternary"])
@pytest.mark.parametrize("setting", PLACES)
def test_density_one_is_dense(mode: str, setting: str) -> None:
    """All elements selected: the mean gradient, and no residual."""
    w = sparse_world(
        PLACES[setting], 4 if setting == "data parallel" else None, mode, NUMELS, density=1.0
    )
    for rank, found in enumerate(run(w, 1)):
        torch.testing.assert_close(found[0].own, w.own_mean(rank, 0), atol=1e-6, rtol=1e-6)
        assert all(not part.abs().max() > 1e-6 for _, part in found[0].residuals)


@pytest.mark.parametrize(
    ("exclude", "dense"), [(("p4", "p1*"), (0, 1, 4)), (("*",), range(5))], ids=str
)
def test_excluded_parameters_and_vectors_are_reduced_densely(
    exclude: tuple[str, ...], dense: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, at every step."""
    monkeypatch.setattr(OkTopkSync, "EXCLUDED", exclude)
    w = sparse_world(HIERARCHY["topo"], None, "oktopk", NUMELS, density=0.01)
    widths = [w.config.plan.shard_numel(n) for n in NUMELS]

    def rank_main(rank: int) -> tuple[Tensor, int]:
        engine = w.engine()
        synced(engine, w.grads(rank))
        return owned(engine), mode_of(engine).numel

    for rank, (own, numel) in enumerate(run_threads(w.size, rank_main)):
        pairs = zip(own.split(widths), w.own_mean(rank, 0).split(widths), strict=True)
        assert [torch.allclose(found, due, atol=1e-6) for found, due in pairs] == [
            i in dense for i in range(5)
        ]
        assert numel == 2 * sum(width for i, width in enumerate(widths) if i not in dense)


def test_an_optimizer_that_counts_waits_needs_something_that_waits() -> None:
    """AgedAdamW, however it comes to the engine: refused where a zero is a gradient, not a sum
    still to come.
    """
    w = sparse_world(HIERARCHY["topo"], None, "oktopk", NUMELS)
    forgets = sparse_world(HIERARCHY["topo"], None, "oktopk", NUMELS, error_feedback=False)
    dense = replace(w, config=replace(w.config, sync=DenseSync()))

    optimizer = AgedAdamW([torch.ones(1, requires_grad=True)])
    with fake_world(w.size):
        w.engine().gradients.mode.check_optimizer(optimizer)
        for refusing in (forgets, dense):
            with pytest.raises(ValueError, match=r'AgedAdamW: .*nothing waits; set it to "AdamW"'):
                refusing.engine().gradients.mode.check_optimizer(optimizer)


def test_what_does_not_take_part_costs_nothing() -> None:
    """Without a parameter, a peer or feedback no residual is kept."""
    vectors = sparse_world(DATA_PARALLEL, 2, "oktopk", (1,))
    forgets = sparse_world(DATA_PARALLEL, 2, "oktopk", NUMELS, error_feedback=False)
    alone = world(
        {**HIERARCHY["topo"], "quantize": PLAIN, "sync": {"mode": "oktopk"}}, emulated(1, 1, 2)
    )
    with fake_world(2):
        modes = [mode_of(w.engine()) for w in (vectors, forgets, alone)]
    assert not modes[0].active and [mode.state_bytes() for mode in modes] == [0, 0, 0]


# -- bytes: the meter counts what formulas say of the actual selections, and the papers' bounds hold

NUMEL = 19_200
WORD = 4


def counts(peers: int) -> int:
    """Bytes that tell each peer a length, or that not all is finite."""
    return (peers - 1) * 8


@pytest.mark.parametrize("peers", often((2, 3, 8), (2, 3, 4, 8, 16)))
def test_oktopk_stays_under_its_bound(peers: int) -> None:
    """At most 6 k (P - 1) / P words from the busiest rank on the steps that reuse thresholds, and 9
    on the others.
    """
    density, steps = 0.01, 6
    k = share(density, NUMEL)
    settings: dict[str, Any] = {"density": density, "tau": 64, "tau_prime": 4}
    w = sparse_world(DATA_PARALLEL, peers, "oktopk", (NUMEL,), **settings)
    uneven = torch.rand(NUMEL, generator=torch.Generator().manual_seed(7)) ** 4

    def moving(rank: int, step: int) -> list[Tensor]:
        """Gradients whose largest elements move on through the regions."""
        return [w.grads(rank, step)[0] * uneven.sort().values.roll(step * NUMEL // 60)]

    word = k * (peers - 1) / peers * WORD
    for step, found in enumerate(zip(*run(w, steps, moving), strict=True)):
        sent = [one.sent - 4 * counts(peers) for one in found]
        # The first step also gathers P - 1 bounds of regions, which are small next to k in a model.
        assert not step or max(sent) <= (6 if step >= 4 and step % 4 else 9) * word


def test_sharded_oktopk_sends_a_third() -> None:
    """Sums that stay with their owners: about 2 k (P - 1) / P words, on the steps that reuse
    thresholds.

    Where they are found, magnitudes alongside: four times its share of k from each owner, not all
    it has. What is said of selected elements is what was asked for, of the others' rows.
    """
    settings: dict[str, Any] = {"density": 0.01, "tau_prime": 2}
    w = sparse_world(HIERARCHY["topo"], None, "oktopk", (NUMEL,), sharded=True, **settings)
    n = 2 * w.columns
    k, results = share(0.01, n), run(w, 4)
    assert max(found[3].sent for found in results) <= 1.25 * 2 * k / 2 * WORD + 4 * counts(2)
    assert all(0.008 <= found[3].report["density"] <= 0.0125 for found in results)
    assert min(found[2].sent for found in results) > max(found[3].sent for found in results)
    data_parallel, peers = {**DATA_PARALLEL, "optimizer": "world"}, 8
    w = sparse_world(data_parallel, peers, "oktopk", (NUMEL,), sharded=True, **settings)
    k = share(0.01, NUMEL)
    magnitudes = 4 * -(-k // peers) * (peers - 1)
    most = (2 * k * (peers - 1) / peers + magnitudes) * WORD + 4 * counts(peers)
    assert all(found.sent <= most for (found,) in run(w, 1))


def test_the_cost_formula_is_what_is_sent_but_for_counts() -> None:
    """Averaged over ranks, on selections that do not coincide."""
    w = sparse_world(DATA_PARALLEL, 4, "oktopk", (NUMEL,), density=0.01, tau_prime=2)
    (formula,) = step_bytes(
        w.config, replace(Workload.uniform([NUMEL], itemsize=4), sync_itemsize=4)
    ).values()
    results = run(w, 4)
    sent = sum(found[3].sent for found in results) / 4
    assert sent == pytest.approx(formula, rel=0.35, abs=4 * counts(4))
