# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Predicts tensor and pipeline parallel training with ZeRO-1, as GPT-NeoX and Megatron-DeepSpeed
run it.

Note [A pipeline]
    ``N`` ranks form ``r`` replicas of ``p`` stages of ``t`` tensor parallel ranks. Ranks are
    numbered as in both programs: tensor first, then replica, then stage. For the same batch as
    ``K`` micro-batches on each of ``N`` ranks, a replica computes ``m = K p t`` micro-batches. A
    step lasts ``m + p - 1`` turns: ``p - 1`` of them are the bubble (Narayanan et al., arXiv
    2104.04473, section 2.2). In a turn a stage computes one micro-batch forward and backward,
    all-reduces the activations of each layer over its tensor parallel ranks (twice forward, twice
    backward, twice when it recomputes) and sends them to the next stage and their gradients back.
    The step ends with ZeRO-1: gradients are reduce-scattered over the replicas, weights gathered.
    Only these and the sends can overlap with computation.

    Memory follows Korthikanti et al. (arXiv 2205.05198): the first stage stores the inputs of ``p``
    micro-batches. Tensor parallel ranks share 24 of a layer's 34 ``s b h`` bytes, and the logits.

Compared with measurements in ``docs/simulator.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zero_topo.cost.job import Job
from zero_topo.cost.memory import ADAM_BYTES, activation_bytes
from zero_topo.cost.network import Network
from zero_topo.cost.planner import Price, Request, first_that_fits
from zero_topo.cost.step import OPTIMIZER_BYTES, Step
from zero_topo.cost.volume import Key
from zero_topo.plan import divisors
from zero_topo.topology.model import Topology
from zero_topo.topology.rates import Rates

NAME = "pipeline"


@dataclass(frozen=True)
class Pipeline:
    """Describes the degrees of a pipeline; see Note [A pipeline].

    Attributes:
        topology: the machine.
        stages: ``p``.
        tensor: ``t``.
    """

    topology: Topology
    stages: int
    tensor: int

    @property
    def name(self) -> str:
        """Return the name under which ``simulate`` takes it, such as ``pipeline-4x2``."""
        return f"{NAME}-{self.stages}x{self.tensor}"

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same weights."""
        return self.topology.world_size // (self.stages * self.tensor)


def pipelines(topology: Topology, job: Job) -> Iterator[Pipeline]:
    """Yield the pipelines that fill the machine; the first is plain ZeRO-1. Tensor parallelism
    stays in a node.
    """
    for tensor in divisors(topology.ranks_per_node):
        for stages in divisors(job.model.layers):
            if topology.world_size % (stages * tensor) == 0 and job.model.kv_heads % tensor == 0:
                yield Pipeline(topology, stages, tensor)


def _micro_batches(plan: Pipeline, job: Job) -> float:
    """Return the micro-batches of a replica, which trains those of ``p t`` ranks of the job."""
    return job.micro_batches * plan.stages * plan.tensor / job.tensor


def _collectives(
    plan: Pipeline, job: Job
) -> Iterator[tuple[str, float, tuple[int, int], float, str]]:
    """Yield (phase, times in a step, process group, bytes that a rank sends, pattern)."""
    p = plan.stages
    t = plan.tensor
    r = plan.replicas
    model = job.model
    activations = float(job.boundary_bytes)
    weights = model.params / (p * t) * job.itemsize
    micro_batches = _micro_batches(plan, job)
    layers = model.layers // p
    if t > 1:
        times = micro_batches * layers * (4 + 2 * job.checkpointing)
        for pattern in ("reduce ring", "ring"):  # the halves of an all-reduce
            yield "tensor", times, (1, t), activations * (t - 1) / t, pattern
    if p > 1:
        yield "stages", 2 * micro_batches, (t * r, 2 * t * r), activations, "direct"
    if r > 1:
        yield "sync", 1, (t, t * r), weights * (r - 1) / r, "reduce ring"
        yield "publish", 1, (t, t * r), weights * (r - 1) / r, "ring"


def pipeline_step(plan: Pipeline, job: Job, rates: Rates) -> Step:
    """Predict one optimizer step of the batch that ``job`` gives all ranks together."""
    model = job.model
    network = Network(plan.topology, rates)
    flops = model.module_flops(job.micro_batch * model.sequence)
    compute = (
        job.micro_batches
        / job.tensor
        * (3 * sum(flops) + job.checkpointing * sum(flops[1:-1]))
        / rates.flops
    )
    found = {"compute": compute, "tensor": 0.0, "stages": 0.0, "sync": 0.0, "publish": 0.0}
    for phase, times, (lo, hi), sent, pattern in _collectives(plan, job):
        stage = network.stage_time(lo, hi, sent, pattern)
        found[phase] += times * stage.seconds * (1.0 if phase == "tensor" else 1 - job.hidden)
    found["bubble"] = (
        (plan.stages - 1)
        / _micro_batches(plan, job)
        * (found["compute"] + found["tensor"] + found["stages"])
    )
    found["optimizer"] = model.params / plan.topology.world_size * OPTIMIZER_BYTES / rates.memory
    return Step(found, job.flops)


@dataclass(frozen=True)
class PipelinePrice(Price):
    """Computes the costs of a pipeline."""

    config: Pipeline  # type: ignore[assignment]
    predict = staticmethod(pipeline_step)  # type: ignore[assignment]

    @cached_property
    def memory(self) -> dict[str, int]:
        """Return the memory of a rank of the first stage in bytes, by role."""
        plan = self.config
        job = self.request.job
        each = job.model.params // (plan.stages * plan.tensor)
        return {
            "weights": each * job.itemsize,
            "gradients": each * job.itemsize,
            "optimizer": 0 if job.offload else each * ADAM_BYTES // plan.replicas,
            "bucket": min(job.bucket, each) * job.itemsize,
            "activations": activation_bytes(replace(job, tensor=plan.tensor), job.itemsize),
        }

    @cached_property
    def sent(self) -> dict[Key, int]:
        """Return the bytes that a rank sends in a step, by phase and domain."""
        sent = Counter[Key]()
        for phase, times, (_, hi), nbytes, _ in _collectives(self.config, self.request.job):
            sent[phase, self.config.topology.domain(hi)] += int(times * nbytes)
        return sent


def pipeline_price(plan: Pipeline, request: Request) -> PipelinePrice:
    """Return the cost of a pipeline for a request."""
    return first_that_fits(PipelinePrice(plan, each) for each in request.choices)


def best_pipeline(request: Request) -> PipelinePrice | None:
    """Return the fastest pipeline that fits into memory; None if none does."""
    prices = [pipeline_price(plan, request) for plan in pipelines(request.machine, request.job)]
    return min(
        (price for price in prices if price.fits), key=lambda price: price.seconds, default=None
    )
