# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which plan to train a model with on a machine: what fits into memory, ranked by the predicted step time.

1. All plans of ``candidates.py`` that keep the user's own keys.
2. A plan that needs more than the machine's memory per rank less a reserve is dropped, with the role that is largest.
3. Of the others, the named schemes and those whose bytes take least time on the wires are simulated, and the shortest
   step wins. Times within half a percent count as equal, which is finer than any prediction: then a named scheme goes
   before a free form, and who sends less before who sends more, since the simulator hides under computation whatever
   it can, and a real step may not.

Everything is a pure function of its arguments, so that all ranks of a run choose alike. Why a plan won is told by
``explain.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from zero_topo.config import ResolvedConfig, ZeroTopoConfig
from zero_topo.cost.candidates import Candidate, candidates
from zero_topo.cost.footprint import DEFAULTS, InFlight, predict_memory
from zero_topo.cost.simulator import Job, simulate
from zero_topo.cost.time import known_rates
from zero_topo.cost.transformer import LEAST_PARAMS, scaled
from zero_topo.cost.volume import Key, Workload, step_bytes
from zero_topo.topology.model import DOMAINS, Topology
from zero_topo.topology.presets import load_machine
from zero_topo.topology.rates import Rates
from zero_topo.units import format_bytes

Seconds = Callable[[ResolvedConfig, Job], float]
RESERVE = 0.1
FINALISTS = 24
EQUAL = 0.005
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
    """

    topology: Topology
    job: Job
    numels: tuple[int, ...] | None = None
    reserve: float = RESERVE
    sparse: tuple[str, ...] = ()
    flight: InFlight = DEFAULTS

    @cached_property
    def machine(self) -> Topology:
        """The topology as far as costs depend on it, all links given."""
        links = {**load_machine(ASSUMED_MACHINE).links, **self.topology.links}
        return replace(self.topology, links=links, order=None, hosts=None)

    @cached_property
    def rates(self) -> Rates:
        """How fast a rank computes."""
        rates = known_rates(self.topology) or load_machine(ASSUMED_MACHINE).rates
        assert rates is not None
        return rates

    @property
    def assumed_rates(self) -> bool:
        """Whether they are not known."""
        return known_rates(self.topology) is None

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
        numels = self.job.model.numels() if self.numels is None else self.numels
        return Workload.uniform(numels, self.job.itemsize, self.job.micro_batches)

    @property
    def limit(self) -> int | None:
        """Bytes that a plan may hold on a rank; None if the machine's memory is not known."""
        memory = self.topology.memory_per_rank
        return None if memory is None else int(memory * (1 - self.reserve))


@dataclass(frozen=True)
class Priced:
    """A candidate and its costs.

    Attributes:
        candidate: the plan.
        memory: bytes that a rank holds, by role.
        wire: seconds of a step that its bytes take on the wires if nothing overlaps.
        seconds: of a step, simulated; None if it was not.
    """

    candidate: Candidate
    memory: Mapping[str, int]
    wire: float
    seconds: float | None = None

    @property
    def held(self) -> int:
        """Bytes in all."""
        return sum(self.memory.values())

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
    """

    request: Request
    timed: tuple[Priced, ...]
    refused: tuple[Priced, ...]
    fitting: int

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
        raise ValueError(
            f"none of {len(self.refused)} plans fits {self.request.job.model.params:,} parameters into the "
            f"{format_bytes(limit)} of a rank of {self.request.topology.name}; even {leanest.why_not(limit)}; use more "
            "nodes, a smaller micro-batch or activation checkpointing"
        )


def rank_plans(asked: ZeroTopoConfig, request: Request, seconds: Seconds | None = None) -> Ranking:
    """The plans that keep the user's keys, priced and ranked; see the module.

    Args:
        asked: the user's block; its scheme is ignored.
        request: machine and job.
        seconds: predicts the time of a step; by default the simulator.

    Raises:
        ValueError: if the keys that the user wrote fit no plan.
    """
    predict = seconds or (lambda config, job: simulate(config, job, request.rates).step_s)
    whole = replace(request.work, numels=(sum(request.work.numels),), persistent=(False,))
    fitting: list[Priced] = []
    refused: list[Priced] = []
    for candidate in candidates(asked, request.machine, request.sparse):
        wire = sum(wire_seconds(candidate.config, whole).values())
        priced = Priced(candidate, predict_memory(candidate.config, request.work, request.job, request.flight), wire)
        (refused if request.limit is not None and priced.held > request.limit else fitting).append(priced)
    finalists = sorted(fitting, key=lambda plan: (not plan.candidate.named, plan.wire))
    last = sum(plan.candidate.named for plan in fitting) + FINALISTS
    timed = [replace(plan, seconds=predict(plan.candidate.config, request.job)) for plan in finalists[:last]]
    return Ranking(request, _in_order(timed), tuple(sorted(refused, key=lambda plan: plan.held)), len(fitting))


def _in_order(timed: Sequence[Priced]) -> tuple[Priced, ...]:
    """Fastest first; times as good as equal are ordered by what else speaks for a plan."""
    fastest = min((plan.seconds or 0.0 for plan in timed), default=0.0)

    def key(plan: Priced) -> tuple[float, bool, float, int]:
        slower = (plan.seconds or 0.0) / fastest - 1 if fastest else 0.0
        return slower // EQUAL, not plan.candidate.named, plan.wire, plan.held

    return tuple(sorted(timed, key=key))


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
    limit = request.limit
    if limit is None:
        return None

    def fits(params: int) -> bool:
        job = replace(request.job, model=scaled(params, sequence=request.job.model.sequence))
        work = Workload.uniform(job.model.numels(), job.itemsize, job.micro_batches)
        return sum(predict_memory(config, work, job, request.flight).values()) <= limit

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
