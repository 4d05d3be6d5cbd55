# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Gradient shards: after scatter and sync the optimizer's rows hold the world's mean gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import run_threads
from tests.plans import BLOCK
from tests.ranks.worlds import (
    BLOCKS,
    PARAM_INDICES,
    PLAIN,
    SCHEMES,
    World,
    either_placement,
    mean,
    shards,
    world,
)
from zero_topo.engine.stage3 import Stage3
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated


def expected_rows(w: World, rank: int, total: list[torch.Tensor]) -> torch.Tensor:
    """The optimizer's rows of this rank, cut from whole gradients."""
    plan = w.config.plan
    return torch.cat([shards(plan, grad)[plan.rows(rank, plan.optimizer)] for grad in total], dim=1)


def mean_gradient(w: World, micro_batches: int) -> list[torch.Tensor]:
    """Over all ranks, summed over micro-batches."""
    steps = [mean(w.numels, w.size, step) for step in range(micro_batches)]
    return [torch.stack(parts).sum(dim=0) for parts in zip(*steps, strict=True)]


def error(engine: Stage3, w: World, total: list[torch.Tensor]) -> float:
    """After sync: the largest difference of the optimizer's rows from those cut from whole
    gradients.
    """
    engine.gradients.sync()
    return float(
        (engine.gradients.optimizer_rows() - expected_rows(w, engine.layout.rank, total))
        .abs()
        .max()
    )


def backward(
    engine: Stage3,
    w: World,
    rank: int,
    step: int,
    buckets: list[tuple[int, ...]],
    last: bool = False,
) -> None:
    grads = w.grads(rank, step)
    for param_indices in buckets:
        engine.gradients.scatter(param_indices, [grads[i] for i in param_indices], last)


@pytest.mark.parametrize("scheme", [*SCHEMES, "ring", "two groups, ring"])
@either_placement
@pytest.mark.parametrize("chunk", [1 << 20, 37], ids=["whole", "chunked"])
def test_scatter_and_sync_give_the_mean_over_all_ranks_and_micro_batches(
    scheme: str, machine: Topology, chunk: int
) -> None:
    w = world(BLOCKS[scheme], machine)
    wanted = mean_gradient(w, 2)

    def rank_main(rank: int) -> float:
        engine = w.engine(chunk=chunk)
        backward(engine, w, rank, 0, [PARAM_INDICES])
        backward(engine, w, rank, 1, [(4, 1), (0,), (2, 3)])
        return error(engine, w, wanted)

    assert max(run_threads(w.size, rank_main)) < 1e-6


@pytest.mark.parametrize("scheme", ["ring", "two groups, ring"])
def test_a_ring_sums_between_nodes_in_the_type_that_is_sent(scheme: str) -> None:
    """One reduce-scatter of the backend for each run, between nodes alone; the bytes are those
    without it.
    """
    ops: list[set[tuple[str, str]]] = []

    def trained(name: str) -> tuple[float, dict[str, int]]:
        w = world(
            {**BLOCKS[scheme], **({} if name == "ring" else {"sync": {"mode": "dense"}})},
            emulated(4, 1, 2),
        )
        wanted = mean_gradient(w, 1)

        def rank_main(rank: int) -> tuple[float, dict[str, int]]:
            engine = w.engine(torch.bfloat16)
            seen = set[tuple[str, str]]()
            engine.meter.listener = lambda group, op, nbytes, even: seen.add((op, group.domain))
            engine.gradients.scatter(PARAM_INDICES, w.grads(rank, 0, torch.bfloat16), True)
            worst = error(engine, w, wanted)
            engine.meter.end_step()
            ops.append(seen)
            return worst, {
                domain: n
                for (phase, domain), n in engine.meter.last_step.items()
                if phase == "sync"
            }

        return max(run_threads(w.size, rank_main), key=lambda found: found[0])

    ring, direct = trained("ring"), trained("direct")
    assert ring[1] == direct[1]
    assert 0 < direct[0] <= ring[0] < 0.05
    assert all(("reduce_scatter", "world") in seen for seen in ops[:8])
    assert not any(op == "reduce_scatter" for seen in ops[8:] for op, _ in seen)


@pytest.mark.parametrize("scheme", ["topo", "zero++"])
@pytest.mark.parametrize("bits", ["int8", "int4", "nf4"])
def test_quantized_scatter_stays_within_its_steps(scheme: str, bits: str) -> None:
    w = world({"scheme": scheme, "quantize": {"gradients": bits}})
    wanted = mean_gradient(w, 1)

    def rank_main(rank: int) -> float:
        engine = w.engine()
        backward(engine, w, rank, 0, [PARAM_INDICES])
        return error(engine, w, wanted)

    step = 4.5 / (127 if bits == "int8" else 7)
    assert 1e-5 < max(run_threads(w.size, rank_main)) < 1.5 * step


