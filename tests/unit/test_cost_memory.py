# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The memory formulas: the paper's table, the exact bytes, what padding adds, and the peak of a
step.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from tests.paper import paper_memory_table
from tests.plans import GPT2, NEOX, resolve
from zero_topo.config import ResolvedConfig
from zero_topo.cost.job import Job, deepspeed_settings
from zero_topo.cost.memory import (
    activation_bytes,
    memory_bytes,
    moments,
    predict_memory,
)
from zero_topo.cost.tensor import part_of
from zero_topo.cost.transformer import Transformer
from zero_topo.cost.volume import Workload
from zero_topo.topology.model import Topology

FRONTIER = Topology("frontier", nodes=48, gpus_per_node=4, ranks_per_gpu=2)
LLAMA = Transformer("8b", 32, 4096, 32, 128256, 4096, 14336, kv_heads=8, gated=True, biases=False)
LARGE = Transformer(
    "405b", 126, 16384, 128, 128256, 8192, 53248, kv_heads=8, gated=True, biases=False
)


def ideal_bytes(config: ResolvedConfig, parameters: int) -> dict[str, Fraction]:
    """Without padding and scales: what a model holds that every degree and block divides, in
    proportion.
    """
    block, spec = 2**15, config.secondary_spec
    whole = config.plan.world_size * block
    stored = {
        role: Fraction(n) for role, n in memory_bytes(config, Workload.uniform([whole]), 2).items()
    }
    stored["secondary"] *= (
        1 if spec is None else Fraction(block * spec.bits, 8 * spec.nbytes(block))
    )
    return {role: nbytes * parameters / whole for role, nbytes in stored.items()}


@pytest.mark.parametrize(
    ("row", "block"),
    [
        ("ZeRO-3", {"scheme": "zero3"}),
        ("ZeRO++", {"scheme": "zero++"}),
        ("ZeRO-topo sec 8", {"scheme": "paper", "secondary": "node"}),
        ("ZeRO-topo sec 2", {"scheme": "topo", "quantize": {"resident": None}}),
    ],
)
def test_our_plans_are_the_rows_of_the_papers_table(row: str, block: dict[str, Any]) -> None:
    assert (
        ideal_bytes(resolve(FRONTIER, **block), 10**9) == paper_memory_table(10**9, nodes=48)[row]
    )


def test_a_loss_scaler_makes_quantized_sync_keep_a_residual() -> None:
    """FP16 may skip steps, so the residual cannot be stored among the gradients: 4 bytes for each
    other node's row.
    """
    config = resolve(FRONTIER, scheme="topo", sync={"mode": "quantized"})
    job = Job(GPT2, **deepspeed_settings({"fp16": {"enabled": True}}))
    stored = predict_memory(config, job.work, job)
    shards = sum(config.plan.shard_numel(n) for n in job.work.numels)
    assert stored["residual"] == 4 * 47 * shards
    plain = replace(job, **deepspeed_settings({"bf16": {"enabled": True}}))
    exact = predict_memory(config, plain.work, plain)
    assert exact == {k: v for k, v in stored.items() if k != "residual"}


def test_parameters_of_two_types_on_the_wire_each_have_a_secondary_copy() -> None:
    """BF16 weights of which some are sent as FP16 take what they take without that."""
    config = resolve(Topology("8", nodes=2, gpus_per_node=2, ranks_per_gpu=2), scheme="zero++")
    work = Workload.uniform([4096, 999, 4096, 70_000])
    mixed = replace(work, lowered=(True, False, False, True))
    assert memory_bytes(config, mixed, 2) == memory_bytes(config, work, 2)
    assert memory_bytes(config, work, 2)["secondary"]


# -- the peak of a step ----------------------------------------------------------------------------


def test_predicted_memory_begins_with_the_shards_to_the_byte() -> None:
    config, work = resolve(FRONTIER, scheme="topo"), Job(NEOX).work
    stored = predict_memory(config, work, Job(NEOX))
    shards = memory_bytes(config, work, accumulation_itemsize=2)
    assert {role: stored[role] for role in shards} == shards
    assert set(stored) - set(shards) == {"gathered", "bucket", "messages", "activations"}


