# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Models read from their modules: true counts, and the FLOPs and activations of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.plans import GPT2
from zero_topo.cost.job import Job
from zero_topo.cost.model_files import MODELS, build, load_model, read_modules
from zero_topo.cost.transformer import Transformer

FAMILIES = {
    "bert": 109_514_298,
    "mamba2": 7_285_403_648,
    "t5": 60_506_624,
}
"""Parameters of each family's default config, counted on the meta device."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_counts_of_a_family_are_true(kind: str) -> None:
    found = read_modules(build({"model_type": kind}, kind), kind)
    assert found.params == FAMILIES[kind] == Job(found).work.params
    assert found.layers > 1 and len(found.modules()) >= found.layers + 2
    assert all(flops >= 0 for flops in found.module_flops(1)) and sum(found.module_flops(1)) > 0


SHAPES = {
    "gpt2": GPT2,
    "pythia-12b": Transformer("", 36, 5120, 40, 50688, 2048, 20480),
    "llama-3.1-8b": Transformer(
        "", 32, 4096, 32, 128256, 8192, 14336, kv_heads=8, gated=True, biases=False
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_modules_have_the_flops_and_activations_of_their_shape(name: str) -> None:
    shape, found = SHAPES[name], read_modules(build(MODELS[name], name), name)
    assert (found.params, found.layers) == (shape.params, shape.layers)
    assert (found.hidden, found.heads, found.vocab) == (shape.hidden, shape.heads, shape.vocab)
    tokens = replace(found, sequence=shape.sequence).module_flops(4096)
    assert tokens == pytest.approx(shape.module_flops(4096))
    assert found.stored == pytest.approx(shape.stored, rel=0.09)


def test_experts_work_on_the_tokens_that_are_sent_to_them() -> None:
    """Mixtral: 2 of 8 experts; 13 of 47 billion parameters, without the embedding."""
    found = load_model("mixtral-8x7b")
    matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 3 * 4096 * 14336) + 32000 * 4096
    assert sum(found.module_flops(1)) == pytest.approx(
        2 * matrices + 32 * 4 * found.sequence * 4096
    )
    assert found.notes == (
        f"each token goes to 2 experts: {matrices:,} of 46,702,792,704 parameters multiply it",
    )


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(64, 192)
        self.forward_ = torch.nn.Linear(64, 64)


class Live(torch.nn.Module):
    """A user's own model, its embedding frozen, its head tied to it, its experts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 64).requires_grad_(False)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.layers.scale = torch.nn.Parameter(torch.ones(1))
        self.experts_of_head = torch.nn.Conv1d(64, 64, 3)
        self.head = torch.nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight


def test_a_live_module_is_read() -> None:
    """Also one that zero.Init has partitioned, whose parameters have no elements of their own."""
    found, model, partitioned = read_modules(Live(), "live"), Live(), Live()
    for parameter in partitioned.parameters():
        vars(parameter)["ds_shape"], parameter.data = parameter.shape, torch.empty(0)
    assert read_modules(partitioned, "live") == found
    assert found.params == sum(p.numel() for p in model.parameters())
    assert (found.layers, found.hidden, found.vocab, found.heads) == (3, 64, 100, 1)
    assert [part.count for part in found.parts] == [1, 3, 1]
    assert found.module_flops(1)[-1] == 2 * (64 * 100 + 64 * 64 * 3)
