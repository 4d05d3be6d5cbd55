# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Prices of expert parallelism: by hand, and as commands print them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import Run
from tests.plans import config_file, printed, rates_on, resolve
from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.divided import rank_experts, rank_tensor
from zero_topo.cost.experts import chosen, expert_sizes, experts_of, split, stacks
from zero_topo.cost.job import Job
from zero_topo.cost.model_files import ModuleTree, load_model
from zero_topo.cost.network import Network
from zero_topo.cost.planner import Request
from zero_topo.cost.step import predict_step
from zero_topo.cost.transformer import Part
from zero_topo.topology import load_preset

MACHINE = load_preset("perlmutter", 8)  # 2 nodes of 4
H, E, K = 8, 4, 2
DENSE, EXPERT = H * H + E * H, 2 * H * H + H * H
LAYER = Part(2, ((H, H), (E, H), (E, 2 * H, H), (E, H, H), (H,)), DENSE + K * EXPERT, H, 100)
HEAD = Part(1, ((H,), (32, H)), 32 * H)
TINY = ModuleTree("two", 2, H, 2, 2, 32, 16, parts=(Part(1, ((32, H),)), LAYER, HEAD))
JOB = Job(TINY, micro_batch=3, micro_batches=2, itemsize=2)


def test_a_model_is_split_into_dense_parameters_and_a_ranks_experts() -> None:
    """A router, as wide as there are experts, is dense; each part has the FLOPs of its own
    matrices.
    """
    dense, experts = split(TINY, 2)
    assert (experts_of(TINY), chosen(LAYER), len(stacks(LAYER))) == (E, K, 2)
    assert experts.params == 2 * (E // 2) * EXPERT
    assert dense.params + 2 * experts.params == TINY.params
    assert [part.multiplied for part in experts.parts] == [0, K * EXPERT, 0]
    flops = [sum(model.module_flops(16)) for model in (dense, experts, TINY)]
    assert flops[0] + flops[1] == pytest.approx(flops[2])


@pytest.mark.parametrize(
    ("name", "count", "own"), [("mixtral-8x7b", 8, 2), ("qwen-3-30b-a3b", 128, 8)]
)
def test_experts_of_published_models(name: str, count: int, own: int) -> None:
    model = load_model(name)
    assert expert_sizes(load_preset("frontier", 128), load_model("llama-2-7b")) == []
    assert experts_of(model) == count and {chosen(part) for part in model.parts[1:-1]} == {own}
    assert expert_sizes(load_preset("frontier", 128), model)[:3] == [2, 4, 8]


@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_are_sent_to_their_experts_and_back(recomputed: bool) -> None:
    """By hand: two all-to-alls forward, two backward, two of recomputation, in each of two
    layers.
    """
    job = replace(JOB, expert=4, checkpointing=recomputed)
    price = Request(MACHINE, job).price(resolve(MACHINE, scheme="zero3"))
    once = 3 * 16 * K * H * 2 * 3 // 4
    times = 2 * 2 * (6 if recomputed else 4)
    assert price.sent["tokens", "node"] == times * once
    group = Network(MACHINE, rates_on(MACHINE)).stage_time(1, 4, once, "direct")
    assert price.step.breakdown["tokens"] == pytest.approx(times * group.seconds)


def test_experts_are_gathered_and_reduced_over_the_ranks_that_have_them() -> None:
    """ZeRO-3 over 8 ranks, of experts over 4: bytes by hand; memory of shards is that without
    expert parallelism.
    """
    usual = Request(MACHINE, JOB).price(resolve(MACHINE, scheme="zero3"))
    price = Request(MACHINE, replace(JOB, expert=2)).price(resolve(MACHINE, scheme="zero3"))
    own = 2 * (E // 2) * EXPERT  # parameters of this rank's experts
    sent = Counter[str]()
    for (phase, domain), nbytes in price.sent.items():
        if domain.startswith("experts_"):
            sent[phase] += nbytes
    gathered = 2 * own * 2 * 3 // 4  # two micro-batches, 16 bits, three quarters to others
    assert sent["gather_forward"] == gathered
    assert sent["gather_backward"] == gathered and sent["scatter"] == gathered
    for role in ("weights", "gradients", "optimizer"):
        assert price.memory[role] == pytest.approx(usual.memory[role], rel=0.02)
    assert price.memory["activations"] == usual.memory["activations"]


def test_seconds_are_those_of_both_plans_and_of_the_exchanges() -> None:
    """Each part on its tree; computation is that of the whole model, as tokens spread evenly."""
    config, rates = resolve(MACHINE, scheme="topo"), rates_on(MACHINE)
    price = Request(MACHINE, replace(JOB, expert=4)).price(config)
    found = price.step.breakdown
    alone = predict_step(config, replace(JOB, model=split(TINY, 4)[0]), rates).breakdown
    assert found["compute"] == pytest.approx(predict_step(config, JOB, rates).breakdown["compute"])
    assert found["sync"] > alone["sync"] > 0
    experts = price.shares[1].config.plan
    assert (experts.world_size, experts.gradients, experts.optimizer) == (2, 1, 2)


def test_every_number_of_ranks_that_divides_experts_and_node_is_ranked() -> None:
    request = Request(MACHINE, JOB)
    rankings = rank_experts(ZeroTopoConfig.parse({}), request)
    assert {ranking.request.job.expert for ranking in rankings} == {2, 4}
    times = [ranking.best.seconds for ranking in rankings]
    assert times == sorted(times)
    spread = replace(request, job=replace(JOB, expert=2))
    assert not rank_experts(ZeroTopoConfig.parse({}), spread)
    assert not rank_tensor(ZeroTopoConfig.parse({}), spread)


def test_both_kinds_together_are_not_priced() -> None:
    with pytest.raises(
        ValueError,
        match="2 tensor parallel and 4 expert parallel ranks: both together are not priced",
    ):
        replace(JOB, tensor=2, expert=4)


def test_commands_agree_on_a_price(run: Run, tmp_path: Path) -> None:
    """``simulate`` by an option, ``check`` by AutoEP's key."""
    of = ("--model", "mixtral-8x7b", "--machine", "frontier", "--ranks", "128")
    size = ("--set", "expert-parallel=8")
    activations = ("--set", "checkpointing=true")
    batch = ("--micro-batches", "1", "--schemes", "zero3")
    (point,) = printed(run, "simulate", *of, *batch, *size, *activations)["results"]
    autoep = {"enabled": True, "autoep_size": 8}
    path = config_file(tmp_path, {"scheme": "zero3"}, expert_parallel=autoep)
    cost = printed(run, "check", path, *of)["cost"]
    assert (cost["seconds"], cost["stored"]) == (point["seconds"], point["stored"])
    assert point["breakdown"]["tokens"] > 0 and point["sent_by_domain"]["experts_world"] > 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--model", "mixtral-8x7b", "--set", "expert-parallel=3"),
            r"layers of 8 stacked experts; choose one of \[2",
        ),
        (
            ("--model", "llama-2-7b", "--set", "expert-parallel=2"),
            "choose one of the models with experts",
        ),
        (("--model", "mixtral-8x7b", "--set", "expert-parallel=0"), "expert_parallel"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_a_line(
    run: Run, words: tuple[str, ...], line: str
) -> None:
    status, _, err = run(
        "simulate", "--machine", "frontier", "--ranks", "128", "--schemes", "zero3", *words
    )
    assert status == 2 and len(err.splitlines()) == 1
    assert re.search(line, err), err
