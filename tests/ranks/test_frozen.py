# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Parameters that no optimizer updates are stored and gathered as the plan says, and their exact
values are not lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bare import bare_engine, matrices
from tests.harness import run_threads
from tests.ranks.worlds import (
    PLAIN,
    SCHEMES,
    World,
    drawn,
    either_placement,
    shards,
    shuffled,
    world,
)
from zero_topo.cost import by_domain, memory_bytes, step_bytes
from zero_topo.engine.agreement import checksum
from zero_topo.engine.copies import Copy
from zero_topo.engine.stage3 import Stage3
from zero_topo.hook.parameters import ParameterGathers
from zero_topo.plan import Phase
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

TRAINED = (64, 7)
BLOCK = 64
NUMELS = (8 * BLOCK, 5, 8 * 2 * BLOCK, 8 * 3 * BLOCK - 7, 100)
DIMS = (2, 1, 2, 2, 2)
KEPT = (False, True, False, False, False)
PARAM_INDICES = tuple(range(len(NUMELS)))
MOVING = tuple(param_index for param_index in PARAM_INDICES if not KEPT[param_index])
MICRO_BATCHES = 2


def block(scheme: str, **more: Any) -> dict[str, Any]:
    """A block whose codes, if it has any, are of 64 values."""
    return {"scheme": scheme, **more}


BLOCKS = {
    **{scheme: block(scheme) for scheme in SCHEMES},
    **{f"plain {scheme}": {"scheme": scheme, "quantize": PLAIN} for scheme in SCHEMES},
    "replicated optimizer": block("topo", optimizer="node"),
    "whole": block("topo", weights="rank", secondary=None),
}


def values(param_index: int) -> Tensor:
    """A frozen parameter, the same on every rank."""
    return drawn(NUMELS, 11)[param_index].bfloat16()


FROZEN = [
    replace(p, dims=d, persistent=k) for p, d, k in zip(matrices(NUMELS), DIMS, KEPT, strict=True)
]


def engine_of(w: World) -> Stage3:
    """This rank's engine with frozen parameters that are loaded and shared; without trained ones if
    there are none.
    """
    config = w.config if w.numels else w.config.without_training()
    engine = bare_engine(config, matrices(w.numels), torch.bfloat16, frozen=FROZEN)
    for param_index in PARAM_INDICES:
        own_shard(engine, param_index).copy_(
            shards(w.config.plan, values(param_index))[engine.layout.rank]
        )
    if w.numels:
        engine.restart()
    engine.restart_frozen()
    return engine


def own_shard(engine: Stage3, param_index: int) -> Tensor:
    """The rank's own world shard of a frozen parameter."""
    storage = engine.sets[1].storage
    return storage.layout.parameter(storage.own_row[None], param_index)[0]


def gathered(engine: Stage3, param_indices: Sequence[int], phase: Phase) -> list[Tensor]:
    """Frozen parameters, whole."""
    return engine.sets[1].gather(param_indices, phase).wait()


def micro_batch(engine: Stage3) -> None:
    """The gathers of one, of everything."""
    for phase in ("gather_forward", "gather_backward"):
        engine.weights.gather(range(len(TRAINED)), phase).wait()
        gathered(engine, MOVING, phase)


@pytest.mark.parametrize("name", BLOCKS)
@either_placement
def test_bytes_stored_and_sent_are_the_plans(name: str, machine: Topology) -> None:
    """Of every plan, to the byte: as the formulas say, and over the world only if the plan's
    weights are.
    """
    w = world(BLOCKS[name], machine, TRAINED)

    def rank_main(rank: int) -> None:
        engine = engine_of(w)
        # The first forward pass fills copies that all later ones read.
        gathered(engine, MOVING, "gather_forward")
        engine.meter.reset_step()
        for _ in range(MICRO_BATCHES):
            micro_batch(engine)
        gathered(
            engine,
            [param_index for param_index in PARAM_INDICES if KEPT[param_index]],
            "gather_exact",
        )
        engine.end_step(skipped=True)
        work = engine.workload(MICRO_BATCHES)
        formula = {
            key: n for key, n in step_bytes(w.config, work).items() if key[0].startswith("gather")
        }
        assert dict(engine.meter.last_step) == formula
        assert by_domain(formula).get("world", 0) == 0 or w.config.plan.weights == w.size
        assert engine.memory()["frozen"] == memory_bytes(w.config, work, 2)["frozen"]

    run_threads(w.size, rank_main)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_without_an_optimizer_has_the_bits_of_a_trained_one(name: str) -> None:
    """A policy and its reference start alike under every plan; what the reference sends and stores
    is the formula's.
    """
    w = world(BLOCKS[name], numels=())

    def rank_main(rank: int) -> None:
        policy, reference = bare_engine(w.config, FROZEN, torch.bfloat16), engine_of(w)
        for param_index in PARAM_INDICES:
            own = policy.layout.parameter(policy.weights.storage.own_row[None], param_index)[0]
            own.copy_(shards(w.config.plan, values(param_index))[rank])
        policy.restart()
        expected = policy.weights.gather(MOVING, "gather_forward").wait()
        for mine, theirs in zip(
            gathered(reference, MOVING, "gather_forward"), expected, strict=True
        ):
            assert torch.equal(mine, theirs)
        reference.meter.end_step()
        work = reference.workload(1)
        assert dict(reference.meter.last_step) == step_bytes(reference.config, work)
        assert {**reference.memory(), "optimizer": 0} == memory_bytes(reference.config, work, 2)

    run_threads(w.size, rank_main)


