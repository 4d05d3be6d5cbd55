# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A secondary copy in host memory gives the bits of one on the device, at the memory of ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bare import bare_engine, fake_world, matrices
from benchmarks.counting import Launches
from tests.harness import run_threads
from tests.marks import late
from tests.plans import resolve
from tests.ranks.test_launch_budget import numels
from tests.ranks.test_memory_peak import LAYER, MODEL, peak, predicted
from tests.ranks.test_nccl import queues_of_a_gpu
from tests.ranks.worlds import World, drawn, shards, shuffled, world
from zero_topo.cost import Workload, by_domain, memory_bytes, step_bytes
from zero_topo.engine.stage3 import Stage3
from zero_topo.plan import Phase
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

INT8 = {"weights": "int8", "secondary": "int8", "block_size": 64}
BLOCKS: dict[str, dict[str, Any]] = {
    "16 bits": {"scheme": "zero3", "secondary": "node"},
    "int8": {"scheme": "zero++", "quantize": INT8},
    "int8 gathers, 16-bit copy": {"scheme": "zero++", "quantize": {"block_size": 64}},
    "inside a node": {
        "scheme": "mics",
        "secondary": "gpu",
        "quantize": {"secondary": "int8", "block_size": 64},
    },
    "of one rank": {"scheme": "zero++", "secondary": "rank", "quantize": INT8},
    "of own weights": {"scheme": "hsdp", "secondary": "node", "quantize": INT8},
    "frozen alone": {"scheme": "zero3", "frozen": {"secondary": "node"}},
    "frozen alone, int8": {"scheme": "zero3", "quantize": INT8, "frozen": {"secondary": "node"}},
}
NUMELS = (512, 7, 640, 501)
FROZEN = (256, 9, 1280)
TRAINED_INDICES = range(len(NUMELS))
FROZEN_INDICES = range(len(NUMELS), len(NUMELS) + len(FROZEN))
MODULES = ((0, 1), (2,), (3,))


def on_host(block: dict[str, Any]) -> dict[str, Any]:
    """The same plan with its copy in host memory."""
    if "frozen" in block:
        return {**block, "frozen": {**block["frozen"], "secondary_on": "host"}}
    return {**block, "secondary_on": "host"}


def started(w: World, rank: int) -> Stage3:
    """This rank's engine with trained and frozen parameters, loaded."""
    engine = bare_engine(w.config, matrices(NUMELS), torch.bfloat16, frozen=matrices(FROZEN))
    weights, plan = engine.weights, w.config.plan
    for param_index, whole in enumerate([*drawn(NUMELS, 7), *drawn(FROZEN, 8)]):
        own = weights.storage.world_shard(range(param_index, param_index + 1))
        own.copy_(shards(plan, whole.bfloat16())[engine.layout.rank])
    engine.restart()
    engine.restart_frozen()
    return engine


class Passes:
    """Forward and backward passes of an engine, and all that its gathers brought.

    Attributes:
        found: the gathered parameters, in order.
    """

    def __init__(self, engine: Stage3) -> None:
        self.found: list[Tensor] = []
        self._weights = engine.weights

    def run(self, phase: Phase, order: Sequence[Sequence[int]]) -> None:
        """Gather modules as DeepSpeed does: the next one is under way while one is used."""
        handles = [self._weights.gather(order[0], phase)]
        for following in [*order[1:], None]:
            if following is not None:
                handles.append(self._weights.gather(following, phase))
            self.found += [whole.clone() for whole in handles.pop(0).wait()]

    def forward(self, modules: Sequence[Sequence[int]] = (*MODULES, FROZEN_INDICES)) -> None:
        """A forward pass."""
        self.run("gather_forward", modules)

    def backward(self) -> None:
        """A backward pass, in which each module is also recomputed."""
        self.run(
            "gather_backward",
            [module for module in (FROZEN_INDICES, *reversed(MODULES)) for _ in range(2)],
        )


def updated(engine: Stage3) -> None:
    """An optimizer step."""
    weights = engine.weights
    if weights.needs_masters:
        weights.mark_updated(masters=weights.storage.own.float() * 1.5)
    else:
        weights.storage.own.mul_(1.5)
        weights.mark_updated()
    engine.end_step(skipped=False)


def accumulated(engine: Stage3, passes: Passes) -> None:
    """Two micro-batches a step, one after the other, or both forward passes first."""
    for pipelined in (False, True):
        passes.forward()
        (passes.forward if pipelined else passes.backward)()
        (passes.backward if pipelined else passes.forward)()
        passes.backward()
        updated(engine)
    passes.backward()  # without a forward pass since the step


