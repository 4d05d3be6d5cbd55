# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weight shards: gathers bring parameters back, publish keeps replicas alike, secondaries are
fresh, padding zero.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import run_threads
from tests.ranks.worlds import (
    BLOCKS,
    PARAM_INDICES,
    PLAIN,
    SCHEMES,
    World,
    assert_weights_alike,
    loaded,
    primary,
    shards,
    shuffled,
    world,
)
from zero_topo.collectives.transport import rows_of
from zero_topo.engine.agreement import checksum
from zero_topo.engine.shards import Layout
from zero_topo.engine.weights import Weights
from zero_topo.plan import Phase, Plan
from zero_topo.quant import ops
from zero_topo.quant.spec import BlockSpec
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

TREES = [(1, 1, 1), (1, 1, 2), (3, 1, 2), (2, 3, 1)]


@pytest.mark.parametrize(
    ("scheme", "machine", "dtype"),
    [
        *(
            pytest.param(scheme, emulated(2, 2, 2), torch.float32, id=f"{scheme} block")
            for scheme in SCHEMES
        ),
        *(
            pytest.param(scheme, shuffled(emulated(2, 2, 2)), torch.float32, id=f"{scheme} mixed")
            for scheme in SCHEMES
        ),
        *(
            pytest.param("topo", emulated(*tree), torch.bfloat16, id=f"any tree {tree}")
            for tree in TREES
        ),
    ],
)
def test_unquantized_gathers_return_every_parameter_exactly(
    scheme: str, machine: Topology, dtype: torch.dtype
) -> None:
    w = world(BLOCKS[scheme], machine)

    def rank_main(rank: int) -> bool:
        engine, params = loaded(w, dtype)
        same = []
        for phase in ("gather_forward", "gather_backward", "gather_exact"):
            found = engine.weights.gather(PARAM_INDICES, phase).wait()
            same += [torch.equal(a, b) for a, b in zip(found, params, strict=True)]
        return all(same)

    assert all(run_threads(w.size, rank_main))


def quantized_model(
    w: World, params: list[torch.Tensor], degree: int, spec: BlockSpec | None
) -> list[torch.Tensor]:
    """What a quantized gather over ``degree`` ranks must give, from whole parameters and the plan
    alone.
    """
    plan = w.config.plan
    assert spec is not None
    result = []
    for param in params:
        parts = shards(plan, param)
        out = torch.empty_like(parts)
        for rank in plan.groups(1, degree)[0]:
            rows = plan.rows(rank, degree)
            piece = ops.quantize(parts[rows], spec)
            out[rows] = ops.dequantize(piece, spec, torch.empty_like(parts[rows]))
        result.append(out.view(-1)[: param.numel()])
    return result


@pytest.mark.parametrize("scheme", ["paper", "topo", "zero++"])
@pytest.mark.parametrize("secondary", ["gpu", "node"])
def test_quantized_gathers_equal_the_model_whatever_the_bucket(scheme: str, secondary: str) -> None:
    quantize = {"weights": "int8", "secondary": "int8", "resident": None}
    block: dict[str, object] = {
        "scheme": scheme,
        "secondary": secondary,
        "quantize": quantize,
    }
    w = world(block, shuffled(emulated(2, 2, 2)))

    def rank_main(rank: int) -> bool:
        engine, params = loaded(w, torch.bfloat16)
        plan = w.config.plan
        forward = quantized_model(w, params, plan.weights, w.config.weights_spec)
        assert plan.secondary is not None
        source = params if plan.secondary % plan.weights == 0 else forward
        backward = quantized_model(w, source, plan.secondary, w.config.secondary_spec)
        ok = []
        for buckets in ([PARAM_INDICES], [(0, 3), (1,), (4, 2)]):
            passes: list[tuple[Phase, Any]] = [
                ("gather_forward", forward),
                ("gather_backward", backward),
            ]
            for (phase, wanted), param_indices in product(passes, buckets):
                found = engine.weights.gather(param_indices, phase).wait()
                ok += [torch.equal(a, wanted[i]) for i, a in zip(param_indices, found, strict=True)]
        return all(ok)

    assert all(run_threads(w.size, rank_main))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_publish_brings_every_optimizer_update_to_every_replica(scheme: str) -> None:
    w = world({"scheme": scheme, "quantize": PLAIN}, shuffled(emulated(2, 2, 2)))

    def rank_main(rank: int) -> tuple[bool, int]:
        engine, params = loaded(w, chunk=100)
        engine.weights.storage.own.add_(1.0)
        engine.weights.mark_updated()
        found = engine.weights.gather(PARAM_INDICES, "gather_backward").wait()
        expected = [param + 1.0 for param in params]
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        return same, int(checksum(primary(engine)))

    results = run_threads(w.size, rank_main)
    assert all(same for same, _ in results)
    assert_weights_alike(w, [checksum for _, checksum in results])