@pytest.mark.parametrize("name", BLOCKS)
def test_gathers_bring_the_parameters(name: str) -> None:
    """Bit for bit where the plan quantizes nothing, else to half a code; exact gathers always bit
    for bit.
    """
    w = world(BLOCKS[name], shuffled(emulated(2, 2, 2)), TRAINED)
    exact = name.startswith("plain") or (
        w.config.plan.weights == 1 and w.config.resident_spec is None
    )

    def rank_main(rank: int) -> int:
        engine = engine_of(w)
        for phase in ("gather_forward", "gather_backward", "gather_exact"):
            for param_index, found in zip(
                PARAM_INDICES, gathered(engine, PARAM_INDICES, phase), strict=True
            ):
                wanted = values(param_index)
                if exact or phase == "gather_exact":
                    assert torch.equal(found, wanted)
                limit = wanted.abs().max() * (0.5 / 119 + 2**-8)
                assert (found - wanted).abs().max() <= limit
        return int(sum(checksum(weights.copies()[0]) for weights in engine.sets))

    sums = run_threads(w.size, rank_main)
    for group in w.config.plan.groups(w.config.plan.weights, w.size):
        assert len({sums[rank] for rank in group}) == 1


def test_debug_checks_pass_if_all_frozen_parameters_are_int8() -> None:
    """No frozen parameter then has a column in the model's own type, and the check compares empty
    tensors.
    """
    w = world(block("topo", debug_checks=True), numels=TRAINED)

    def rank_main(rank: int) -> None:
        engine = bare_engine(
            w.config, matrices(TRAINED), torch.bfloat16, frozen=matrices([8 * BLOCK])
        )
        assert not engine.sets[1].storage.primary.numel()
        engine.end_step(skipped=True)

    run_threads(w.size, rank_main)


@pytest.mark.parametrize("name", ["topo", "plain topo", "replicated optimizer", "zero++", "paper"])
def test_an_edit_reaches_every_copy_as_a_load_does(name: str) -> None:
    """Edited on all ranks or loaded into each rank's own shard: the same bits everywhere, gathers
    and exact ones.
    """
    w = world(BLOCKS[name], numels=TRAINED)

    def rank_main(rank: int, loads: bool) -> list[Tensor]:
        engine = engine_of(w)
        micro_batch(engine)
        new = values(2) * 0.9  # by which a scale need not change
        if loads:
            own_shard(engine, 2).copy_(shards(w.config.plan, new)[rank])
            engine.restart_frozen()
        else:
            engine.sets[1].write_back(2, new)
        phases: tuple[Phase, ...] = ("gather_exact", "gather_forward", "gather_backward")
        found = [gathered(engine, (2, 3), phase) for phase in phases]
        assert (
            torch.equal(found[0][0], new) and (found[2][0] - new).abs().max() < new.abs().max() / 50
        )
        return [
            *(stored for weights in engine.sets for stored in weights.copies()),
            *(whole for of in found for whole in of),
        ]

    for edited, loaded in zip(
        run_threads(w.size, rank_main, False), run_threads(w.size, rank_main, True), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(edited, loaded, strict=True))


def test_what_never_changes_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that a forward gather fills for backward ones is not filled again while the weights
    are the same.
    """
    w = world(block("zero++", quantize={"secondary": "int8"}), numels=TRAINED)
    stored = list[int]()
    store = Copy.store

    def counting(copy: Copy, rows: Tensor) -> None:
        stored.append(rows.numel())
        store(copy, rows)

    monkeypatch.setattr(Copy, "store", counting)

    def rank_main(rank: int) -> None:
        engine = engine_of(w)
        for _ in range(3):
            gathered(engine, MOVING, "gather_forward")

    run_threads(w.size, rank_main)
    assert len(stored) == w.size * len(MOVING)


def test_what_cannot_follow_the_plan_stays_with_deepspeed() -> None:
    """Those of another type or served by another engine of ours, and a line says so; empty ones do
    not count.
    """

    def parameter(ds_id: int, numel: int, dtype: torch.dtype, partition: Any = print) -> Any:
        found = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
        own = {
            "ds_tensor": torch.zeros(numel, dtype=dtype),
            "ds_persist": False,
            "partition": partition,
        }
        vars(found).update(ds_id=ds_id, ds_numel=numel, ds_shape=(numel,), **own)
        return found

    def gathers(*params: Any) -> ParameterGathers:
        module = torch.nn.Module()
        for index, param in enumerate([*params, trained]):
            module.register_parameter(f"p{index}", param)
        return ParameterGathers(module, [trained], {}, half, [*module.parameters()])

    half, single = torch.bfloat16, torch.float32
    plain, empty, trained = parameter(3, 8, half), parameter(4, 0, half), parameter(5, 8, half)
    found = gathers(parameter(1, 8, single), parameter(2, 8, half, partial(print)), plain, empty)
    assert [param.ds_id for param in found.frozen] == [3] and found.param_indices == {5: 0, 3: 0}
    assert (found.note() or "").startswith(
        "2 frozen parameters are not torch.bfloat16, or another engine"
    )
    assert gathers(plain, empty).note() is None


@pytest.mark.parametrize("name", ["plain zero3", "zero++"])
def test_ranks_may_wait_for_trained_and_frozen_in_any_order(name: str) -> None:
    """DeepSpeed waits in the order of a set: second groups of both kinds are sent in one order all
    the same.
    """
    w = world(BLOCKS[name], numels=TRAINED)

    def rank_main(rank: int) -> None:
        engine = engine_of(w)
        begun = []
        for param_index in (0, 1):
            begun.append(engine.weights.gather((param_index,), "gather_forward"))
            begun.append(engine.sets[1].gather((param_index + 2,), "gather_forward"))
        for handle in begun if rank % 2 else reversed(begun):
            handle.wait()
        (found,) = begun[1].wait()
        assert (found - values(2)).abs().max() <= values(2).abs().max() / 100

    run_threads(w.size, rank_main)
