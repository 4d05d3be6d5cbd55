# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The planner: what it tries, what it drops, what it prefers, and the scheme "auto"."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.launching import ROOT
from tests.plans import TREE, resolve
from zero_topo.config import AUTO, ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.candidates import aligned_degrees, before_a_model, candidates
from zero_topo.cost.explain import RISKS, explain, planned
from zero_topo.cost.job import Job, deepspeed_settings
from zero_topo.cost.memory import (
    activation_bytes,
    gathered_bytes,
    memory_bytes,
    moments,
    predict_memory,
    publish_bytes,
)
from zero_topo.cost.model_files import load_model
from zero_topo.cost.planner import Price, Ranking, Request, rank_plans
from zero_topo.cost.step import Step
from zero_topo.cost.transformer import scaled
from zero_topo.cost.volume import Workload, by_domain, step_bytes
from zero_topo.hook.initialize import request_of
from zero_topo.quant.spec import ChangeSpec
from zero_topo.topology import Topology, load_preset
from zero_topo.topology.rates import Rates
from zero_topo.units import GB

FRONTIER = load_preset("frontier", 384)
EXACT = ZeroTopoConfig.parse({"scheme": "auto"})
ASKED = ZeroTopoConfig.parse({"scheme": "auto", "lossy": True})
NEOX = load_model("gpt-neox-20b")
WHOLE = {"weights": 1, "secondary": None, "gradients": 8, "optimizer": 384}


def request(topology: Topology = FRONTIER, params: int | None = None, **job: Any) -> Request:
    model = NEOX if params is None else scaled(params)
    return Request(topology, Job(model, **{"micro_batch": 1, "micro_batches": 4, **job}))


def timed(
    asked: ZeroTopoConfig, wanted: Request, clock: Callable[[ResolvedConfig, Job], float]
) -> Ranking:
    """Rank plans by a made-up clock, all of it computation."""

    def predict(config: ResolvedConfig, job: Job, rates: Rates) -> Step:
        return Step({"compute": clock(config, job), "sync": 0.0}, 1.0)

    with patch.object(Price, "predict", staticmethod(predict)):
        return rank_plans(asked, wanted)


def by_weights(config: ResolvedConfig, job: Job) -> float:
    """A made-up clock: the more ranks share the weights, the longer a step."""
    return float(config.plan.weights)


# -- memory ----------------------------------------------------------------------------------------


def test_predicted_memory_begins_with_the_shards_to_the_byte() -> None:
    config, work = resolve(FRONTIER, scheme="topo"), Workload.uniform(NEOX.numels())
    stored = predict_memory(config, work, Job(NEOX, 1, 1))
    shards = memory_bytes(config, work, accumulation_itemsize=2)
    assert {role: stored[role] for role in shards} == shards
    assert set(stored) - set(shards) == {"gathered", "bucket", "messages", "activations"}


def test_fp32_weights_are_their_own_masters_and_step_without_a_copy() -> None:
    config, work = resolve(scheme="zero3"), Workload.uniform([8192], itemsize=4)
    job = Job(load_model("gpt2"), 1, 1, itemsize=4)
    stored = predict_memory(config, work, job)
    shards = {"weights": 4 * 1024, "secondary": 0, "gradients": 4 * 1024, "optimizer": 8 * 1024}
    assert {role: stored[role] for role in shards} == shards and not moments(config, work, job)[3][
        "step"
    ]
    assert (
        moments(config, Workload.uniform([8192]), Job(load_model("gpt2"), 1, 1))[3]["step"]
        == 4 * 1024
    )


def test_activations_by_hand() -> None:
    """Korthikanti et al., equation 1: sbh(34 + 5as/h) a layer; 2sbh a layer and one whole or the
    loss.
    """
    model = load_model("gpt2")
    s, b, h, a, v = 1024, 4, 768, 12, 50257
    whole, ends, logits = (
        s * b * h * 34 + 5 * a * s * s * b,
        4 * s * b * h,
        int(3.52 * 4 * s * b * v),
    )
    job = Job(model, b, 1, checkpointing=False, attention="eager")
    assert activation_bytes(job) == 12 * whole + logits + ends
    assert (
        logits > whole
        and activation_bytes(replace(job, checkpointing=True)) == 12 * 2 * s * b * h + logits + ends
    )
    fused = replace(job, checkpointing=True, fused_loss=True)
    assert activation_bytes(fused) == 12 * 2 * s * b * h + whole + ends
    flash = s * b * h * 34 + 4 * a * s * b
    assert activation_bytes(replace(job, attention="flash")) == 12 * flash + logits + ends


