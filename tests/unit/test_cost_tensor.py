# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Prices of tensor parallelism with plans: by hand, next to DeepSpeed's own layers, and as commands
print them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.commands import Run
from tests.plans import printed, resolve
from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.divided import rank_tensor, tensor_requests
from zero_topo.cost.job import Job
from zero_topo.cost.memory import activation_bytes
from zero_topo.cost.model_files import load_model
from zero_topo.cost.pipeline import Pipeline, PipelinePrice, best_pipeline
from zero_topo.cost.planner import Request, rank_plans
from zero_topo.cost.step import all_reduces
from zero_topo.cost.tensor import part_of, tensor_sizes, tree_of
from zero_topo.cost.transformer import Transformer
from zero_topo.topology import load_preset

FRONTIER = load_preset("frontier", 384)
NEOX = load_model("gpt-neox-20b")
LOSSLESS = ZeroTopoConfig.parse({})
TINY = Transformer("two", 2, hidden=16, heads=4, kv_heads=4, vocab=32, sequence=8, intermediate=64)


# -- bytes -----------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """One rank's half of attention, as far as shapes go, and of a feed-forward, with DeepSpeed's
    AutoTP functions.
    """

    def __init__(self, hidden: int, ranks: int) -> None:
        super().__init__()
        self.queries, self.out = (
            nn.Linear(hidden, hidden // ranks),
            nn.Linear(hidden // ranks, hidden),
        )
        self.up, self.down = (
            nn.Linear(hidden, 4 * hidden // ranks),
            nn.Linear(4 * hidden // ranks, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        from deepspeed.module_inject.layers import ColumnParallel, RowParallel

        for first, second in ((self.queries, self.out), (self.up, self.down)):
            inside = first(ColumnParallel.apply(None, x))
            x = x + RowParallel.apply(None, second(inside), False)
        return x


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The bytes of each all-reduce of DeepSpeed's tensor parallel layers."""
    from deepspeed.module_inject import layers

    found: list[int] = []

    def all_reduce(tensor: Tensor, *args: object, **kwargs: object) -> None:
        found.append(tensor.nbytes)

    with (
        patch.object(layers.dist, "all_reduce", all_reduce),
        patch.object(layers.dist, "inference_all_reduce", all_reduce),
        patch.object(layers.pg_utils, "is_parallel", lambda _: True),
    ):
        yield found


@pytest.mark.parametrize(("ranks", "recomputed"), [(2, False), (2, True), (4, True)])
def test_bytes_are_those_of_deepspeeds_all_reduces(ranks: int, recomputed: bool) -> None:
    """Forward, backward and recomputation of each layer; a ring sends ``2 (t - 1) / t`` of each
    message.
    """
    job = Job(
        TINY, micro_batch=3, micro_batches=2, checkpointing=recomputed, itemsize=4, tensor=ranks
    )
    layers = [_Layer(TINY.hidden, ranks) for _ in range(TINY.layers)]
    with _counted() as messages:
        for _ in range(job.micro_batches):
            x = torch.ones(job.micro_batch, TINY.sequence, TINY.hidden, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=True) if recomputed else layer(x)
            x.sum().backward()
    count, half = all_reduces(job)
    assert len(messages) == count
    assert 2 * (ranks - 1) * sum(messages) / ranks == pytest.approx(2 * count * half)
    price = Request(FRONTIER, job).price(resolve(tree_of(FRONTIER, ranks), scheme="zero3"))
    assert price.sent["tensor", "gpu" if ranks == 2 else "node"] == pytest.approx(2 * count * half)


# -- parts and trees -------------------------------------------------------------------------------


def test_a_rank_has_its_part_of_matrices_flops_logits_and_activations() -> None:
    """By hand: norms and the biases of what is all-reduced stay whole."""
    part, whole = part_of(NEOX, 2), NEOX
    h = NEOX.hidden
    vectors = 4 * h + 2 * h  # two norms, two biases of the width of the model
    layer = sum(whole.modules()[1])
    assert sum(part.modules()[1]) == (layer - vectors) // 2 + vectors
    assert sum(part.module_flops(64)) == pytest.approx(sum(whole.module_flops(64)) / 2)
    kept = Job(NEOX, 1, 1, checkpointing=False)
    one, two = (activation_bytes(replace(kept, tensor=ranks)) for ranks in (1, 2))
    logits, ends = 3.52 * 4 * 2048 * NEOX.vocab, 4 * 2048 * h
    masks_and_scores = 2 * (one - logits - ends) * 22 / 34 / 2
    assert two == pytest.approx(masks_and_scores + logits / 2 + ends, rel=0.01)


def test_sizes_divide_the_node_and_the_heads_of_keys_and_do_not_cut_gpus() -> None:
    assert tensor_sizes(FRONTIER, NEOX) == [2, 4, 8]
    assert tensor_sizes(FRONTIER, replace(NEOX, kv_heads=2)) == [2]
    # 6 GPUs of 2: 12 does not divide 64 heads
    assert tensor_sizes(load_preset("aurora", 24), NEOX) == [2, 4]
    tree = tree_of(FRONTIER, 4)
    assert (tree.nodes, tree.gpus_per_node, tree.ranks_per_gpu) == (48, 2, 1)
    with pytest.raises(
        ValueError,
        match=r"3 tensor parallel ranks do not divide the 8 ranks .* one of \[1, 2, 4, 8\]",
    ):
        tree_of(FRONTIER, 3)


