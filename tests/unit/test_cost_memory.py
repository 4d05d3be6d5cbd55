# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The memory formulas: what settings and types change, activations, a tensor parallel rank; what
ranks store and hold at their peak is in ``tests/ranks``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plans import FRONTIER, GPT2, NEOX, resolve
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


def test_fp32_weights_step_without_a_copy() -> None:
    """They are their own masters."""
    for itemsize, step in ((2, 4 * 1024), (4, 0)):
        work = Workload.uniform([8192], itemsize=itemsize)
        assert (
            moments(resolve(scheme="zero3"), work, Job(GPT2, itemsize=itemsize))[3]["step"] == step
        )


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
    more: dict[str, Any] = {"kv_heads": 8, "gated": True, "biases": False}
    model = Transformer("8b", 32, 4096, 32, 128256, 4096, 14336, **more)
    layer = 2 * (6 * 4096 + 2 * 1024 + 4 * 14336) + 4 * 32
    ends = 4 * 4096 * 4096 + int(3.52 * 4 * 4096 * 128256)
    assert activation_bytes(Job(model, checkpointing=False)) == 32 * 4096 * layer + ends


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
