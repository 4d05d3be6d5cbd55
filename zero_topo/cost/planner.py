# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which plan to train a model with on a machine: what fits into memory, ranked by the predicted step time.

1. All plans of ``candidates.py`` that keep the user's own keys. Fewer bits than these ask for are chosen only if the
   block is ``lossy``; else the fastest plan with fewer is told as what that would gain.
2. A plan that needs more than the machine's memory per rank less a reserve is dropped, with the role that is largest.
3. Of the others, the named schemes and those whose bytes take least time on the wires, of those that lose nothing by
   themselves, are simulated, and the shortest
   step wins. How much of its communication a step hides is ``Job.overlap``.
   What loses something, inside a node or between nodes, must be 2 percent faster for each. Times within half a percent
   then count as equal, which is finer than any prediction: what loses less goes first, then what holds less memory
   (in steps of 5 percent), then a named scheme before a free form, and who sends less before who sends more. In the
   end a plan within 2 percent of that, which holds a tenth less and loses no more, takes its place.

Everything is a pure function of its arguments, so that all ranks of a run choose alike. Why a plan won is told by
``explain.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

from zero_topo.config import AUTO, ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.candidates import Candidate, candidates
from zero_topo.cost.footprint import DEFAULTS, InFlight, predict_memory
from zero_topo.cost.memory import memory_bytes
from zero_topo.cost.step import Job, Range, Step, known_rates, predict_step, rates_as, step_range
from zero_topo.cost.transformer import LEAST_PARAMS, scaled
from zero_topo.cost.volume import Key, Workload, step_bytes
from zero_topo.topology.model import DOMAINS, Topology
from zero_topo.topology.presets import load_machine
from zero_topo.topology.rates import Rates
from zero_topo.units import format_bytes, format_count

Seconds = Callable[[ResolvedConfig, Job], float]
RESERVE = 0.1
FINALISTS, TOLD = 24, 8
"""Free plans that are simulated, of those that lose something and of the others; and of those that are only told of."""
EQUAL, HOLDS_ALIKE = 0.005, 0.05
LOSS_MUST_GAIN = 0.02
"""By which share a plan must be faster for what it loses inside a node, and again for what it loses between nodes."""
LEANER, HOLDS_LESS = 0.02, 0.1
"""By which share a plan may be slower that holds less by the second."""

MOST_DOUBLINGS = 6  # of the nodes, where the planner looks for how many would do
ASSUMED_MACHINE = "frontier"
MOST_PARAMS = 10**15
CLOSE = 1.0002
STEPS_ABOVE = (1.002, 1.005, 1.01, 1.02, 1.05)


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        topology: the machine; links and rates it does not know are assumed to be those of Frontier.
        job: the model's shape, the micro-batches, what is recomputed.
        numels: elements of each parameter, where they are known better than from the shape.
        reserve: share of a rank's memory left to the framework, the collectives' own buffers and fragmentation.
        sparse: modes of sync to try beside dense and quantized; they change how training converges.
        flight: DeepSpeed's settings that memory depends on.
        states_only: count the shards of weights, gradients and optimizer alone, as papers do, and leave out what is
            beside them at the peak of a step.
        own_rates: how fast a rank is, known better than from the machine's name.
        frozen: elements of each parameter that no optimizer updates.
    """

    topology: Topology
    job: Job
    numels: tuple[int, ...] | None = None
    reserve: float = RESERVE
    sparse: tuple[str, ...] = ()
    flight: InFlight = DEFAULTS
    states_only: bool = False
    own_rates: Rates | None = None
    frozen: tuple[int, ...] = ()

    def holds(self, config: ResolvedConfig) -> dict[str, int]:
        """Bytes of a rank by role under a plan."""
        work = replace(self.work, loss_scaled=self.flight.loss_scaled)
        if self.job.stock:  # hpZ's copy has 16 bits
            config = replace(config, secondary_spec=None)
        if self.states_only:
            return memory_bytes(config, work, work.itemsize)
        return predict_memory(config, work, self.job, self.flight)

    def price(self, config: ResolvedConfig) -> Price:
        """What a plan costs: the one answer to how long a step takes, what it sends and what a rank holds."""
        return Price(config, self)

    def fits(self, config: ResolvedConfig) -> bool:
        """Whether a plan holds no more than it may, as far as that is known."""
        return self.price(config).fits

    @cached_property
    def machine(self) -> Topology:
        """The topology as far as costs depend on it, all links given."""
        links = {**load_machine(ASSUMED_MACHINE).links, **self.topology.links}
        return replace(self.topology, links=links, order=None, hosts=None)

    @cached_property
    def rates(self) -> Rates:
        """How fast a rank computes."""
        assumed = rates_as(load_machine(ASSUMED_MACHINE), self.topology)
        rates = self.own_rates or known_rates(self.topology) or assumed
        assert rates is not None
        return rates

    @property
    def assumed_rates(self) -> bool:
        """Whether they are not known."""
        return self.own_rates is None and known_rates(self.topology) is None

    @property
    def assumed_links(self) -> list[str]:
        """Domains with several parts whose link is not known."""
        wider = [name for name, inner in pairwise(reversed(DOMAINS)) if self._parts(name, inner) > 1]
        return [name for name in reversed(wider) if name not in self.topology.links]

    def _parts(self, domain: str, inner: str) -> int:
        return self.topology.degree(domain) // self.topology.degree(inner)

    @cached_property
    def work(self) -> Workload:
        """The parameters and the step."""
        job = self.job
        numels, dims = (job.model.numels(), job.model.dims()) if self.numels is None else (self.numels, None)
        work = Workload.uniform(numels, job.itemsize, job.micro_batches, dims)
        frozen = Workload.uniform(self.frozen, job.itemsize, job.micro_batches) if self.frozen else None
        return replace(work, frozen=frozen)

    @property
    def limit(self) -> int | None:
        """Bytes that a plan may hold on a rank; None if the machine's memory is not known."""
        memory = self.topology.memory_per_rank
        return None if memory is None else max(0, int(memory * (1 - self.reserve)))


