# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The rule of "auto": as few ranks as fits, with its numbers; and that a named plan must fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import GPT2, TREE, engine, resolve
from zero_topo.config import ResolvedConfig, ZeroTopoConfig, is_automatic, resolve_config
from zero_topo.cost.job import Job
from zero_topo.cost.rule import (
    aligned_degrees,
    choose,
    fits,
    plan_for,
)
from zero_topo.cost.transformer import scaled
from zero_topo.hook.initialize import job_of, resolve_block
from zero_topo.topology import Topology, load_preset
from zero_topo.units import GB

DGX = load_preset("dgx-h100", 32)
SPECS = ("weights_spec", "secondary_spec", "gradients_spec", "resident_spec")
SIZES = {billions: Job(scaled(billions * 10**9), micro_batches=4) for billions in (7, 45, 70)}


def parse(**block: Any) -> ZeroTopoConfig:
    return ZeroTopoConfig.parse(block)


def sends_in_full(config: ResolvedConfig) -> bool:
    plain = all(getattr(config, name) is None for name in SPECS)
    return plain and config.sync.MODE == "dense"


# -- the rule --------------------------------------------------------------------------------------


@given(
    machine=st.sampled_from(["dgx-h100", "frontier", "perlmutter", "aurora"]),
    nodes=st.sampled_from([1, 2, 8, 48]),
    memory=st.integers(2, 400),
)
def test_weights_then_gradients_go_over_as_few_ranks_as_fits(
    machine: str, nodes: int, memory: int
) -> None:
    """Of all aligned pairs of degrees no smaller one fits; optimizer states go over all ranks."""
    per_node = load_preset(machine, {"perlmutter": 4, "aurora": 12}.get(machine, 8)).ranks_per_node
    topology = replace(load_preset(machine, nodes * per_node), memory_per_rank=memory * GB)
    job = SIZES[7]
    world = topology.world_size
    degrees = aligned_degrees(topology)
    nested = [(w, g) for w, g in product(degrees, repeat=2) if g % w == 0]
    fitting = []
    for weights, gradients in sorted(nested):
        plan = {"weights": weights, "gradients": gradients, "optimizer": world}
        if fits(resolve(topology, **plan), job):
            fitting.append((weights, gradients))
    if not fitting:
        with pytest.raises(ValueError, match="no plan fits"):
            choose(parse(scheme="auto"), topology, job)
        return
    chosen = choose(parse(scheme="auto"), topology, job)
    assert (chosen.plan.weights, chosen.plan.gradients) == fitting[0]
    assert chosen.plan.optimizer == world and sends_in_full(chosen)


def test_degrees_nest_with_the_machine() -> None:
    assert aligned_degrees(load_preset("frontier", 384)) == [1, 2, 4, 8, 16, 32, 384]
    assert aligned_degrees(load_preset("aurora", 24)) == [1, 2, 4, 6, 12, 24]


def test_keys_of_the_user_are_kept() -> None:
    """Degrees and formats."""
    block = parse(scheme="auto", gradients="node", quantize={"weights": "int8"}, secondary="node")
    chosen = choose(block, DGX, SIZES[45])
    assert chosen.plan.gradients == 8 == chosen.plan.secondary
    assert chosen.weights_spec is not None and chosen.gradients_spec is None


def test_weights_go_over_a_node_where_the_memory_is_not_known() -> None:
    chosen = choose(parse(scheme="auto"), TREE, Job(GPT2))
    assert (chosen.plan.weights, chosen.plan.gradients) == (4, 4)
    assert "a memory that is not known" in chosen.notes[0]
    assert choose(parse(scheme="auto", weights="gpu"), TREE, Job(GPT2)).plan.weights == 2


