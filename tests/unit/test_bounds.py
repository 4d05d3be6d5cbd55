# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The two bounds of a step: bytes, messages and FLOPs by hand, and DeepSpeed's own all-reduces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.plans import NEOX, TREE, resolve
from zero_topo.cost import by_domain, step_bytes
from zero_topo.cost.bounds import Bounds, cost_of, rates_of
from zero_topo.cost.job import Job
from zero_topo.cost.tensor import tree_of
from zero_topo.cost.transformer import Transformer
from zero_topo.topology import Link, load_preset

FRONTIER = load_preset("frontier", 384)
TINY = Transformer("two", 2, hidden=16, heads=4, vocab=32, sequence=8, intermediate=64)


def bounds(scheme: str, job: Job) -> Bounds:
    found = cost_of(resolve(FRONTIER, scheme=scheme), job, FRONTIER).bounds
    assert found is not None
    return found


def test_computing_is_flops_over_a_share_of_the_peak() -> None:
    """Forward, twice that backward, and layers once more where activations are recomputed."""
    flops = NEOX.module_flops(2048)
    rate = 191.5e12 * 0.4
    for recomputed, again in ((False, 0), (True, sum(flops[1:-1]))):
        found = bounds("topo", Job(NEOX, micro_batches=3, checkpointing=recomputed))
        assert found.computing == pytest.approx(3 * (3 * sum(flops) + again) / rate)


def test_a_link_takes_its_bytes_and_a_latency_for_each_message() -> None:
    """Of hsdp by hand: gathers and scatters in the node, an all-reduce between nodes.

    Twice 46 gathers and 41 buckets of 7 messages; two halves of the all-reduce of 47 messages.
    """
    job = Job(NEOX)
    buckets = -(-NEOX.params // job.bucket)
    found = bounds("hsdp", job)
    shard = 2 * sum(-(-n // 384) for n in job.work.numels)
    node = 3 * 7 * 48 * shard / (50e9 * 0.7) + (2 * 46 + buckets) * 7 * 24.1e-6
    world = 2 * 47 * shard / (12.5e9 * 0.8) + 2 * buckets * 47 * 24.1e-6
    assert found.links == pytest.approx({"node": node, "world": world})
    assert found.at_most == pytest.approx(found.computing + node + world)
    assert found.at_least == max(found.computing, node)


def test_there_are_no_seconds_of_what_is_not_known() -> None:
    """Neither of a machine without rates, nor over a link without a bandwidth."""
    assert rates_of(TREE) is None
    assert cost_of(resolve(TREE, scheme="zero3"), Job(TINY), TREE).bounds is None
    one_link = replace(FRONTIER, links={"gpu": Link(1e9, 0.0)})
    assert cost_of(resolve(one_link, scheme="zero3"), Job(TINY), one_link).bounds is None
    alone = replace(one_link, nodes=1, gpus_per_node=1)
    assert cost_of(resolve(alone, scheme="zero3"), Job(TINY), alone).bounds is not None


# -- tensor parallelism ----------------------------------------------------------------------------


class _Layer(nn.Module):
    """One rank's half of attention, as far as shapes go, and of a feed-forward, with DeepSpeed's
    AutoTP functions.
    """

    def __init__(self, hidden: int, ranks: int) -> None:
        super().__init__()
        self.pairs = [
            (nn.Linear(hidden, width), nn.Linear(width, hidden))
            for width in (hidden // ranks, 4 * hidden // ranks)
        ]

    def forward(self, x: Tensor) -> Tensor:
        from deepspeed.module_inject.layers import ColumnParallel, RowParallel

        for first, second in self.pairs:
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
        patch.multiple(layers.dist, all_reduce=all_reduce, inference_all_reduce=all_reduce),
        patch.object(layers.pg_utils, "is_parallel", lambda _: True),
    ):
        yield found


@pytest.mark.parametrize(("ranks", "recomputed"), [(2, False), (2, True), (4, True)])
def test_bytes_are_those_of_deepspeeds_all_reduces(ranks: int, recomputed: bool) -> None:
    """Forward, backward and recomputation of each layer; a ring sends ``2 (t - 1) / t`` of each
    message.
    """
    job = Job(TINY, 3, 2, checkpointing=recomputed, itemsize=4, tensor=ranks)
    layers = [_Layer(TINY.hidden, ranks) for _ in range(TINY.layers)]
    with _counted() as messages:
        for _ in range(job.micro_batches):
            x = torch.ones(job.micro_batch, TINY.sequence, TINY.hidden, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=True) if recomputed else layer(x)
            x.sum().backward()
    config = resolve(tree_of(FRONTIER, ranks), scheme="zero3")
    domain = "gpu" if ranks == 2 else "node"
    plain = by_domain(step_bytes(config, job.work)).get(domain, 0)
    found = cost_of(config, job, FRONTIER).sent_by_domain[domain] - plain
    assert found == pytest.approx(2 * (ranks - 1) * sum(messages) / ranks, abs=1)
