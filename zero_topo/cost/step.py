# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Predicts the time of an optimizer step on a machine, in closed form, and the range of that
prediction.

Note [A step]
    A step is a sequence of passes: forward and backward of each micro-batch, then the optimizer.
    All ranks do the same at the same time, so the model follows one rank. The first forward pass
    publishes the last updated weights; the last backward pass syncs gradients. Every collective is
    packed (quantized) in memory before it is sent, and unpacked after. Without overlap, a pass
    takes the sum of its computation and all of its collectives. With full overlap, it takes as long
    as its busiest resource: the computation, a link, or one of three streams (gathers; scatters;
    sync and publish). Some collectives never overlap: the first gather of a forward pass, the last
    scatter and sync of a backward pass, the first publish, the sync of a mode that takes all
    gradients at once, and collectives whose overlap is switched off (``Job.prefetch``,
    ``Job.overlap_scatter``, the block's ``overlap``). ``Job.overlap`` interpolates between the two.

Note [Runs]
    Sync and publish send runs of ``reduce_bucket_size`` elements, here of equal size, and each run
    has stages: packing, and one exchange for each process group. On a GPU, stages of neighbouring
    runs overlap (Note [Stages] in ``collectives/queue.py``): one run crosses nodes while the next
    is exchanged inside the node and a third is packed. All runs then take as long as their longest
    stage, and once, for one run, the others. Stages follow one another with ``overlap`` off and in
    sparse modes of sync. On a CPU, whose presets are fitted so, and for stock DeepSpeed, there is
    one collective for each module.

Note [Stock]
    Stock DeepSpeed (unmodified ZeRO-3 and ZeRO++) sends differently. All ranks form one ring on any
    machine; only ZeRO++'s quantized scatter is hierarchical, by design. Each linear layer fetches
    its own weights, so a layer makes one gather per matrix, and one more for each matrix's scales
    if it is quantized (``partition_parameters.py``). A gradient that alone fills
    ``reduce_bucket_size``, as matrices do with the 10^7 of DeepSpeed's ZeRO++ tutorial, is reduced
    separately, by a ring if it is not quantized. This model sends vectors with a matrix. DeepSpeed
    keeps them as persistent parameters (``stage3_param_persistence_threshold``), and its ZeRO++
    reduces each separately; both are left out.

Note [Muon]
    Newton-Schulz iterations of whole matrices, in five steps, as DeepSpeed 0.19.8 computes them. A
    matrix of ``m`` by ``n <= m`` takes products of ``2 n^2 m`` or ``2 n^3`` FLOPs. "standard" takes
    ten and five of them. "gram" iterates
    on the Gram matrix and starts it anew once: four, and fourteen; a square matrix as "standard".

Note [Range]
    A machine's file states by which share its rates may be off (``Rates.spread``; 30% by default).
    The share of the communication that a device hides is unknown too, unless the user states it,
    and so are the FLOPs of some layers (``model_files.py``), which may be half as many or half as
    many again. A step is never longer on a faster machine or with more overlap. Two predictions
    therefore bound it: everything at its best, and everything at its worst. Two more for each
    single unknown give the dependence of the step on it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, get_args

from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import ITEMSIZES, Move
from zero_topo.cost.experts import shares, token_exchanges
from zero_topo.cost.job import Job
from zero_topo.cost.memory import VARIANCE_BYTES
from zero_topo.cost.network import Network, StageTime
from zero_topo.cost.tensor import Exchanges
from zero_topo.cost.transformer import Shape
from zero_topo.cost.volume import (
    Columns,
    Workload,
    count_moves,
    gather_spec,
    matrix_moves,
    phase_moves,
)
from zero_topo.plan import Phase
from zero_topo.topology.rates import UNKNOWN_SPREAD, Rates, Ring, Unknown

Located = Any  # a plan with the field ``topology``
Modules = Sequence[tuple[int, Columns]]
PERSISTENT = 10**5  # elements: DeepSpeed's stage3_param_persistence_threshold
SCALES_PER_BYTES = 256 // 4  # bytes of values per byte of scales
UNKNOWN_FLOPS = 0.5  # share by which the FLOPs of a part of unknown kind may be off
MOST_SPREAD = 0.9
CODED_BYTES = 2 * (4 + 1) + 1  # per INT8 weight: masters and codes are read twice, codes written
# Adam reads and writes FP32 master, momentum and variance; reads the gradient
OPTIMIZER_BYTES = 2 * 12 + 4 + 2
TERA = 10**12
STEP_PARTS = (
    "compute",
    "gather_forward",
    "gather_backward",
    "scatter",
    "sync",
    "publish",
    "optimizer",
)
UNKNOWNS: tuple[Unknown, ...] = get_args(Unknown)
PRODUCTS = {"standard": (10, 5), "gram": (4, 14)}  # of Note [Muon]


# -- collectives -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packet:
    """Describes equal collectives of several modules.

    Attributes:
        phase: phase under which the meter counts them.
        packing: seconds to pack and unpack one collective.
        stages: times of one collective by process group, in the order they run.
        count: number of collectives.
        staged: runs whose stages overlap; 1 if stages follow one another. See Note [Runs].
    """

    phase: str
    packing: float
    stages: tuple[StageTime, ...]
    count: int = 1
    staged: int = 1

    @cached_property
    def seconds(self) -> float:
        """Return the seconds of all collectives, from the first value packed to the last
        unpacked.
        """
        stages = [self.packing, *(stage.seconds for stage in self.stages)]
        longest = max(stages)
        return self.count * (longest + (sum(stages) - longest) / self.staged)

    def busy(self, host_codec: bool) -> Iterable[tuple[str, float]]:
        """Yield (resource, busy seconds): a stream, links, and the computation if packing runs on
        its stream.
        """
        stream = "scatters" if self.phase == "scatter" else "steps"
        stream = "gathers" if self.phase.startswith("gather") else stream
        yield stream, self.seconds
        yield "compute", self.count * self.packing * host_codec
        for stage in self.stages:
            yield from ((domain, self.count * seconds) for domain, seconds in stage.busy.items())


def _packet(
    config: ResolvedConfig,
    job: Job,
    network: Network,
    phase: Phase,
    columns: Columns,
    count: int = 1,
    runs: int = 1,
) -> Packet:
    """Return the collectives of a phase for ``count`` modules, each with one of ``runs`` parts of
    these parameters.
    """
    itemsize = _itemsize(config, job, phase)
    moves, message = phase_moves(config, phase, columns, itemsize, job.stock)
    found = [move for move in moves if move.sent]
    # INT8 weights are always decoded
    if not found and not (columns.coded and phase.startswith("gather")):
        return Packet(phase, 0.0, (), count)
    touched = _touched(config, job, phase, columns, message, sum(move.sent for move in found))
    if job.stock and phase in ("gather_forward", "gather_backward", "scatter"):
        matrices = _matrices(config, columns.all)
        apart = [
            phase_moves(config, phase, Columns((width,)), itemsize, job.stock)[0]
            for width in matrices
        ]
        scaled = phase != "scatter" and gather_spec(config, phase) is not None
        found = [move for moves in apart for move in moves]
        if scaled:
            found += [move._replace(sent=move.sent // SCALES_PER_BYTES) for move in found]
        found = [move for move in found if move.sent]
        found *= 2 if job.muon and phase == "scatter" else 1  # an all-reduce
    exact = phase == "sync" or config.gradients_spec is None
    reduces = "reduce ring" if job.stock and exact else "direct"
    stages = _stages(network, found, reduces, runs)
    if phase == "sync" and config.sync.rings and not (job.stock or network.rates.host_codec):
        last = max(i for i, move in enumerate(found) if not move.gathers)
        ring = _stages(network, found[last : last + 1], "reduce ring", runs)
        stages = (*stages[:last], *ring, *stages[last + 1 :])
    return Packet(phase, touched / runs / network.rates.memory, stages, count)


def _run_packets(
    config: ResolvedConfig, job: Job, network: Network, phase: Phase, modules: Modules
) -> list[Packet]:
    """Return the first run of sync or publish of a model's modules, and the other runs; see Note
    [Runs].
    """
    if (job.stock or network.rates.host_codec) and not (phase == "sync" and config.sync.whole):
        return [_packet(config, job, network, phase, columns, count) for count, columns in modules]
    plain: list[int] = []
    coded: list[int] = []
    for count, of in modules:
        plain += of.plain * count
        coded += of.coded * count
    columns = Columns(tuple(plain), tuple(coded))
    params = job.part.params
    limit = max(1, job.bucket)
    if phase == "sync":
        limit = config.sync.run_numel(limit, params) or params
    runs = -(-params // limit)
    staged = config.overlap and (phase == "publish" or config.sync.STAGED)
    first = _packet(config, job, network, phase, columns, runs=runs)
    first = replace(first, staged=runs if staged else 1)
    return [first, replace(first, count=runs - 1)]


def _stages(
    network: Network, moves: Iterable[Move], reduces: str = "direct", runs: int = 1
) -> tuple[StageTime, ...]:
    gathers = network.rates.gather
    return tuple(
        network.stage_time(m.lo, m.hi, m.sent / runs, gathers if m.gathers else reduces)
        for m in moves
    )


def _matrices(config: ResolvedConfig, widths: Sequence[int]) -> list[int]:
    """Return the columns of each message of stock DeepSpeed; vectors are sent with the first
    matrix.
    """
    least = PERSISTENT / config.plan.world_size
    large = [width for width in widths if width > least] or [sum(widths)]
    return (
        [large[0] + sum(width for width in widths if width <= least), *large[1:]]
        if len(large) > 1
        else large
    )


def _itemsize(config: ResolvedConfig, job: Job, phase: Phase) -> int:
    sync = getattr(config.sync, "dtype", None) or config.accumulation_dtype
    name = {"sync": sync, "publish": config.publish.dtype}.get(phase)
    return job.itemsize if name is None else ITEMSIZES[name]


def _touched(
    config: ResolvedConfig, job: Job, phase: Phase, columns: Columns, message: int, sent: int
) -> int:
    """Return the bytes of memory that packing and unpacking read and write."""
    plan = config.plan
    whole = sum(columns.all) * job.itemsize
    if phase == "sync":
        return 4 * sent
    if phase == "publish":
        own, of_weights = (
            plan.world_size // degree * sum(columns.coded)
            for degree in (plan.optimizer, plan.weights)
        )
        return CODED_BYTES * own + message + 2 * of_weights + sent
    if phase == "scatter":
        return 2 * (plan.world_size * whole + sent)
    members = plan.pair_of(phase)[1]
    shard = plan.world_size // members * whole
    stored = phase == "gather_backward" and plan.secondary is not None
    packs = gather_spec(config, phase) is not None and not stored and not columns.coded
    return (members + packs) * (shard + message)


def _module_columns(config: ResolvedConfig, job: Job, shapes: Sequence[Shape]) -> Columns:
    """Return the columns of a module's parameters; stock DeepSpeed has no INT8 weights."""
    work = Workload.uniform(map(math.prod, shapes), dims=map(len, shapes))
    coded = (False,) * len(shapes) if job.stock else work.coded(config)
    return Columns.of(list(zip(work.shards(config.plan), coded, strict=True)))


# -- the step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Holds one predicted optimizer step of one rank.

    Attributes:
        breakdown: phase -> seconds of computation, or of exposed communication.
        flops: model FLOPs, without recomputation.
    """

    breakdown: Mapping[str, float]
    flops: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return sum(self.breakdown.values())

    @property
    def tflops_per_gpu(self) -> float:
        """Return the model FLOPs per second and GPU, in 10^12."""
        return self.flops / self.seconds / TERA


def predict_step(config: ResolvedConfig, job: Job, rates: Rates) -> Step:
    """Predict one optimizer step; see Note [A step].

    Args:
        config: plan, formats and the whole machine, with all links that are used.
        job: what is trained.
        rates: rates of a rank.
    """
    if job.expert > 1:
        return _with_experts(config, job, rates)
    network = Network(config.topology, rates, config.topology.world_size // config.plan.world_size)
    sent_alike = replace(job, micro_batch=1, micro_batches=1, checkpointing=True, overlap=None)
    modules, packets = _collectives(config, sent_alike, network)
    flops = job.part.module_flops(job.micro_batch * job.model.sequence)
    forward = sum(flops) / rates.flops
    backward = 2 * forward + (sum(flops[1:-1]) / rates.flops if job.checkpointing else 0.0)
    found = dict.fromkeys(STEP_PARTS, 0.0) | {"compute": job.micro_batches * (forward + backward)}
    for each in _passes(config, job, network, modules, packets, (forward, backward)):
        for phase, seconds in _exposed(*each, job.hidden, rates.host_codec).items():
            found[phase] = found.get(phase, 0.0) + seconds
    rows = config.plan.world_size // config.plan.optimizer
    columns = sum(count * sum(of.all) for count, of in modules)
    found["optimizer"] = rows * columns * OPTIMIZER_BYTES / rates.memory
    if job.muon:
        whole = [
            shape
            for part in job.part.parts[1:-1]
            for shape in part.shapes * part.count
            if len(shape) > 1
        ]
        numels = [*map(math.prod, whole)]
        owners = config.plan.world_size if job.stock else config.plan.optimizer
        saved = rows * sum(map(config.plan.shard_numel, numels)) * 2 * VARIANCE_BYTES
        found["optimizer"] += (
            owner_flops(whole, owners, job.muon) / rates.flops - saved / rates.memory
        )
        exchange = matrix_moves(config.plan, numels, _itemsize(config, job, "matrices"), job.stock)
        found["matrices"] = Packet("matrices", 0.0, _stages(network, exchange)).seconds
    if job.tensor > 1:
        found["tensor"] = _tensor_seconds(replace(network, stride=1), job)
    return Step(found, job.flops)


def _with_experts(config: ResolvedConfig, job: Job, rates: Rates) -> Step:
    """Return a step of two plans, one after the other, and of the exchanges of tokens, which
    nothing hides.
    """
    found = defaultdict[str, float](float)
    for plan, part in shares(config, job):
        for phase, seconds in predict_step(plan, part, rates).breakdown.items():
            found[phase] += seconds
    network = Network(config.topology, rates)
    for times, sent in token_exchanges(job):
        found["tokens"] += times * network.stage_time(1, job.expert, sent, "direct").seconds
    return Step(found, job.flops)


def _tensor_seconds(network: Network, job: Job) -> float:
    """Return the seconds of the all-reduces of activations, which nothing hides."""
    count, sent = all_reduces(job)
    halves = [
        network.stage_time(1, job.tensor, sent, pattern) for pattern in ("reduce ring", "ring")
    ]
    return count * sum(half.seconds for half in halves)


# Of all plans of a machine: other micro-batches, recomputation or overlap ask again
@lru_cache(maxsize=512)
def _collectives(
    config: ResolvedConfig, job: Job, network: Network
) -> tuple[Modules, Mapping[str, list[Packet]]]:
    """Return the columns of a job's modules, each with their number, and their collectives by
    phase.
    """
    modules = [(part.count, _module_columns(config, job, part.shapes)) for part in job.part.parts]
    packets: dict[str, list[Packet]] = {}
    phase: Phase
    for phase in ("gather_forward", "gather_backward", "scatter"):
        packets[phase] = [
            _packet(config, job, network, phase, columns, count) for count, columns in modules
        ]
    for phase in ("sync", "publish"):
        packets[phase] = _run_packets(config, job, network, phase, modules)
    return modules, packets


def _passes(
    config: ResolvedConfig,
    job: Job,
    network: Network,
    modules: Modules,
    packets: Mapping[str, list[Packet]],
    seconds: tuple[float, float],
) -> Iterable[tuple[int, float, list[Packet], list[Packet]]]:
    """Yield equal passes of a step: their number, computation, and the packets that overlap and
    that do not.

    Args:
        seconds: computation of a forward and of a backward pass.
    """

    def split(
        packets: list[Packet], hides: bool, edge: bool = True
    ) -> tuple[list[Packet], list[Packet]]:
        """Split packets into those that overlap and those that do not: all, or at the pass's edge
        the first.
        """
        return (packets[edge:], packets[:edge]) if hides else ([], packets)

    gathers = job.prefetch > 0
    scatters = job.overlap_scatter
    forward = [split(packets["gather_forward"], gathers)]
    backward = [
        split(packets["gather_backward"], gathers, edge=False),
        split(packets["scatter"], scatters),
    ]
    published = split(packets["publish"], config.overlap)
    reduced = split(packets["sync"], config.overlap and not config.sync.whole)
    if any(columns.coded for _, columns in modules):
        counts = Packet("publish", 0.0, _stages(network, count_moves(config.plan, 1)))
        published = published[0], [counts, *published[1]]
    for compute, always, once in (
        (seconds[0], forward, published),
        (seconds[1], backward, reduced),
    ):
        for times, parts in ((1, [*always, once]), (job.micro_batches - 1, always)):
            overlapped = [packet for part in parts for packet in part[0]]
            alone = [packet for part in parts for packet in part[1]]
            yield times, compute, overlapped, alone


def _exposed(
    times: int,
    compute: float,
    overlapped: list[Packet],
    alone: list[Packet],
    hidden: float,
    host_codec: bool,
) -> dict[str, float]:
    """Return by phase the seconds of passes that computation does not hide; ``hidden`` is the share
    of overlap.
    """
    busy = defaultdict[str, float](float, compute=compute)
    for packet in overlapped:
        for what, seconds in packet.busy(host_codec):
            busy[what] += seconds
    whole = sum(packet.seconds for packet in overlapped)
    waits = (max(busy.values()) - compute) / whole if whole else 0.0
    found = defaultdict[str, float](float)
    for packets, share in ((overlapped, hidden * waits + 1 - hidden), (alone, 1.0)):
        for packet in packets:
            found[packet.phase] += times * share * packet.seconds
    return found


def newton_schulz_flops(shape: Shape, method: str) -> float:
    """Return the FLOPs of one matrix, or of each of a stack of them; ``method`` is "gram" or
    "standard".
    """
    n, m = sorted(shape[-2:])
    large, small = PRODUCTS["standard" if n == m else method]
    return math.prod(shape[:-2]) * 2.0 * n**2 * (large * m + small * n)


def owner_flops(shapes: Iterable[Shape], owners: int, method: str) -> float:
    """Return the FLOPs of the busiest of the ranks that divide matrices among themselves, large
    ones first.
    """
    ordered = sorted(shapes, key=math.prod, reverse=True)
    return sum(newton_schulz_flops(shape, method) for shape in ordered[::owners])


# -- how far it may be off -------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Holds the range of a predicted step.

    Attributes:
        low_s, high_s: seconds with every unknown at its best and at its worst.
        depends_on: unknown -> change from its best to its worst as a share of the step, largest
            first.
    """

    low_s: float
    high_s: float
    depends_on: Mapping[str, float]


def step_range(
    config: Located, job: Job, rates: Rates, predict: Callable[[Any, Job, Rates], Step]
) -> Range:
    """Return the range of a step; see Note [Range]. Overlap is unknown unless the job states it.

    Args:
        config: plan and machine.
        job: what is trained.
        rates: rates of a rank.
        predict: :func:`predict_step`, or that of another kind of plan.
    """
    unknown = (*UNKNOWNS, *(() if job.overlap is not None else ("overlap",)))

    def ends(off: Sequence[str]) -> tuple[float, float]:
        best, worst = (
            predict(*_changed(config, job, rates, off, sign)).seconds for sign in (1, -1)
        )
        return best, worst

    usual = predict(config, job, rates).seconds
    extremes = {what: ends((what,)) for what in unknown}
    shares = {what: (worst - best) / usual for what, (best, worst) in extremes.items()}
    return Range(*ends(unknown), dict(sorted(shares.items(), key=lambda share: -share[1])))


def _changed(
    config: Located, job: Job, rates: Rates, off: Sequence[str], sign: int
) -> tuple[Located, Job, Rates]:
    """Return plan, job and rates with the unknowns ``off`` changed by their spread, up (1) or down
    (-1).
    """
    spreads = {what: rates.spread.get(what, UNKNOWN_SPREAD) for what in UNKNOWNS if what in off}
    if "compute" in spreads:
        spreads["compute"] = min(
            MOST_SPREAD, spreads["compute"] + UNKNOWN_FLOPS * job.model.unknown
        )
    factors = {what: 1 + sign * spread for what, spread in spreads.items()}
    links = factors.get("links", 1.0)
    steps = 1 / factors.get("latency", 1.0)
    topology = config.topology
    slower = {
        domain: replace(link, bandwidth=link.bandwidth * links, latency=link.latency * steps)
        for domain, link in topology.links.items()
    }

    def ring_of(ring: Ring) -> Ring:
        small = None if ring.small_step is None else ring.small_step * steps
        return replace(
            ring, bandwidth=ring.bandwidth * links, step=ring.step * steps, small_step=small
        )

    machine = replace(
        rates.with_rings(ring_of),
        peak_flops=rates.peak_flops * factors.get("compute", 1.0),
        memory_bandwidth=rates.memory_bandwidth * factors.get("memory", 1.0),
    )
    job = replace(job, overlap=float(sign > 0)) if "overlap" in off else job
    return replace(config, topology=replace(topology, links=slower)), job, machine


def all_reduces(job: Job) -> Exchanges:
    """Return the all-reduces of activations of one optimizer step; see Note [Tensor
    parallelism].
    """
    ranks = job.tensor
    count = job.micro_batches * job.model.layers * (4 + 2 * job.checkpointing)
    return Exchanges(count, job.boundary_bytes * (ranks - 1) / ranks)