def test_gated_layers_and_fewer_heads_of_keys_keep_what_they_have() -> None:
    """By hand: inputs of norms and matrices, queries, keys, values, gate, up, the gate's value and
    the product.
    """
    model = replace(load_model("llama-3-8b"), sequence=4096)
    h, keys, f, v = 4096, 8 * 128, 14336, 128256
    layer = 2 * (h + h + h + keys + keys + h + h + h + 4 * f) + 4 * 32
    ends = 4 * 4096 * h + int(3.52 * 4 * 4096 * v)
    assert activation_bytes(Job(model, 1, 1, checkpointing=False)) == 32 * 4096 * layer + ends


def test_what_is_gathered_is_bounded_by_the_model_and_by_what_deepspeed_keeps() -> None:
    config = resolve(FRONTIER, scheme="zero3")
    small, large = load_model("gpt2"), load_model("llama-3-405b")
    assert (
        gathered_bytes(config, Job(small, 1, 1), 2)[0]
        == 2 * small.params + 2 * (50257 + 1024) * 768
    )
    layer = sum(large.modules()[1])
    complete, coming = gathered_bytes(config, Job(large, 1, 1), 2)
    assert complete == 2 * (2 * layer) + 2 * layer
    # The rank's own message, and one of each node
    assert coming == 2 * (2 * layer) + 2 * layer * (1 + 48) // 384


def asked(**zero: Any) -> dict[str, Any]:
    """A DeepSpeed config with these keys."""
    return {"zero_optimization": zero}


def test_deepspeeds_own_settings_count() -> None:
    """Buckets and live parameters as they are set; offloaded states and their gradients are not on
    the device.
    """
    config, work = resolve(FRONTIER, scheme="topo"), Workload.uniform(NEOX.numels())

    def job(**zero: Any) -> Job:
        return Job(NEOX, 1, 1, **deepspeed_settings(asked(**zero)))

    small = job(reduce_bucket_size=5e7, stage3_max_live_parameters=0, sub_group_size=1000)
    assert small == Job(NEOX, 1, 1, live=0, bucket=50_000_000, sub_group=1000)
    stored, usual = (predict_memory(config, work, which) for which in (small, Job(NEOX, 1, 1)))
    embedding = 2 * max(NEOX.numels())  # larger than the small bucket
    assert (stored["bucket"], usual["bucket"]) == (embedding, 1_000_000_000)
    assert (
        moments(config, work, small)[3]["step"] == 4000 and stored["gathered"] < usual["gathered"]
    )
    offload = job(offload_optimizer={"device": "cpu"})
    assert predict_memory(config, work, offload) == usual | {"optimizer": 0}
    assert not moments(config, work, offload)[3]["step"]
    assert job(reduce_bucket_size="auto", offload_optimizer=None) == Job(NEOX, 1, 1)
    with pytest.raises(
        ValueError,
        match=r'zero_optimization\.reduce_bucket_size: must be a number of elements, got "x"',
    ):
        job(reduce_bucket_size="x")


def test_masks_of_radius_are_a_bit_for_each_element() -> None:
    config = resolve(scheme="topo", sync={"mode": "radius"})
    work = Workload.uniform([8192])
    stored = predict_memory(config, work, Job(load_model("gpt2"), 1, 1))
    assert stored["masks"] == 2 * 1024 // 8  # P = 2 nodes, C = 8192 / 8
    assert stored["residual"] == 4 * 2 * 1024


# -- candidates ------------------------------------------------------------------------------------


def test_degrees_nest_with_the_machine() -> None:
    assert aligned_degrees(FRONTIER) == (1, 2, 4, 8, 16, 32, 384)
    assert aligned_degrees(Topology("odd", nodes=3, gpus_per_node=3, ranks_per_gpu=2)) == (
        1,
        2,
        6,
        18,
    )


