# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How long an optimizer step takes on a machine, in closed form, and how far that may be off.

Note [A step]
    A step is a sequence of passes: forward and backward of each micro-batch, then the optimizer. All ranks do the same
    at the same time, so one rank stands for all. In the first forward pass the weights updated last are published; in
    the last backward pass gradients are synced. Every collective is packed (quantized) before it is sent and unpacked
    after, over memory.
    If nothing overlaps, a pass takes its computation and all of its collectives, one after the other. If all that may
    overlap does, it takes as long as whatever is busiest: the computation, a link, or one of three streams (gathers;
    scatters; sync and publish). Not even then do overlap: the first gather of a forward pass, the last scatter and sync
    of a backward pass, the first publish, the sync of a mode that takes all gradients at once, and what is switched off
    (``Job.prefetch``, ``Job.overlap_scatter``, the block's ``overlap``). ``Job.overlap`` says where between the two a
    step is.

Note [Links]
    A byte uses the link of the smallest domain that holds both ends: the GPU's between dies, the node's between GPUs,
    the world's between nodes. A :class:`Link` gives what one rank gets while all ranks of the domain talk at once. In
    all collectives of a plan every rank of the world takes part, each in its own group, so that is the case but for
    rings: a ring through ``g`` members of a node leaves it once, so of the ``L`` ranks of a node only ``L / g`` talk.
    If the domain's link is shared (a node's uplink), these get ``g`` times as much each.

Note [Patterns]
    Of a hop of ``d`` members, ``g`` of them in one unit, in which a rank sends ``B`` bytes in all:
    *direct*, to each member ``B / (d - 1)``, all under way at once: ``B (d - g) / (d - 1)`` leave the unit, and the
    latency is paid once. *ring*, all to the next member, as NCCL and RCCL gather: each unit's link carries ``B`` for
    each group, and latencies add up around the ring. This is the alpha-beta model of Thakur, Rabenseifner and Gropp,
    "Optimization of Collective Communication Operations in MPICH" (2005), per level of the tree.

Note [Measured rings]
    Where a machine's rings were measured (``Rates.rings``), these rates count in place of the links'. They are of one
    ring through all ranks of a unit, which has all of its links; of ``L`` ranks of a unit, ``g`` of them in each ring,
    ``L / g`` rings run beside each other and share them. The widest domain's step is paid by every rank of the ring
    but one: all pass on at once, and the slowest pair sets the pace.

Note [Stock]
    DeepSpeed's own ZeRO-3 and ZeRO++ send otherwise than this engine: all ranks are one ring, whatever the machine (no
    two hops, but for ZeRO++'s quantized scatter, which has them by design); each linear layer fetches its weights by
    itself, so a layer makes a gather for each of its matrices, and one more for each matrix's scales if it is quantized
    (``partition_parameters.py``); a gradient that fills ``reduce_bucket_size`` alone, as matrices do with the 10^7 of
    DeepSpeed's ZeRO++ tutorial, is reduced by itself, by a ring if it is not quantized. Vectors go with a matrix here;
    DeepSpeed keeps them whole (``stage3_param_persistence_threshold``), and its ZeRO++ reduces each by itself, which is
    left out.

Note [Range]
    A machine's file says by which share its rates may be off (``Rates.spread``; a third where it does not). How much of
    the communication a device hides is not known either, unless the user states it. A step is never longer on a faster
    machine or with more hidden, so two predictions, everything at its best and everything at its worst, bound it; two
    more for each unknown alone say what it depends on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, get_args

from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import ITEMSIZES, Move
from zero_topo.cost.transformer import Shape, Transformer
from zero_topo.cost.volume import (
    Columns,
    Workload,
    count_moves,
    gather_spec,
    phase_moves,
    sent_as,
)
from zero_topo.topology.model import DOMAINS, Link, Topology
from zero_topo.topology.presets import Machine, load_machine, preset_names
from zero_topo.topology.rates import UNKNOWN_SPREAD, Rates, Ring, Unknown