@settings(max_examples=15, deadline=None)
@given(
    numels=st.lists(st.sampled_from([1, 3, 8]) | st.integers(1, 4000), min_size=2, max_size=5),
    shape=st.sampled_from([(1, 1, 2), (2, 1, 2), (1, 2, 2)]),
    magnitudes=st.lists(st.sampled_from([1e-4, 1.0, 1e4]), min_size=5, max_size=5),
    bits=st.sampled_from(["int4", "int8", "nf4"]),
    gradients=st.sampled_from(["node", "world"]),
)
def test_no_block_of_the_scatter_holds_values_of_two_parameters(
    numels: list[int],
    shape: tuple[int, int, int],
    magnitudes: list[float],
    bits: str,
    gradients: str,
) -> None:
    """A bucket gives each parameter the bits that it gets in a bucket of its own, by one group and
    by two.

    In INT4 and NF4 an element is lost only if it is below 1/14 of the largest of its own
    parameter's block.
    """
    block: dict[str, object] = {
        "scheme": "topo",
        "gradients": gradients,
        "quantize": {**PLAIN, "gradients": bits},
    }
    w = world(block, emulated(*shape), tuple(numels))
    grads = [grad * size for grad, size in zip(w.grads(0), magnitudes, strict=False)]

    def rank_main(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        together, alone = w.engine().gradients, w.engine().gradients
        together.scatter(range(len(numels)), grads, last=False)
        for param_index, grad in enumerate(grads):
            alone.scatter([param_index], [grad], last=False)
        return together.buffer, alone.buffer

    plan = w.config.plan
    for rank, (together, alone) in enumerate(run_threads(w.size, rank_main)):
        assert torch.equal(together, alone)
        begin = 0
        for grad in grads:
            sent = shards(plan, grad)[plan.rows(rank, plan.gradients)]
            came = together[:, begin : begin + sent.shape[1]].reshape(-1)
            begin += sent.shape[1]
            for own, got in zip(sent.reshape(-1).split(BLOCK), came.split(BLOCK), strict=True):
                assert bool((got != 0)[own.abs() > own.abs().max() / 13.9].all())


def test_accumulation_is_fp32_before_its_one_rounding() -> None:
    w = world({"scheme": "zero3", "quantize": PLAIN})

    def rank_main(rank: int) -> torch.Tensor:
        engine = w.engine(torch.bfloat16)
        value = 1.0 if rank == 0 else 2.0**-8  # vanishes in a BF16 sum, counts in an FP32 one
        grads = [torch.full((n,), value, dtype=torch.bfloat16) for n in w.numels]
        engine.gradients.scatter(PARAM_INDICES, grads, last=False)
        return engine.gradients.buffer[0, -1].clone()

    exact = torch.tensor((1.0 + 7 * 2.0**-8) / 8).bfloat16()
    assert all(torch.equal(value, exact) for value in run_threads(w.size, rank_main)[:4])


@pytest.mark.parametrize("scheme", ["topo", "hsdp", "paper"])
@pytest.mark.parametrize("last", [False, True], ids=["before the last", "after the last"])
def test_a_peek_shows_the_synced_gradient_and_does_not_disturb_the_step(
    scheme: str, last: bool
) -> None:
    w = world({"scheme": scheme, "quantize": PLAIN})
    first, both = mean_gradient(w, 1), mean_gradient(w, 2)

    def rank_main(rank: int) -> tuple[float, float]:
        engine = w.engine()
        backward(engine, w, rank, 0, [PARAM_INDICES], last)
        plan = w.config.plan
        own = plan.row(rank, plan.optimizer)
        seen = float((engine.gradients.peek() - expected_rows(w, rank, first)[own]).abs().max())
        engine.gradients.peek()
        backward(engine, w, rank, 1, [PARAM_INDICES], last)
        return seen, error(engine, w, both)

    for seen, final in run_threads(w.size, rank_main):
        assert seen < 1e-6 and final < 1e-6


def test_replicas_of_an_optimizer_shard_get_the_same_bits_of_a_rounded_sum() -> None:
    """Sums of FP32 gradients are sent in BF16: the owner of a row must not go on with more bits
    than the others.
    """
    w = world({"scheme": "hsdp", "quantize": PLAIN, "sync": {"dtype": "bf16"}})

    def rank_main(rank: int) -> torch.Tensor:
        engine = w.engine()
        backward(engine, w, rank, 0, [PARAM_INDICES])
        engine.gradients.sync()
        return engine.gradients.optimizer_rows().clone()

    found = run_threads(w.size, rank_main)
    for group in w.config.plan.groups(w.config.plan.optimizer, w.size):
        assert all(torch.equal(found[rank], found[group[0]]) for rank in group)


def test_zeroed_gradients_leave_nothing_behind() -> None:
    w = world({"scheme": "topo", "quantize": PLAIN})
    second = mean_gradient(w, 2)
    first = mean_gradient(w, 1)

    def rank_main(rank: int) -> float:
        engine = w.engine()
        backward(engine, w, rank, 0, [PARAM_INDICES])
        engine.gradients.sync()
        engine.end_step(skipped=False)
        backward(engine, w, rank, 1, [(3,)])
        wanted = [
            b - a if i == 3 else torch.zeros_like(a)
            for i, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        return error(engine, w, wanted)

    assert max(run_threads(w.size, rank_main)) < 1e-6


@pytest.mark.parametrize("scheme", ["topo", "hsdp"])
def test_what_a_backward_pass_has_begun_ends_before_its_groups_do(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine destroyed before its step (an exception in between) does not leave collectives to
    dead groups.
    """
    # Groups of threads cannot be
    monkeypatch.setattr("zero_topo.mesh.Mesh.destroy", lambda mesh: None)
    w = world({"scheme": scheme, "quantize": PLAIN})
    wanted = mean_gradient(w, 1)

    def rank_main(rank: int) -> float:
        engine = w.engine()
        backward(engine, w, rank, 0, [PARAM_INDICES], last=True)
        engine.destroy()
        return float(
            (engine.gradients.optimizer_rows() - expected_rows(w, rank, wanted)).abs().max()
        )

    assert max(run_threads(w.size, rank_main)) < 1e-6