def test_no_two_candidates_do_the_same_and_each_block_makes_its_plan() -> None:
    found = candidates(ASKED, FRONTIER)
    assert {"zero3", "zero++", "mics", "paper", "topo"} <= {plan.name for plan in found}
    assert len({plan.name for plan in found}) == len(found)
    configs = [plan.config for plan in found]
    assert len({repr(replace(config, scheme=None, notes=())) for config in configs}) == len(configs)
    assert not [plan.name for plan in found if plan.name == "hsdp"]  # on this machine, mics
    for plan in found:
        again = resolve(FRONTIER, **plan.settings)
        assert again.plan == plan.config.plan and again.publish == plan.config.publish, plan.name


def test_keys_of_the_user_are_kept_by_every_candidate() -> None:
    asked = ZeroTopoConfig.parse(
        {"scheme": AUTO, "gradients": "node", "quantize": {"weights": "int4"}, "meter": False}
    )
    found = candidates(asked, FRONTIER)
    assert {plan.config.plan.gradients for plan in found} == {8}
    assert all(plan.config.weights_spec.bits == 4 for plan in found if plan.config.weights_spec)
    assert not any(plan.config.meter for plan in found)


def test_a_plan_is_not_named_after_what_the_user_overrode() -> None:
    """Bits, sync and degrees of the user's own stand in place of what a name would otherwise
    promise.
    """
    asked = ZeroTopoConfig.parse(
        {"scheme": AUTO, "weights": "gpu", "sync": {"mode": "dense"}, "quantize": {}}
    )
    found = candidates(asked, FRONTIER)
    assert any("int4 publish" in plan.name for plan in found)
    for plan in found:
        assert "bits" not in plan.name and "sync" not in plan.name
        assert plan.named or f"weights {FRONTIER.ranks_per_gpu}" in plan.name.split(", ")


def test_codes_are_tried_where_int8_weights_are_and_lose_no_more() -> None:
    """Next to sync in NF4, in place of INT4 differences; also where every rank stores all weights,
    which loses bits.
    """
    found = [plan for plan in candidates(ASKED, FRONTIER) if plan.config.resident_spec]
    assert all(plan.config.weights_spec == plan.config.resident_spec for plan in found)
    assert all(
        plan.config.publish.delta is None and plan.losses[0][0] == "int8 weights" for plan in found
    )
    named = {plan.name: plan.losses[1:] for plan in found if plan.config.scheme == "topo"}
    assert list(named.values()) == [(), (("nf4 sync",),)] * 2  # also through the GPU
    alone = [
        plan
        for plan in found
        if plan.config.plan.degrees() == WHOLE and plan.config.plan.gpu is None
    ]
    assert alone and not any(
        by_domain(step_bytes(p.config, request().work)).get("gpu") for p in alone
    )


def test_messages_of_publish_are_counted_as_if_all_blocks_were_sent_whole() -> None:
    """A rank's, from 48 nodes, then from the four that share its rows with it; whole weights take
    twice the bytes.
    """
    work, blocks = Workload.uniform([384 * 256 * 1000]), 1000
    config, whole = (
        resolve(FRONTIER, scheme="topo", quantize={"resident": key}) for key in ("int8", None)
    )
    message = ChangeSpec(256).largest(blocks)
    assert publish_bytes(config, work, None) == 48 * message + 192 * message
    assert 1.9 < publish_bytes(whole, work, None) / publish_bytes(config, work, None) < 2


def test_sparse_modes_are_tried_only_if_asked_for() -> None:
    assert {plan.config.sync.MODE for plan in candidates(ASKED, FRONTIER)} == {"dense", "quantized"}
    assert "oktopk" in {plan.config.sync.MODE for plan in candidates(ASKED, FRONTIER, ("oktopk",))}


def test_keys_that_fit_no_plan_are_an_error_that_tells_why() -> None:
    with pytest.raises(
        ValueError, match="no plan keeps the other keys of the block: weights degree 3"
    ):
        candidates(ZeroTopoConfig.parse({"scheme": AUTO, "weights": 3}), TREE)