Attention = Literal["flash", "eager"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
OVERLAP = 0.0
"""Share of the communication that may run beside computation and does, where nobody states it.

Of published steps of ZeRO-3 and its kin this model can be held against those of the ZeRO-topo paper alone (384 GCDs of
Frontier). With the presets' rates and 8 micro-batches its three ratios come out within 15% at 0, 22% at 0.25, 30% at
0.5 and 49% at 1. That is fitted for Frontier; on other machines it is a guess, on the safe side.
"""
PERSISTENT = 10**5  # elements: DeepSpeed's stage3_param_persistence_threshold
SCALES_PER_BYTES = 256 // 4  # bytes of values to a byte of their scales
CODED_BYTES = 2 * (4 + 1) + 1  # masters and codes are read to choose scales and again for the codes, which are written
OPTIMIZER_BYTES = 2 * 12 + 4 + 2  # Adam reads and writes FP32 master, momentum and variance; reads the gradient
TERA = 10**12
PHASES = ("compute", "gather_forward", "gather_backward", "scatter", "sync", "publish", "optimizer")
UNKNOWNS: tuple[Unknown, ...] = get_args(Unknown)


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        model: its shape.
        micro_batch: sequences per rank and micro-batch.
        micro_batches: micro-batches per optimizer step (``K``).
        checkpointing: whether layers run forward again before their backward.
        itemsize: bytes per weight and gradient.
        prefetch: modules gathered ahead (DeepSpeed's ``stage3_prefetch_bucket_size``).
        overlap_scatter: whether the backward pass goes on beside scatters (DeepSpeed's ``overlap_comm``).
        attention: "flash", or "eager", which keeps the matrix of scores for the backward pass.
        stock: whether everything is sent as DeepSpeed's own engine does, see Note [Stock].
        overlap: share of the communication that may overlap and does; None takes :data:`OVERLAP`, as not known.

    Raises:
        ValueError: if a number is out of range.
    """

    model: Transformer
    micro_batch: int
    micro_batches: int
    checkpointing: bool = True
    itemsize: int = 2
    prefetch: int = 1
    overlap_scatter: bool = True
    attention: Attention = "flash"
    stock: bool = False
    overlap: float | None = None

    def __post_init__(self) -> None:
        for key, least in (("micro_batch", 1), ("micro_batches", 1), ("itemsize", 1), ("prefetch", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"job: {key} is {getattr(self, key)}; it must be at least {least}")
        if not 0 <= self.hidden <= 1:
            raise ValueError(f"job: overlap is {self.overlap}; it must be a share, from 0 (nothing) to 1 (all)")

    @property
    def hidden(self) -> float:
        """Share of the communication that may overlap and does."""
        return OVERLAP if self.overlap is None else self.overlap

    @property
    def flops(self) -> float:
        """Model FLOPs of one rank in a step: forward and backward, what is computed twice counted once."""
        tokens = self.micro_batch * self.model.sequence
        return 3.0 * self.micro_batches * sum(self.model.module_flops(tokens))


# -- hops --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HopTime:
    """One hop on links that nothing else uses.

    Attributes:
        latency: seconds.
        busy: domain -> seconds for which its link is busy.
    """

    latency: float
    busy: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """From the first byte to the last."""
        return self.latency + max(self.busy.values(), default=0.0)


@dataclass(frozen=True)
class Network:
    """The links of a machine as collectives find them.

    Attributes:
        topology: tree and links.
        rates: efficiencies, and which links are shared.
    """

    topology: Topology
    rates: Rates

    def link(self, domain: str) -> Link:
        """The link of a domain at the rate that collectives reach.

        Raises:
            ValueError: if the machine's description has none.
        """
        link = self.topology.links.get(domain)
        if link is None:
            raise ValueError(
                f"topology {self.topology.name!r} says nothing of the {domain!r} link, so times are unknown; give "
                f'"links": {{"{domain}": {{"bandwidth": bytes/s, "latency": s}}}}, or take a preset: {preset_names()}'
            )
        return Link(link.bandwidth * self.rates.link_efficiency.get(domain, 1.0), link.latency)

    def hop(self, lo: int, hi: int, sent: float, pattern: str) -> HopTime:
        """Time of a hop ``(lo, hi)`` of ``plan.py`` in which every rank sends ``sent`` bytes.

        Args:
            lo, hi: the hop.
            sent: bytes, to all other members together.
            pattern: "direct", or "ring" or "reduce ring", see Note [Patterns].

        Raises:
            ValueError: for a link without a bandwidth.
        """
        size, busy, latency = hi // lo, dict[str, float](), 0.0
        members = {domain: self._members(lo, hi, domain) for domain in DOMAINS}
        measured = self.rates.rings.get("reduce" if pattern == "reduce ring" else "gather", {})
        for below, domain in pairwise(DOMAINS):
            inner, outer = members[below], members[domain]
            if outer == inner:
                continue
            if pattern == "direct":
                link = self.link(domain)
                busy[domain] = sent * (outer - inner) / (size - 1) / link.bandwidth
                latency = max(latency, link.latency)
            elif (ring := measured.get(domain)) is not None:
                unit = "gpu" if domain == "gpu" else "node"
                busy[domain] = sent * self.topology.degree(unit) / (members[unit] * ring.bandwidth)
                latency = ring.latency(size, sent / (size - 1))
            else:
                link = self.link(domain)
                busy[domain] = sent / ((inner if domain in self.rates.shared else 1) * link.bandwidth)
                steps = size // inner - (size // outer if outer < size else 0)
                latency += steps * link.latency * (size - 1) / size
        return HopTime(latency, busy)

    def _members(self, lo: int, hi: int, domain: str) -> int:
        """Members of a hop in one unit of the domain."""
        unit, size = self.topology.degree(domain), hi // lo
        return size if unit % hi == 0 else max(1, min(size, unit // lo))


def known_rates(topology: Topology) -> Rates | None:
    """Rates of the preset that a topology has its name from, if there is one and it knows."""
    return rates_as(load_machine(topology.name), topology) if topology.name in preset_names() else None


def rates_as(machine: Machine, topology: Topology) -> Rates | None:
    """Rates of a machine for a topology: rings that were measured count only over links that are the machine's."""
    if machine.rates is None:
        return None
    known = {name: link.bandwidth for name, link in machine.links.items()}
    stated = {name for name, link in topology.links.items() if link.bandwidth != known.get(name)}
    rings = {
        collective: {name: ring for name, ring in of.items() if name not in stated}
        for collective, of in machine.rates.rings.items()
    }
    return machine.rates if not stated else replace(machine.rates, rings=rings)


def rates_of(topology: Topology) -> Rates:
    """Rates of the preset that a topology has its name from.

    Raises:
        ValueError: if there are none.
    """
    rates = known_rates(topology)
    if rates is None:
        having = [name for name in preset_names() if load_machine(name).rates is not None]
        raise ValueError(
            f"how fast a rank of {topology.name!r} computes is not known; take a preset of {having}, or give rates"
        )
    return rates


# -- collectives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packet:
    """Equal collectives of modules.

    Attributes:
        phase: as the meter's.
        packing: seconds to pack and unpack one.
        hops: of one, in the order they run.
        count: how many there are.
    """

    phase: str
    packing: float
    hops: tuple[HopTime, ...]
    count: int = 1

    @property
    def seconds(self) -> float:
        """Of all of them, one after the other, from the first value packed to the last unpacked."""
        return self.count * (self.packing + sum(hop.seconds for hop in self.hops))

    def busy(self, host_codec: bool) -> Iterable[tuple[str, float]]:
        """What they keep busy for how many seconds: a stream, links, and the computation if packing takes its time."""
        stream = "gathers" if self.phase.startswith("gather") else "scatters" if self.phase == "scatter" else "steps"
        yield stream, self.seconds
        yield "compute", self.count * self.packing * host_codec
        for hop in self.hops:
            yield from ((domain, self.count * seconds) for domain, seconds in hop.busy.items())


def _packet(config: ResolvedConfig, job: Job, network: Network, phase: str, columns: Columns) -> Packet:
    """The collective of a phase for a module of these parameters."""
    sent, itemsize = sent_as(config, phase, job.stock), _itemsize(config, job, phase)
    moves, message = phase_moves(sent, phase, columns, itemsize)
    found = [move for move in moves if move.sent]
    if not found and not (columns.coded and phase.startswith("gather")):  # who holds all decodes his own codes
        return Packet(phase, 0.0, ())
    touched = _touched(config, job, phase, columns, message, sum(move.sent for move in found))
    if job.stock and phase in ("gather_forward", "gather_backward", "scatter"):
        matrices = _matrices(config, columns.all)
        apart = [phase_moves(sent, phase, Columns((width,)), itemsize)[0] for width in matrices]
        scaled = phase != "scatter" and gather_spec(config, phase) is not None
        scales = [[move._replace(sent=move.sent // SCALES_PER_BYTES) for move in moves] for moves in apart]
        found = [move for moves in (*apart, *(scales if scaled else ())) for move in moves if move.sent]
    exact = phase == "sync" or config.gradients_spec is None
    reduces = "reduce ring" if job.stock and exact else "direct"
    return Packet(phase, touched / network.rates.memory, _hops(network, found, reduces))


def _hops(network: Network, moves: Iterable[Move], reduces: str = "direct") -> tuple[HopTime, ...]:
    gathers = network.rates.gather
    return tuple(network.hop(m.lo, m.hi, float(m.sent), gathers if m.gathers else reduces) for m in moves)


def _matrices(config: ResolvedConfig, widths: Sequence[int]) -> list[int]:
    """Columns that each message of stock is about; vectors go with the first matrix."""
    least = PERSISTENT / config.plan.world_size
    large = [width for width in widths if width > least] or [sum(widths)]
    return [large[0] + sum(width for width in widths if width <= least), *large[1:]] if len(large) > 1 else large


def _itemsize(config: ResolvedConfig, job: Job, phase: str) -> int:
    sync = getattr(config.sync, "dtype", None) or config.accumulation_dtype
    name = {"sync": sync, "publish": config.publish.dtype}.get(phase)
    return job.itemsize if name is None else ITEMSIZES[name]


def _touched(config: ResolvedConfig, job: Job, phase: str, columns: Columns, message: int, sent: int) -> int:
    """Bytes of memory that packing and unpacking go over."""
    plan, whole = config.plan, sum(columns.all) * job.itemsize
    if phase == "sync":
        return 4 * sent
    if phase == "publish":
        own, held = (plan.world_size // degree * sum(columns.coded) for degree in (plan.optimizer, plan.weights))
        return CODED_BYTES * own + message + 2 * held + sent
    if phase == "scatter":
        return 2 * (plan.world_size * whole + sent)
    members = plan.hop(phase)[1]
    shard = plan.world_size // members * whole
    stored = phase == "gather_backward" and plan.secondary is not None
    packs = gather_spec(config, phase) is not None and not stored and not columns.coded
    return (members + packs) * (shard + message)


def _module_columns(config: ResolvedConfig, job: Job, shapes: Sequence[Shape]) -> Columns:
    """Of a module's parameters; stock DeepSpeed holds no codes."""
    work = Workload.uniform(map(math.prod, shapes), dims=map(len, shapes))
    coded = (False,) * len(shapes) if job.stock else work.coded(config)
    return Columns.of(config.plan, list(zip(work.numels, coded, strict=True)))


# -- the step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One predicted optimizer step of one rank.

    Attributes:
        breakdown: phase -> seconds of computing, or of communication that nothing hides.
        flops: model FLOPs (what is computed twice counted once).
    """

    breakdown: Mapping[str, float]
    flops: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.breakdown.values())

    @property
    def tflops_per_gpu(self) -> float:
        """Model FLOPs per second, in 10^12."""
        return self.flops / self.seconds / TERA


@dataclass(frozen=True)
class _Pass:
    """Passes that are alike: computation, and the collectives that may run beside it and those that may not."""

    times: int
    compute: float
    beside: Sequence[Packet]
    alone: Sequence[Packet]

    def exposed(self, hidden: float, host_codec: bool) -> dict[str, float]:
        """Phase -> seconds for which nothing else goes on; ``hidden`` is the share of what may overlap and does."""
        busy = defaultdict[str, float](float, compute=self.compute)
        for packet in self.beside:
            for what, seconds in packet.busy(host_codec):
                busy[what] += seconds
        whole = sum(packet.seconds for packet in self.beside)
        waits = (max(busy.values()) - self.compute) / whole if whole else 0.0
        found = defaultdict[str, float](float)
        for packets, share in ((self.beside, hidden * waits + 1 - hidden), (self.alone, 1.0)):
            for packet in packets:
                found[packet.phase] += self.times * share * packet.seconds
        return found


def predict_step(config: ResolvedConfig, job: Job, machine: Rates | None = None) -> Step:
    """Predict one optimizer step; see Note [A step].

    Args:
        config: plan, formats and machine.
        job: what is trained.
        machine: rates of a rank; None takes those of the preset that the topology has its name from.

    Raises:
        ValueError: if the machine's rates or the bandwidth of a link that is used are not known.
    """
    rates = rates_of(config.topology) if machine is None else machine
    modules = [(count, _module_columns(config, job, shapes)) for count, shapes in job.model.groups]
    flops = job.model.module_flops(job.micro_batch * job.model.sequence)
    forward = sum(flops) / rates.flops
    backward = 2 * forward + (sum(flops[1:-1]) / rates.flops if job.checkpointing else 0.0)
    found = dict.fromkeys(PHASES, 0.0) | {"compute": job.micro_batches * (forward + backward)}
    for each in _passes(config, job, Network(config.topology, rates), modules, (forward, backward)):
        for phase, exposed in each.exposed(job.hidden, rates.host_codec).items():
            found[phase] += exposed
    rows = config.plan.world_size // config.plan.optimizer
    columns = sum(count * sum(of.all) for count, of in modules)
    found["optimizer"] = rows * columns * OPTIMIZER_BYTES / rates.memory
    return Step(MappingProxyType(found), job.flops)


def _passes(
    config: ResolvedConfig,
    job: Job,
    network: Network,
    modules: Sequence[tuple[int, Columns]],
    seconds: tuple[float, float],
) -> Iterable[_Pass]:
    """The forward and backward passes of a step that computes each for so many seconds."""

    def of(phase: str) -> list[Packet]:
        return [replace(_packet(config, job, network, phase, of), count=count) for count, of in modules]

    def split(packets: list[Packet], hides: bool, edge: bool = True) -> tuple[list[Packet], list[Packet]]:
        """What may run beside the computation, and what may not: the first if there is nothing beside it, or all."""
        first = 0 if not hides else 1 if edge else 0
        return (packets[first:], packets[:first]) if hides else ([], packets)

    whole = [Columns(tuple(width for count, of in modules for width in of.all * count))] if config.sync.WHOLE else []
    synced = [_packet(config, job, network, "sync", columns) for columns in whole] or of("sync")
    gathers, scatters = job.prefetch > 0, job.overlap_scatter
    forward = [split(of("gather_forward"), gathers)]
    backward = [split(of("gather_backward"), gathers, edge=False), split(of("scatter"), scatters)]
    published, reduced = split(of("publish"), config.overlap), split(synced, config.overlap and not whole)
    if any(columns.coded for _, columns in modules):
        counts = Packet("publish", 0.0, _hops(network, count_moves(config.plan, 1)))
        published = published[0], [counts, *published[1]]
    for compute, always, once in ((seconds[0], forward, published), (seconds[1], backward, reduced)):
        for times, parts in ((1, [*always, once]), (job.micro_batches - 1, always)):
            beside, alone = ([packet for part in parts for packet in part[side]] for side in (0, 1))
            yield _Pass(times, compute, beside, alone)


# -- how far it may be off ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Of a predicted step.

    Attributes:
        low_s, high_s: seconds with everything unknown at its best and at its worst.
        depends_on: unknown -> by which share of the step it alone changes it from best to worst, the largest first.
    """

    low_s: float
    high_s: float
    depends_on: Mapping[str, float]

    def sentence(self) -> str:
        """On what it depends, most first; what changes it by less than a percent is left out."""
        named = [f"{what} ({share:.0%})" for what, share in self.depends_on.items() if share >= 0.01]
        return ", ".join(named) or "nothing that is unknown"


def step_range(config: ResolvedConfig, job: Job, rates: Rates) -> Range:
    """The range of a step; see Note [Range]. Overlap is unknown unless the job states it.

    Args:
        config: plan and machine.
        job: what is trained.
        rates: of a rank.
    """
    unknown = (*UNKNOWNS, *(() if job.overlap is not None else ("overlap",)))

    def ends(off: Sequence[str]) -> tuple[float, float]:
        best, worst = (_seconds(config, job, rates, off, sign) for sign in (1, -1))
        return best, worst

    usual = predict_step(config, job, rates).seconds
    spans = {what: ends((what,)) for what in unknown}
    shares = {what: (worst - best) / usual for what, (best, worst) in spans.items()}
    order = sorted(shares, key=lambda what: -shares[what])
    low, high = ends(unknown)
    return Range(low, high, {what: shares[what] for what in order})


def _seconds(config: ResolvedConfig, job: Job, rates: Rates, off: Sequence[str], sign: int) -> float:
    """Of a step with these unknowns off by their spread, upwards or downwards."""
    factors = {what: 1 + sign * rates.spread.get(what, UNKNOWN_SPREAD) for what in UNKNOWNS if what in off}
    links, machine = at_rates(config, rates, factors)
    return predict_step(links, replace(job, overlap=float(sign > 0)) if "overlap" in off else job, machine).seconds


def at_rates(config: ResolvedConfig, rates: Rates, factors: Mapping[Unknown, float]) -> tuple[ResolvedConfig, Rates]:
    """The same on a machine whose rates are so many times higher; latencies are as many times lower."""
    links, steps = factors.get("links", 1.0), 1 / factors.get("latency", 1.0)
    topology = config.topology
    slower = {
        domain: replace(link, bandwidth=link.bandwidth * links, latency=link.latency * steps)
        for domain, link in topology.links.items()
    }

    def ring_of(ring: Ring) -> Ring:
        small = None if ring.small_step is None else ring.small_step * steps
        return replace(ring, bandwidth=ring.bandwidth * links, step=ring.step * steps, small_step=small)

    machine = replace(
        rates.with_rings(ring_of),
        peak_flops=rates.peak_flops * factors.get("compute", 1.0),
        memory_bandwidth=rates.memory_bandwidth * factors.get("memory", 1.0),
    )
    return replace(config, topology=replace(topology, links=slower)), machine