def test_a_model_that_does_not_fit_reads_what_would_do() -> None:
    """Each way out is tried: taken, a plan fits; and if none does by itself, all of them
    together.
    """

    def complaint(job: Job, machine: Topology) -> str:
        with pytest.raises(ValueError, match="no plan fits") as raised:
            choose(parse(scheme="auto"), machine, job)
        assert "\n" not in str(raised.value)
        return str(raised.value).partition("what would do, ")[2]

    job = Job(scaled(60 * 10**9))
    small = load_preset("frontier", 16)
    ways = complaint(job, small)
    assert ways == (
        "each by itself: offload the optimizer to the host (offload_optimizer); use 4 nodes"
    )
    choose(parse(scheme="auto"), small, replace(job, offload=True))
    choose(parse(scheme="auto"), load_preset("frontier", 32), job)
    wide = Job(scaled(60 * 10**9), micro_batch=16)
    assert complaint(wide, small).startswith("all together on 2 nodes: offload the optimizer")
    choose(parse(scheme="auto"), small, replace(wide, micro_batch=1, offload=True))
    tiny = replace(small, memory_per_rank=10**6)
    assert complaint(job, tiny) == ""


# -- the default -----------------------------------------------------------------------------------


def test_the_default_is_topo_where_a_gpu_has_several_ranks_and_the_rule_where_it_is_one() -> None:
    """Also of a block with other keys; degrees and named schemes are what they say everywhere."""
    frontier = load_preset("frontier", 16)
    assert not is_automatic(parse(), frontier)
    assert resolve_config(parse(), frontier).scheme == "topo"
    chosen: list[dict[str, Any]] = [{}, {"overlap": False}, {"sync": {"mode": "quantized"}}]
    for block in chosen:
        assert is_automatic(parse(**block), DGX)
    for block in ({"scheme": "topo"}, {"weights": 1, "gradients": 8, "optimizer": 32}):
        assert not is_automatic(parse(**block), DGX)
    with pytest.raises(ValueError, match="zero-topo plan --params N"):
        resolve_config(parse(), DGX)


def test_the_engine_plans_for_its_model_and_the_smallest_device() -> None:
    """Of one that names no scheme; the memory of the devices counts where the machine's is not
    known, or less.
    """
    config = {
        "zero_optimization": {"stage": 3},
        "zero_topo": {"topology": {"nodes": 2, "gpus_per_node": 4, "ranks_per_gpu": 1}},
    }
    sevenb = engine(*[10**8] * 70)

    def weights(memory: int | None, device: str = "cuda") -> int:
        sevenb.device = torch.device(device)
        found = resolve_block(config, 8, (), sevenb, (), memory)
        shared = memory // 4 if memory and device == "cpu" else memory
        assert found.topology.memory_per_rank == shared and sends_in_full(found)
        return found.plan.weights

    assert weights(80 * GB) == 1 < weights(32 * GB)
    # The ranks of a host share its memory
    assert weights(320 * GB, "cpu") == 1 < weights(128 * GB, "cpu")
    assert weights(None) >= 4  # what is not known is not taken for endless
    with pytest.raises(ValueError, match="no plan fits"):
        weights(8 * GB)


def test_frozen_weights_take_memory_and_no_gradients() -> None:
    """Adapters of a model of 70 billion train where all of it would not fit."""
    node = load_preset("dgx-h100", 8)
    frozen = job_of(engine(*[-(10**9)] * 70, 10**8))
    found = plan_for(parse(), node, frozen)
    assert fits(found, frozen) and found.plan.weights > 1
    with pytest.raises(ValueError, match="no plan fits"):
        plan_for(parse(), node, job_of(engine(*[10**9] * 70)))


# -- named plans -----------------------------------------------------------------------------------


def test_a_named_plan_that_is_not_likely_to_fit_is_warned_of_with_a_way_out_that_fits() -> None:
    (warning,) = [
        note
        for note in plan_for(parse(scheme="topo"), DGX, SIZES[45]).notes
        if note.startswith("warning")
    ]
    assert 'add "weights": "node", or' in warning and "most of it for" in warning
    for block, billions in ((parse(scheme="topo", weights="node"), 45), (parse(scheme="topo"), 7)):
        notes = plan_for(block, DGX, SIZES[billions]).notes
        assert not [note for note in notes if note.startswith("warning")]
    default = plan_for(parse(), load_preset("frontier", 32), SIZES[45]).notes[-1]
    assert 'add "weights": "node", or' in default
    with pytest.raises(
        ValueError,
        match=r"scheme topo leaves \d+\.\d+ GB of weights and gradients .*\"weights\": \"node\"",
    ):
        plan_for(parse(scheme="topo"), DGX, SIZES[70])