@pytest.mark.parametrize(
    ("scheme", "secondary"), [("zero++", "node"), ("topo", "node"), ("zero++", "rank")]
)
def test_a_publish_makes_every_older_secondary_unreadable(scheme: str, secondary: str) -> None:
    w = world({"scheme": scheme, "secondary": secondary, "quantize": PLAIN})

    def rank_main(rank: int) -> bool:
        engine, params = loaded(w)
        engine.weights.gather(PARAM_INDICES, "gather_forward").wait()
        engine.weights.storage.own.mul_(2.0)
        engine.weights.mark_updated()
        engine.weights.gather((1, 4), "gather_forward").wait()
        found = engine.weights.gather(PARAM_INDICES, "gather_backward").wait()
        return all(torch.equal(a, b * 2.0) for a, b in zip(found, params, strict=True))

    assert all(run_threads(w.size, rank_main))


def unrefreshed(weights: Weights) -> None:
    weights.secondary.refresh = lambda param_indices: None  # type: ignore[method-assign]
    weights.mark_updated()


def unfinished(weights: Weights) -> None:
    weights.mark_updated()
    weights.start_publish()
    weights._pending.clear()


@pytest.mark.parametrize(
    ("forget", "phase", "said"),
    [
        (unrefreshed, "gather_backward", "was not refreshed"),
        (unfinished, "gather_forward", "before publish updated them"),
    ],
)
def test_weights_of_another_version_are_an_error_not_a_stale_read(
    forget: Callable[[Weights], None], phase: Phase, said: str
) -> None:
    """If the engine forgot to refresh a secondary or to finish a publish before a gather, the
    version stamp says so.
    """
    w = world({"scheme": "topo", "secondary": "node"})

    def rank_main(rank: int) -> str:
        engine, _ = loaded(w)
        forget(engine.weights)
        with pytest.raises(RuntimeError, match=said) as caught:
            engine.weights.gather(PARAM_INDICES, phase).wait()
        return str(caught.value)

    assert len(set(run_threads(w.size, rank_main))) == 1


@pytest.mark.parametrize("quantize", [PLAIN, {"resident": "int8"}], ids=["plain", "codes"])
def test_debug_checks_name_the_ranks_whose_replicas_differ(quantize: dict[str, Any]) -> None:
    """By one bit of one copy, of weights as they are and of INT8 weights."""
    w = world({"scheme": "topo", "quantize": quantize, "debug_checks": True})

    def rank_main(rank: int) -> str:
        engine, _ = loaded(w)
        for _ in range(2):
            engine.end_step(skipped=False)
            engine.weights.mark_updated(
                masters=engine.weights.storage.own.float() if engine.weights.needs_masters else None
            )
            engine.weights.wait_for_publish()
        if rank == 5:
            store = engine.weights.storage.store
            copy: torch.Tensor = (
                engine.weights.storage.primary if store is None else store.codes.stored
            )
            copy.view(-1).view(torch.uint8)[3] ^= 1
        with pytest.raises(RuntimeError, match="ranks 1 and 5 share a weight shard") as caught:
            engine.end_step(skipped=False)
        return str(caught.value)

    assert len(set(run_threads(w.size, rank_main))) == 1


def test_every_gather_waits_for_the_last_change_of_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU gathers run on another stream than publish; events keep the order (here a stand-in
    records them).
    """
    w = world({"scheme": "zero3", "quantize": PLAIN}, emulated(1, 1, 1))
    log: list[str] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            log.append(f"wait {self.number}")

    def record(device: torch.device) -> Event:
        log.append("record")
        return Event(log.count("record"))

    monkeypatch.setattr("zero_topo.engine.weights.recorded_event", record)

    def rank_main(rank: int) -> None:
        engine, _ = loaded(w)
        engine.weights.gather(PARAM_INDICES, "gather_forward")
        log.append("publish")
        engine.weights.mark_updated()
        engine.weights.gather(PARAM_INDICES, "gather_backward")
        log.append("edit")
        engine.weights.write_back(0, torch.ones(1))
        engine.weights.gather(PARAM_INDICES, "gather_exact")

    run_threads(1, rank_main)
    # The first of each line waits for what was before, also where it then changes the weights
    # itself.
    assert log == [
        *("record", "wait 1"),
        *("publish", "wait 1", "record", "wait 2", "record"),
        *("edit", "wait 3", "record", "wait 4"),
    ]


@given(
    data=st.data(),
    numels=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    mixed_up=st.booleans(),
)
def test_exactly_the_padding_is_zeroed(
    data: st.DataObject, numels: list[int], mixed_up: bool
) -> None:
    """And nothing else: on every rank, in the whole world shard or from some parameter on, in any
    placement.
    """
    order = tuple(data.draw(st.permutations(range(8)))) if mixed_up else None
    plan = Plan(8, weights=1, secondary=None, gradients=1, optimizer=1, order=order)
    layout = Layout(plan, data.draw(st.integers(0, 7)), tuple(numels))
    first = layout.begins[data.draw(st.integers(0, len(numels) - 1))]
    rows = torch.cat([rows_of(torch.ones(numel), plan) for numel in numels], dim=1)
    expected = rows[layout.row(1), first:]
    shard = torch.full_like(expected, torch.nan).masked_fill(expected == 1, 1.0)
    layout.clear_padding(shard, first)
    assert torch.equal(shard, expected)
