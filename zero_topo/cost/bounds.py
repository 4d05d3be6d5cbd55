# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes the costs of a plan on a machine: memory, bytes, and two bounds of the seconds of an
optimizer step.

Note [Two bounds]
    How much of the communication is hidden behind computing is not known before a run. A step takes
    at most what computing and all links take one after the other, and at least what the longest of
    them takes. Two groups of one step that share a link add up.

    Computing is the model's FLOPs over a share of the peak of a rank, both from the machine's
    preset (``peak_flops``, ``compute_efficiency``). A link takes the bytes that a rank sends in a
    domain over the rate of that domain's link, and one latency for each message: in a collective of
    ``d`` ranks a rank sends ``d - 1``, one after the other, as a ring does. Weights are gathered
    module by module; gradients and updated weights are sent in buckets of ``reduce_bucket_size``.
    The optimizer, packing and quantization are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zero_topo.config import ResolvedConfig
from zero_topo.cost.job import Job
from zero_topo.cost.memory import predict_memory
from zero_topo.cost.volume import collectives
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import load_machine, preset_names
from zero_topo.topology.rates import Rates

Sent = tuple[str, float, int]
"""Domain, bytes and messages that a rank sends in a step."""


@dataclass(frozen=True)
class Bounds:
    """Holds the seconds of a step; see Note [Two bounds].

    Attributes:
        computing: seconds of the model's FLOPs.
        links: domain -> seconds of its link.
    """

    computing: float
    links: Mapping[str, float]

    @property
    def at_least(self) -> float:
        """Return the seconds of the slowest link, or of computing if that takes longer."""
        return max(self.computing, *self.links.values())

    @property
    def at_most(self) -> float:
        """Return the seconds of computing and all links, one after the other."""
        return self.computing + sum(self.links.values())


@dataclass(frozen=True)
class Cost:
    """Holds the costs of a plan.

    Attributes:
        config: the plan.
        memory: role -> bytes of a rank at the peak of a step.
        sent_by_domain: domain -> bytes that a rank sends in a step.
        bounds: seconds of a step; None if the machine's rates are not known.
    """

    config: ResolvedConfig
    memory: Mapping[str, int]
    sent_by_domain: Mapping[str, int]
    bounds: Bounds | None


def cost_of(config: ResolvedConfig, job: Job, machine: Topology) -> Cost:
    """Return the costs of a plan.

    Args:
        config: the plan, on the tree of a data-parallel group.
        job: what is trained.
        machine: the whole machine.
    """
    sent = list(_sent(config, job, machine))
    by_domain: defaultdict[str, int] = defaultdict(int)
    for domain, nbytes, _ in sent:
        by_domain[domain] += int(nbytes)
    memory = predict_memory(config, job.work, job)
    return Cost(config, memory, by_domain, _bounds(sent, job, machine))


def rates_of(topology: Topology) -> Rates | None:
    """Return the rates of the preset of the topology's name; None if it is no preset, or has
    none.
    """
    name = topology.name
    return load_machine(name).rates if name in preset_names() else None


def _bounds(sent: list[Sent], job: Job, machine: Topology) -> Bounds | None:
    rates = rates_of(machine)
    links = machine.links
    if rates is None or any(domain not in links for domain, _, _ in sent):
        return None
    flops = job.part.module_flops(job.micro_batch * job.model.sequence)
    # A backward pass takes twice as long as a forward pass, and layers may run forward again
    passes = 3 * sum(flops) + (sum(flops[1:-1]) if job.checkpointing else 0.0)
    seconds: defaultdict[str, float] = defaultdict(float)
    for domain, nbytes, messages in sent:
        rate = links[domain].bandwidth * rates.link_efficiency.get(domain, 1.0)
        seconds[domain] += nbytes / rate + messages * links[domain].latency
    return Bounds(job.micro_batches * passes / rates.flops, seconds)


def _sent(config: ResolvedConfig, job: Job, machine: Topology) -> Iterator[Sent]:
    """Yield what a rank sends in each collective of a step."""
    buckets = -(-job.work.params // max(1, job.bucket))
    for phase, times, moves in collectives(config, job.work):
        parts = len(job.part.module_sizes) if phase.startswith("gather") else buckets
        for move in moves:
            if move.sent:
                messages = parts * (move.hi // move.lo - 1)
                yield config.topology.domain(move.hi), times * move.sent, times * messages
    if job.tensor > 1:  # all-reduces of activations; see Note [Tensor parallelism]
        ranks = job.tensor
        model = job.model
        times = 2 * job.micro_batches * model.layers * (4 + 2 * job.checkpointing)
        activations = job.micro_batch * model.sequence * model.hidden * job.itemsize
        nbytes = times * activations * (ranks - 1) / ranks
        yield machine.domain(ranks), nbytes, times * (ranks - 1)