@dataclass(frozen=True)
class Price:
    """What a plan costs, each part worked out when it is asked for.

    Attributes:
        config: the plan on the request's machine.
        request: machine and job.
    """

    config: ResolvedConfig
    request: Request

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes that a rank holds, by role."""
        return self.request.holds(self.config)

    @property
    def held(self) -> int:
        """Bytes that a rank holds in all."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether that is no more than it may, as far as that is known."""
        return self.request.limit is None or self.held <= self.request.limit

    @cached_property
    def sent(self) -> Mapping[Key, int]:
        """Bytes that a rank sends in a step, by phase and domain."""
        return step_bytes(self.config, self.request.work, self.request.job.stock)

    @cached_property
    def step(self) -> Step:
        """A step's seconds, and what they are spent on."""
        return predict_step(self._known, self.request.job, self.request.rates)

    @cached_property
    def range(self) -> Range:
        """How far the step may be off."""
        return step_range(self._known, self.request.job, self.request.rates)

    @property
    def _known(self) -> ResolvedConfig:
        """The plan with all links given."""
        return replace(self.config, topology=self.request.machine)


@dataclass(frozen=True)
class Priced:
    """A candidate and its costs.

    Attributes:
        candidate: the plan.
        price: what it costs.
        wire: seconds of a step that its bytes take on the wires if nothing overlaps.
        seconds: of a step, predicted; 0 until it is.
    """

    candidate: Candidate
    price: Price
    wire: float
    seconds: float = 0.0

    @property
    def weighed(self) -> float:
        """Seconds, and more for each part of it that loses something."""
        return self.seconds * (1 + LOSS_MUST_GAIN) ** len(self.candidate.losses)

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes that a rank holds, by role."""
        return self.price.memory

    @property
    def held(self) -> int:
        """Bytes in all."""
        return self.price.held

    def why_not(self, limit: int) -> str:
        """Why it does not fit, as a sentence."""
        role = max(self.memory, key=self.memory.__getitem__)
        return (
            f"{self.candidate.name} does not fit: it needs {format_bytes(self.held)} of {format_bytes(limit)}, "
            f"most of it for {role} ({format_bytes(self.memory[role])})"
        )


@dataclass(frozen=True)
class Ranking:
    """What the planner found.

    Attributes:
        request: what was planned.
        timed: the plans that were simulated, best first.
        refused: those that do not fit, leanest first.
        fitting: how many fit.
        lossier: simulated plans that fit, but send fewer bits than was asked for, best first.
    """

    request: Request
    timed: tuple[Priced, ...]
    refused: tuple[Priced, ...]
    fitting: int
    lossier: tuple[Priced, ...] = ()

    @property
    def best(self) -> Priced:
        """The winner.

        Raises:
            ValueError: if nothing fits.
        """
        if self.timed:
            return self.timed[0]
        limit, leanest = self.request.limit, self.refused[0]
        assert limit is not None
        lossier = (
            f'{self.lossier[0].candidate.name} would fit, with fewer bits ("lossy": true); ' if self.lossier else ""
        )
        raise ValueError(
            f"none of {len(self.refused)} plans fits {format_count(self.request.job.model.params)} parameters into the "
            f"{format_bytes(limit)} of a rank of {self.request.topology.name}; even {leanest.why_not(limit)}; "
            f"{lossier}{_way_out(leanest, self.request)}"
        )

    @property
    def fastest(self) -> Priced:
        """The fastest that sends no fewer bits than the winner, which may hold less."""
        losses = len(self.best.candidate.losses)
        return min((plan for plan in self.timed if len(plan.candidate.losses) <= losses), key=lambda plan: plan.seconds)

    @property
    def faster(self) -> Priced | None:
        """The fastest plan that sends fewer bits than was asked for, if it is faster than the winner."""
        fastest = min(self.lossier, key=lambda plan: plan.seconds, default=None)
        return fastest if fastest is not None and fastest.seconds < self.best.seconds else None

    @property
    def equals(self) -> list[Priced]:
        """The plans as fast as the winner by :data:`EQUAL`, but that lose more, or else were not behind the fastest."""
        best, losses = self.best, len(self.best.candidate.losses)
        within = min(plan.weighed for plan in self.timed) * (1 + EQUAL)
        near = (plan for plan in self.timed[1:] if plan.seconds <= best.seconds * (1 + EQUAL))
        return [plan for plan in near if len(plan.candidate.losses) > losses or plan.weighed <= within]


def rank_plans(asked: ZeroTopoConfig, request: Request, seconds: Seconds | None = None) -> Ranking:
    """The plans that keep the user's keys, priced and ranked; see the module.

    Args:
        asked: the user's block, taken for automatic.
        request: machine and job.
        seconds: predicts the time of a step; by default :func:`predict_step`.

    Raises:
        ValueError: if the keys that the user wrote fit no plan, or none that sends no fewer bits than they say.
    """
    whole = replace(request.work, numels=(sum(request.work.numels),), dims=(2,), persistent=(False,))

    def clock(plan: Priced) -> float:
        return seconds(plan.candidate.config, request.job) if seconds else plan.price.step.seconds

    def simulated(plans: Sequence[Priced], most: int) -> tuple[Priced, ...]:
        return _in_order([replace(p, seconds=clock(p)) for p in _finalists(plans, most)])

    fitting: list[Priced] = []
    refused: list[Priced] = []
    lossier: list[Priced] = []
    for candidate in _careful(candidates(asked, request.machine, request.sparse), request):
        wire = sum(wire_seconds(candidate.config, whole).values())
        priced = Priced(candidate, request.price(candidate.config), wire)
        fits = priced.price.fits
        if asked.lossy or candidate.loses_only(asked):
            (fitting if fits else refused).append(priced)
        elif fits:
            lossier.append(priced)
    if not fitting and not refused:
        raise ValueError(
            f'"scheme": "{AUTO}": all plans that keep the other keys of the block send fewer bits than these ask for; '
            'allow it ("lossy": true), or write what may be sent so ("quantize", "sync", "publish")'
        )
    timed, told = simulated(fitting, FINALISTS), simulated(lossier, TOLD)
    return Ranking(request, timed, tuple(sorted(refused, key=lambda plan: plan.held)), len(fitting), told)


def _careful(found: Sequence[Candidate], request: Request) -> Sequence[Candidate]:
    """The plans that shard weights over a node at least, if the memory of a rank is not known; else all of them.

    Nothing would be refused, and the fastest plans hold everything on every rank.
    """
    if request.limit is not None:
        return found
    sharded = [plan for plan in found if plan.config.plan.weights >= request.topology.ranks_per_node]
    return sharded or found


def _finalists(fitting: Sequence[Priced], most: int) -> list[Priced]:
    """The named schemes, and of the others those with the shortest wires, among all and among those that lose nothing.

    Bytes alone would leave nothing to compare with that sends all in full.
    """
    free = sorted((plan for plan in fitting if not plan.candidate.named), key=lambda plan: plan.wire)
    exact = [plan for plan in free if not plan.candidate.losses]
    lossy = [plan for plan in free if plan.candidate.losses]
    return [*(plan for plan in fitting if plan.candidate.named), *exact[:most], *lossy[:most]]


def _in_order(timed: Sequence[Priced]) -> tuple[Priced, ...]:
    """Fastest first; times as good as equal are ordered by what else speaks for a plan."""
    fastest = min((plan.weighed for plan in timed), default=0.0)

    def equals(plan: Priced) -> tuple[float, int]:
        slower = plan.weighed / fastest - 1 if fastest else 0.0
        return slower // EQUAL, len(plan.candidate.losses)

    leanest: dict[tuple[float, int], int] = {}
    for plan in timed:
        leanest[equals(plan)] = min(plan.held, leanest.get(equals(plan), plan.held))

    def key(plan: Priced) -> tuple[float, int, float, bool, float, int]:
        more = plan.held / max(1, leanest[equals(plan)]) - 1
        return *equals(plan), more // HOLDS_ALIKE, not plan.candidate.named, plan.wire, plan.held

    return _leaner_first(sorted(timed, key=key))


def _leaner_first(timed: Sequence[Priced]) -> tuple[Priced, ...]:
    """With the leanest plan in front of those that :data:`LEANER` allows in place of the first."""

    def may_win(plan: Priced) -> bool:
        losses = len(plan.candidate.losses)
        exacter = [other.weighed for other in timed if len(other.candidate.losses) < losses]
        alike = losses <= len(timed[0].candidate.losses) and plan.held < timed[0].held * (1 - HOLDS_LESS)
        return alike and plan.seconds <= timed[0].seconds * (1 + LEANER) and plan.weighed <= min(exacter, default=inf)

    leanest = min(filter(may_win, timed), key=lambda plan: plan.held, default=None)
    return tuple(timed) if leanest is None else (leanest, *(plan for plan in timed if plan is not leanest))


def _way_out(leanest: Priced, request: Request) -> str:
    """What would let the leanest plan fit: a change of the job, or more nodes, each tried out by itself."""
    job, flight, topology = request.job, request.flight, request.machine
    leaner = {
        "recompute activations (checkpointing)": replace(request, job=replace(job, checkpointing=True)),
        "use flash attention": replace(request, job=replace(job, attention="flash")),
        "use micro-batches of one sequence": replace(request, job=replace(job, micro_batch=1)),
        "offload the optimizer to the host (offload_optimizer)": replace(request, flight=replace(flight, offload=True)),
    }
    leaner = {what: changed for what, changed in leaner.items() if changed != request}
    found = [what for what, changed in leaner.items() if changed.fits(_on(leanest, changed))]
    if (enough := _enough_nodes(leanest, request)) is not None:
        found.append(f"use {enough:,} nodes")
    if found:
        return f"what would do, each by itself: {'; '.join(found)}"
    job = replace(job, checkpointing=True, attention="flash", micro_batch=1)
    all_of_it = replace(request, job=job, flight=replace(flight, offload=True))
    enough = topology.nodes if all_of_it.fits(_on(leanest, all_of_it)) else _enough_nodes(leanest, all_of_it)
    if enough is None:
        return f"even {topology.nodes * 2**MOST_DOUBLINGS:,} nodes would not do; shorten the sequence (--seq)"
    return f"what would do, all together on {enough:,} nodes: {'; '.join(leaner)}"


def _enough_nodes(plan: Priced, request: Request) -> int | None:
    """The smallest number of nodes, by doubling, on which a plan fits."""
    counts = [request.machine.nodes * 2**power for power in range(1, MOST_DOUBLINGS + 1)]
    larger = (replace(request, topology=replace(request.machine, nodes=count)) for count in counts)
    return next((changed.topology.nodes for changed in larger if changed.fits(_on(plan, changed))), None)


def _on(plan: Priced, request: Request) -> ResolvedConfig:
    return resolve_config(plan.candidate.chosen, request.machine)


def wire_seconds(config: ResolvedConfig, work: Workload) -> dict[Key, float]:
    """Seconds that the bytes of each phase take on the links of each domain if nothing overlaps."""
    links = config.topology.links
    return {(phase, domain): n / links[domain].bandwidth for (phase, domain), n in step_bytes(config, work).items()}


def max_params(config: ResolvedConfig, request: Request) -> int | None:
    """The largest model of conventional shape (:func:`scaled`) that a plan trains on a machine; None if unlimited.

    No model up to 5% larger fits either.

    Args:
        config: the plan on the request's machine.
        request: machine and job; of its model only the sequence counts.
    """
    if request.limit is None:
        return None

    def fits(params: int) -> bool:
        model = scaled(params, sequence=request.job.model.sequence)
        return replace(request, job=replace(request.job, model=model)).fits(config)

    low = LEAST_PARAMS
    if not fits(low):
        return 0
    while True:
        high = low
        while high < MOST_PARAMS and fits(2 * high):
            high *= 2
        low, high = high, 2 * high
        while high > low * CLOSE:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        above = [int(low * step) for step in STEPS_ABOVE]  # shapes change in steps, so a larger model may be leaner
        larger = [params for params in above if fits(params)]
        if not larger:
            return low
        low = larger[-1]