# -- the choice ------------------------------------------------------------------------------------


def test_the_winner_is_the_fastest_that_fits_and_the_order_is_repeatable() -> None:
    ranking = timed(ASKED, request(), by_weights)
    assert ranking.best.config.plan.weights == 1
    assert ranking == timed(ASKED, request(), by_weights)
    assert all(plan.stored > (request().limit or 0) for plan in ranking.refused)


def test_equal_times_prefer_what_loses_nothing_then_what_holds_less_then_a_name() -> None:
    """Times that differ by 0.4 percent count as equal."""
    ranking = timed(ASKED, request(), lambda config, job: 1.0 + 0.004 * (config.plan.weights > 1))
    assert {"zero3", "zero++", "mics", "paper", "topo"} <= {
        plan.candidate.name for plan in ranking.timed
    }
    leanest = {
        n: min(plan.stored for plan in ranking.timed if len(plan.candidate.losses) == n)
        for n in range(3)
    }
    order = []
    for plan in ranking.timed:
        n = len(plan.candidate.losses)
        order.append((n, (plan.stored / leanest[n] - 1) // 0.05, not plan.candidate.named))
    assert order == sorted(order) and order[0][:2] == (0, 0) and order[-1][0] == 2


@pytest.mark.parametrize(("faster", "wins"), [(0.0, False), (0.019, False), (0.026, True)])
def test_what_loses_something_must_be_two_percent_faster(faster: float, wins: bool) -> None:
    """INT8 weights and INT4 gradients for two percent of a step, and no less; the reasons say what
    is gained.
    """

    def clock(config: ResolvedConfig, job: Job) -> float:
        return (
            1 / (1 + faster)
            if config.scheme == "paper"
            else 1.0
            if config.gradients_spec is None
            else 2.0
        )

    ranking = timed(ASKED, request(params=10**9), clock)
    assert (ranking.best.candidate.name == "paper") == wins
    assert bool(ranking.best.candidate.losses) == wins
    text = explain(ranking)[1]
    assert (
        text.startswith("it sends int8 weights, int8 secondary, int4 gradients, which saves 2.5%")
        == wins
    )
    assert text.startswith("it is lossless") != wins and ("would gain 1.9%" in text) == (
        faster == 0.019
    )


def test_what_fewer_bits_may_cost_is_what_was_recorded() -> None:
    """The losses in the planner's reasons are those of the records."""
    names = ("formats-defaults", "convergence")
    rows = [
        row
        for name in names
        for row in json.loads((ROOT / f"benchmarks/records/{name}.json").read_text())["results"]
    ]
    last = {row["scheme"]: row["last"]["difference"] for row in rows}
    for scheme, (_, mean, worst) in RISKS.items():
        assert (mean, worst) == pytest.approx(
            (last[scheme]["mean"], last[scheme]["worst"]), abs=6e-5
        )


@example(nodes=3, memory=8, params=2_356_803_854, micro_batch=1)
@given(
    nodes=st.sampled_from([1, 3, 64]),  # the plans of a machine are remembered
    memory=st.integers(8, 200),
    params=st.integers(10**8, 10**11),
    micro_batch=st.integers(1, 4),
)
def test_what_is_recommended_always_fits(
    nodes: int, memory: int, params: int, micro_batch: int
) -> None:
    topology = replace(load_preset("frontier", 8 * nodes), memory_per_rank=memory * GB)
    wanted = request(topology, params, micro_batch=micro_batch)
    ranking = timed(ASKED, wanted, by_weights)
    if not ranking.timed:
        with pytest.raises(ValueError, match=r"what would do, |nodes would not do"):
            _ = ranking.best
        return
    chosen = resolve_config(ranking.best.candidate.chosen, topology)
    assert wanted.limit is not None
    assert sum(predict_memory(chosen, wanted.work, wanted.job).values()) <= wanted.limit


def test_reasons_name_the_winner_the_waits_the_runner_up_and_what_does_not_fit() -> None:
    lines = explain(
        timed(
            ASKED,
            request(replace(load_preset("frontier", 16), memory_per_rank=64 * GB)),
            by_weights,
        )
    )
    text = "\n".join(lines)
    assert " wins with 1.00 s a step among " in lines[0] and "plans that fit, of" in lines[0]
    assert (
        "% of the memory is kept in reserve" in text
        and "it waits " in text
        and "the runner-up, " in text
    )
    assert "paper does not fit: it needs" in text and "most of it for weights (20.55 GB)" in text


def test_unknown_links_memory_and_rates_are_assumed_and_said() -> None:
    text = "\n".join(explain(rank_plans(ASKED, request(TREE))))
    assert (
        "memory is not known, so plans that shard weights over less than a node were left out"
        in text
    )
    assert "bandwidth of gpu, node, world is not known: frontier's is assumed" in text
    assert "how fast a rank of tree computes is not known" in text


def engine(*numels: int, job: Job = Job(NEOX, 1, 1)) -> Any:  # noqa: B008 (frozen)
    """What the planner asks of an engine whose parameters zero.Init has partitioned: none has
    elements of its own.

    Of a frozen one there are -n.
    """
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(
        torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) for _ in numels
    )
    for layer, n in zip(module.layers, numels, strict=True):
        width = next(width for width in (4096, 10**4, 1) if n % width == 0)
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=n > 0)
        vars(layer.weight)["ds_shape"] = torch.Size((abs(n) // width, width))
    return SimpleNamespace(
        module=module,
        train_micro_batch_size_per_gpu=lambda: 2,
        gradient_accumulation_steps=lambda: 4,
        zero_max_live_parameters=lambda: job.live,
        zero_reduce_bucket_size=lambda: job.bucket,
        zero_sub_group_size=lambda: job.sub_group,
        zero_cpu_offload=lambda: job.offload,
        fp16_enabled=lambda: job.loss_scaled,
        optimizer_name=lambda: "adamw",
        optimizer_params=dict,
    )


def test_an_engines_model_decides_and_every_rank_chooses_alike() -> None:
    numels, machine = (50_000 * 4096, *[4096 * 4096] * 100), load_preset("frontier", 16)
    first, second = (planned(ASKED, request_of(engine(*numels), machine)) for _ in range(2))
    assert first == second
    assert (
        first.notes[0].startswith("scheme auto: ")
        and "; 1,882,521,600 parameters, counted as" in first.notes[0]
    )
    assert planned(ASKED, request_of(engine(10), TREE)).plan.world_size == 8
    roomy = planned(
        ASKED, request_of(engine(*numels, job=Job(NEOX, 1, 1, live=0, bucket=10**6)), machine)
    )
    needs = [
        config.notes[0].partition("and needs ")[2].split(" of ")[0] for config in (roomy, first)
    ]
    assert all(needs) and needs[0] != needs[1]
    assert before_a_model(ASKED, TREE).plan.world_size == 8


def test_a_model_that_does_not_fit_reads_what_would_do() -> None:
    """Each way out is tried: taken, a plan fits; and if none does by itself, all of them
    together.
    """

    def complaint(params: int, micro_batch: int) -> tuple[Request, str]:
        wanted = request(
            load_preset("frontier", 16), params, micro_batch=micro_batch, checkpointing=False
        )
        with pytest.raises(ValueError, match="what would do") as raised:
            _ = timed(ASKED, wanted, by_weights).best
        return wanted, str(raised.value).partition("what would do, ")[2]

    wanted, ways = complaint(32 * 10**9, 1)
    assert ways.startswith(
        "each by itself: recompute activations (checkpointing); offload the optimizer to the host"
    )
    assert ways.endswith("; use 4 nodes") and "flash" not in ways
    offloaded = replace(wanted, job=replace(wanted.job, offload=True))
    larger = replace(wanted, topology=load_preset("frontier", 32))
    for changed in (
        replace(wanted, job=replace(wanted.job, checkpointing=True)),
        offloaded,
        larger,
    ):
        assert timed(ASKED, changed, by_weights).timed
    wanted, ways = complaint(60 * 10**9, 4)
    assert ways.startswith("all together on 2 nodes: recompute")
    job = replace(wanted.job, checkpointing=True, micro_batch=1, offload=True)
    assert timed(ASKED, replace(offloaded, job=job), by_weights).timed