def test_a_group_on_the_cut_tree_takes_as_long_as_on_the_machine() -> None:
    """ZeRO-1 on half of the ranks, as plan and as pipeline: equal rings where both send in one, and
    equal states.
    """
    machine = load_preset("perlmutter", 8)
    for job in tensor_requests(Request(machine, Job(NEOX, 1, 2)), 2):
        plan = {"weights": "rank", "gradients": "rank", "optimizer": "world", "two_hop": False}
        price = job.price(resolve(tree_of(machine, 2), **plan))
        other = PipelinePrice(Pipeline(machine, 1, 2), job)
        assert price.step.breakdown["tensor"] == pytest.approx(other.step.breakdown["tensor"])
        assert price.step.breakdown["compute"] == pytest.approx(other.step.breakdown["compute"])
        assert price.memory["optimizer"] == pytest.approx(other.memory["optimizer"], rel=1e-3)
        assert price.sent["publish", "world"] == pytest.approx(
            other.sent["publish", "world"], rel=1e-3
        )


# -- rankings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "most"), [(1, 4.466), (4, 14.995)])
def test_two_ranks_of_a_gpu_train_20b_as_fast_as_with_zero_1(count: int, most: float) -> None:
    """On 384 GCDs, lossless: no slower than tensor parallel training with ZeRO-1, at one and at
    four micro-batches.
    """
    request = Request(FRONTIER, Job(NEOX, 1, count), keeps_if_fits=True)
    best = rank_tensor(LOSSLESS, request)[0].best
    pipeline = best_pipeline(request)
    assert pipeline is not None and pipeline.config.name == "pipeline-1x2"
    assert best.request.job.tensor == 2 and not best.candidate.losses and best.fits
    assert best.seconds == pytest.approx(most, abs=0.001)
    assert best.candidate.config.sync.rings and best.seconds < pipeline.seconds
    lossy = rank_tensor(ZeroTopoConfig.parse({"lossy": True}), request)[0].best
    assert lossy.seconds < (0.88 if count == 1 else 1.005) * pipeline.seconds


def test_the_batch_is_the_same_in_both_places_and_the_faster_is_ranked() -> None:
    request = Request(load_preset("dgx-h100", 64), Job(load_model("llama-2-13b"), 2, 3))
    for size, ranking in itertools.product((2, 4, 8), rank_tensor(LOSSLESS, request)):
        job = ranking.request.job
        assert job.micro_batch * job.micro_batches == 6 * job.tensor
        if job.tensor == size:
            tried = [rank_plans(LOSSLESS, each) for each in tensor_requests(request, size)]
            assert ranking.best.seconds == min(other.best.seconds for other in tried if other.timed)


# -- commands --------------------------------------------------------------------------------------


def test_commands_take_the_number_of_tensor_parallel_ranks_and_agree(
    run: Run, tmp_path: Path
) -> None:
    """``plan`` ranks it; ``simulate`` and ``check`` price the same plan alike, from an option or
    from AutoTP's key.
    """
    of = ("--machine", "dgx-h100", "--model", "llama-2-7b")
    report = printed(run, "plan", *of, "--nodes", "2", "--micro-batches", "2", "--recommend")
    best = report["tensor"][0]
    stored = sum(best["memory"].values())
    batch = (
        "--micro-batch",
        str(best["micro_batch"]),
        "--micro-batches",
        str(best["micro_batches"]),
    )
    size = ("--tensor-parallel", str(best["tensor"]))
    degrees = "/".join(
        "-" if degree is None else str(degree) for degree in best["degrees"].values()
    )
    two_hop = best["block"].get("two_hop", True)
    (point,) = printed(run, "simulate", *of, "--ranks", "16", *batch, *size, "--schemes", degrees)[
        "results"
    ]
    assert two_hop is True and (point["seconds"], point["stored"]) == (best["seconds"], stored)
    assert (
        point["checkpointing"] == best["checkpointing"]
        and point["sent_by_domain"] == best["sent_by_domain"]
    )
    block = {key: value for key, value in best["block"].items() if key != "topology"}
    config = {
        "train_micro_batch_size_per_gpu": best["micro_batch"],
        "gradient_accumulation_steps": best["micro_batches"],
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_topo": block,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    activations = ("--set", f"checkpointing={best['checkpointing']}")
    found = printed(run, "check", str(path), *of, "--ranks", "16", *size, *activations)
    assert (found["cost"]["seconds"], found["cost"]["stored"]) == (best["seconds"], stored)
    assert found["world_size"] == 16 // best["tensor"]
    assert any(
        "tensor parallelism: the plan is that of a data-parallel group" in note
        for note in found["notes"]
    )


def test_a_recommendation_says_what_tensor_parallelism_needs(run: Run) -> None:
    status, out, _ = run(
        "plan", "--model", "gpt-neox-20b", "--machine", "frontier", "--nodes", "48", "--recommend"
    )
    assert status == 0 and "TP 2" in out
    assert (
        "with 2 tensor parallel ranks" in out and '"autotp_size": N' in out and "need code" in out
    )
    status, _, err = run("simulate", "--ranks", "64", "--schemes", "topo", "--tensor-parallel", "3")
    assert (
        status == 2
        and "3 tensor parallel ranks do not divide" in err
        and len(err.splitlines()) == 1
    )