def evaluated(engine: Stage3, passes: Passes) -> None:
    """An evaluation between the passes, another of a part of the model, and one before a step."""
    passes.forward()
    passes.forward()
    passes.backward()
    updated(engine)
    passes.forward(MODULES[:1])
    passes.backward()
    passes.forward()
    masters = engine.weights.storage.own[:, : engine.layout.widths[0]].float()
    engine.weights.mark_updated(range(1), masters if engine.weights.needs_masters else None)
    passes.backward()  # of the first module, one parameter is updated and the other is not


def edited(engine: Stage3, passes: Passes) -> None:
    """Edits of trained and frozen parameters between the passes, after them, and loads."""
    weights = engine.weights
    for param_index in (2, FROZEN_INDICES[2]):
        passes.forward()
        weights.write_back(
            param_index,
            torch.full((weights.storage.layout.numels[param_index],), 0.3, dtype=torch.bfloat16),
        )
        passes.backward()
        passes.forward()
        passes.backward()
    weights.storage.own_row.mul_(0.5)
    engine.restart()
    passes.backward()
    weights.storage.frozen_row.mul_(0.5)
    engine.restart_frozen()
    passes.forward()
    passes.backward()


def offloaded(engine: Stage3, passes: Passes) -> None:
    """The weights leave the device and come back: the copy of this version is still there."""
    passes.forward()
    kept = [tensor.clone() for tensor in engine.weights.tensors()]
    assert all(tensor is not engine.weights.secondary.host for tensor in engine.weights.tensors())
    for tensor, was in zip(engine.weights.tensors(), kept, strict=True):
        tensor.zero_()
        tensor.copy_(was)
    passes.backward()


CASES: dict[str, Callable[[Stage3, Passes], None]] = {
    case.__name__: case for case in (accumulated, evaluated, edited, offloaded)
}
MACHINES = {"4 ranks": emulated(2, 2, 1), "8 ranks": shuffled(emulated(2, 2, 2))}


def cases() -> list[Any]:
    """Every block and case; the short tests take both sizes for few of them."""
    short = {"16 bits", "int8", "frozen alone, int8"}
    found = []
    for name in BLOCKS:
        for case in CASES:
            for machine in MACHINES:
                often = machine == "4 ranks" or (name in short and case != "offloaded")
                found.append((name, case, machine) if often else late(name, case, machine))
    return found


@pytest.mark.parametrize(("name", "case", "machine"), cases())
def test_the_bits_are_those_of_a_copy_on_the_device(name: str, case: str, machine: str) -> None:
    """Every gather of both passes, in every order of passes, steps, edits and loads."""

    def ranked(rank: int, w: World) -> list[Tensor]:
        engine = started(w, rank)
        passes = Passes(engine)
        CASES[case](engine, passes)
        return passes.found

    block = BLOCKS[name]
    here, there = (world(each, MACHINES[machine], NUMELS) for each in (block, on_host(block)))
    for mine, theirs in zip(
        run_threads(here.size, ranked, here), run_threads(here.size, ranked, there), strict=True
    ):
        assert len(mine) == len(theirs) > 0
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_sent_and_stored_is_the_formulas(name: str) -> None:
    """In two steps of two micro-batches: all bytes of all gathers; on the device, those of the plan
    without a copy.
    """
    w = world(on_host(BLOCKS[name]), numels=NUMELS)
    without = world({**BLOCKS[name], "secondary": None, "frozen": {}}, numels=NUMELS)

    def ranked(rank: int) -> dict[str, int]:
        engine = started(w, rank)
        for _ in range(2):
            passes = Passes(engine)
            for _ in range(2):
                passes.forward()
                passes.run("gather_backward", (FROZEN_INDICES, *reversed(MODULES)))
            engine.end_step(skipped=True)
            work = engine.workload(2)
            formula = step_bytes(w.config, work)
            gathers = {
                key: nbytes for key, nbytes in formula.items() if key[0].startswith("gather")
            }
            assert dict(engine.meter.last_step) == gathers
        memory = engine.memory()
        assert {**memory, "optimizer": 0} == memory_bytes(w.config, work, 2, 0)
        host = memory.pop("host", 0)
        assert {**memory, "optimizer": 0} == memory_bytes(without.config, work, 2, 0)
        return {
            "host": host,
            "weights": sum(engine.layout.widths),
            "frozen": sum(engine.weights.storage.layout.widths),
        }

    stored = run_threads(w.size, ranked)[0]
    # Two nodes, so each rank has two world shards of every parameter, of two bytes an element
    if name == "16 bits":
        assert stored["host"] == 2 * 2 * stored["frozen"]
    if name == "frozen alone":
        assert stored["host"] == 2 * 2 * (stored["frozen"] - stored["weights"])
    assert (stored["host"] > 0) == (name != "of own weights")