def test_fp32_weights_are_their_own_masters_and_step_without_a_copy() -> None:
    config, work = resolve(scheme="zero3"), Workload.uniform([8192], itemsize=4)
    job = Job(GPT2, itemsize=4)
    stored = predict_memory(config, work, job)
    shards = {"weights": 4 * 1024, "secondary": 0, "gradients": 4 * 1024, "optimizer": 8 * 1024}
    assert {role: stored[role] for role in shards} == shards and not moments(config, work, job)[3][
        "step"
    ]
    assert moments(config, Workload.uniform([8192]), Job(GPT2))[3]["step"] == 4 * 1024


def test_activations_by_hand() -> None:
    """Korthikanti et al., equation 1, without scores; 2sbh a layer and one whole, or the loss."""
    model = GPT2
    s, b, h, a, v = 1024, 4, 768, 12, 50257
    layer = s * b * h * 34 + 4 * a * s * b
    ends = 4 * s * b * h
    logits = int(3.52 * 4 * s * b * v)
    assert logits > layer
    job = Job(model, b, checkpointing=False)
    assert activation_bytes(job) == 12 * layer + logits + ends
    recomputed = replace(job, checkpointing=True)
    assert activation_bytes(recomputed) == 12 * 2 * s * b * h + logits + ends


def test_gated_layers_and_fewer_heads_of_keys_keep_what_they_have() -> None:
    """By hand: inputs of norms and matrices, queries, keys, values, gate, up, the gate's value and
    the product.
    """
    model = LLAMA
    h, keys, f, v = 4096, 8 * 128, 14336, 128256
    layer = 2 * (h + h + h + keys + keys + h + h + h + 4 * f) + 4 * 32
    ends = 4 * 4096 * h + int(3.52 * 4 * 4096 * v)
    assert activation_bytes(Job(model, checkpointing=False)) == 32 * 4096 * layer + ends


def asked(**zero: Any) -> dict[str, Any]:
    """A DeepSpeed config with these keys."""
    return {"zero_optimization": zero}


def test_deepspeeds_own_settings_count() -> None:
    """Buckets and live parameters as they are set; offloaded states and their gradients are not on
    the device.
    """
    config, work = resolve(FRONTIER, scheme="topo"), Job(NEOX).work

    def job(**zero: Any) -> Job:
        return Job(NEOX, **deepspeed_settings(asked(**zero)))

    small = job(reduce_bucket_size=5e7, stage3_max_live_parameters=0, sub_group_size=1000)
    assert small == Job(NEOX, live=0, bucket=50_000_000, sub_group=1000)
    stored, usual = (predict_memory(config, work, which) for which in (small, Job(NEOX)))
    embedding = 2 * max(Job(NEOX).work.numels)  # larger than the small bucket
    assert (stored["bucket"], usual["bucket"]) == (embedding, 1_000_000_000)
    assert (
        moments(config, work, small)[3]["step"] == 4000 and stored["gathered"] < usual["gathered"]
    )
    offload = job(offload_optimizer={"device": "cpu"})
    assert predict_memory(config, work, offload) == usual | {"optimizer": 0}
    assert not moments(config, work, offload)[3]["step"]
    assert job(reduce_bucket_size="auto", offload_optimizer=None) == Job(NEOX)
    with pytest.raises(
        ValueError,
        match=r'zero_optimization\.reduce_bucket_size: .*"x"',
    ):
        job(reduce_bucket_size="x")


def test_a_rank_has_its_part_of_matrices_flops_logits_and_activations() -> None:
    """By hand: norms and the biases of what is all-reduced stay whole."""
    part, whole = part_of(NEOX, 2), NEOX
    h = NEOX.hidden
    vectors = 4 * h + 2 * h  # two norms, two biases of the width of the model
    layer = sum(whole.modules()[1])
    assert sum(part.modules()[1]) == (layer - vectors) // 2 + vectors
    assert sum(part.module_flops(64)) == pytest.approx(sum(whole.module_flops(64)) / 2)
    kept = Job(NEOX, checkpointing=False)
    one, two = (activation_bytes(replace(kept, tensor=ranks)) for ranks in (1, 2))
    logits, ends = 3.52 * 4 * 2048 * NEOX.vocab, 4 * 2048 * h
    masks_and_scores = 2 * (one - logits - ends) * 22 / 34 / 2
    assert two == pytest.approx(masks_and_scores + logits / 2 + ends, rel=0.01)