@pytest.mark.parametrize("ranks", [384, 8])
def test_half_of_zero3s_gathers_cross_nodes_and_none_of_frozen_weights(ranks: int) -> None:
    """The backward pass gathers inside the node; of frozen weights the forward pass does too."""
    work = Workload.uniform([8 * 384 * 64] * 3, micro_batches=4)
    machine = emulated(ranks // 4, 2, 2)

    def across(block: dict[str, Any], of: Workload) -> int:
        sent = step_bytes(resolve(machine, **block), of)
        return by_domain({key: n for key, n in sent.items() if key[0].startswith("gather")}).get(
            "world", 0
        )

    block = {"scheme": "zero3", "secondary": "node", "secondary_on": "host"}
    zero3 = across({"scheme": "zero3"}, work)
    assert across(block, work) * 2 == zero3 > 0
    lora = replace(work, frozen=work)
    assert across({"scheme": "zero3"}, lora) == 2 * zero3
    assert across({"scheme": "zero3", "frozen": {"secondary_on": "host"}}, lora) == zero3
    assert across(block, lora) * 2 == zero3


def test_frozen_weights_cross_nodes_once_in_a_run() -> None:
    """By the meter: when they are loaded each rank gets its node's share, and nothing in any step
    after that.
    """
    w = world({"scheme": "zero3", "frozen": {"secondary_on": "host"}}, emulated(2, 2, 2), NUMELS)

    def ranked(rank: int) -> None:
        engine = bare_engine(w.config, matrices(NUMELS), torch.bfloat16, frozen=matrices(FROZEN))
        engine.weights.publish_world(engine.weights.storage.frozen)
        widths = engine.weights.storage.layout.widths[len(NUMELS) :]
        # One row of two bytes to one peer
        assert engine.meter._step == {("publish", "world"): 2 * sum(widths)}
        engine.restart_frozen()
        for _ in range(3):
            for phase in ("gather_forward", "gather_backward"):
                engine.weights.gather(FROZEN_INDICES, phase).wait()
            engine.end_step(skipped=True)
            assert {domain for _, domain in engine.meter.last_step} == {"node"}

    run_threads(w.size, ranked)


@pytest.mark.parametrize("name", ["16 bits", "int8"])
@pytest.mark.parametrize("nodes", [2, 48])
def test_a_parameter_costs_two_launches_and_no_synchronization(name: str, nodes: int) -> None:
    """In a step: one copy to the host and one back; on 384 ranks as on 16."""

    def counted(block: dict[str, Any]) -> int:
        found = Launches()
        sizes = numels(8 * nodes, 64)
        with fake_world(8 * nodes):
            engine = bare_engine(
                resolve(emulated(nodes, 4, 2), **block), matrices(sizes), torch.bfloat16
            )
            engine.restart()
            for param_indices in ([param_index] for param_index in range(len(sizes))):
                with found.phase("gathers"):
                    for phase in ("gather_forward", "gather_backward"):
                        engine.weights.gather(param_indices, phase).wait()
        assert found.phases["gathers"].syncs == 0
        return found.phases["gathers"].launches

    parameters = len(numels(8 * nodes))
    assert counted(on_host(BLOCKS[name])) - counted(BLOCKS[name]) <= 2 * parameters


@pytest.mark.parametrize("name", ["16 bits", "int8"])
def test_the_peak_on_the_device_is_that_of_zero3(name: str) -> None:
    """On a GPU's queues, within 2% of the plan without a copy; a CPU's is as predicted.

    All memory is counted here, so the host's is subtracted.
    """
    machine: Topology = emulated(2, 4, 2)
    host = resolve(machine, **on_host(BLOCKS[name]), overlap=False)
    zero3 = resolve(machine, **{**BLOCKS[name], "secondary": None}, overlap=False)
    there = memory_bytes(host, Workload.uniform(MODEL.numels()), 2)["host"]
    assert peak(host, 2 * LAYER) == pytest.approx(predicted(host, 2 * LAYER), rel=0.01)
    with queues_of_a_gpu():
        assert peak(host, 2 * LAYER) - there == pytest.approx(peak(zero3, 2 * LAYER), rel=0.02)
