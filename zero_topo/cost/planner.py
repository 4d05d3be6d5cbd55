# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Chooses the plan to train a model on a machine: the plans that fit into memory, ranked by
predicted step time.

1. Start from all plans of ``candidates.py`` that keep the user's own keys. Plans that quantize more
   than these keys ask for are chosen only if the block is ``lossy``; else the fastest of them is
   reported as a possible gain.
2. Drop each plan that needs more than the machine's memory per rank less a reserve, and report its
   largest role.
3. Predict the step of every other plan. The shortest step wins. ``Job.overlap`` gives the share of
   the communication that overlaps. A lossy plan must be 2 percent faster for its loss inside a
   node, and again for that between nodes. Times within half a percent count as equal, since no
   prediction is that exact. Among these, a plan that loses less comes first, then one that needs
   less memory (in steps of 5 percent), then a named scheme before a free form, then the faster.
   Finally, a plan within 2 percent of the winner that needs a tenth less memory and loses no more
   replaces it.

Everything is a pure function of its arguments, so that all ranks of a run make the same choice.
``explain.py`` explains why a plan won.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from zero_topo.config import AUTO, ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.candidates import Candidate, candidates
from zero_topo.cost.experts import shares, token_exchanges
from zero_topo.cost.job import Job
from zero_topo.cost.memory import memory_bytes, predict_memory
from zero_topo.cost.network import rates_of
from zero_topo.cost.step import Range, Step, all_reduces, predict_step, step_range
from zero_topo.cost.tensor import tree_of
from zero_topo.cost.volume import Key, Workload, by_domain, step_bytes
from zero_topo.topology.model import DOMAINS, MOST_RANKS, Topology
from zero_topo.topology.presets import load_machine
from zero_topo.topology.rates import Rates
from zero_topo.units import format_bytes, format_count

RESERVE = 0.1
EQUAL = 0.005
HOLDS_ALIKE = 0.05
LOSS_MUST_GAIN = 0.02
"""Share by which a plan must be faster for its loss inside a node, and again for its loss between
nodes.
"""
LEANER = 0.02
HOLDS_LESS = 0.1
"""A plan may be slower by the first share if it needs less memory by the second share."""

MOST_DOUBLINGS = 6  # doublings of the nodes, while the planner searches for a sufficient number
ASSUMED_MACHINE = "frontier"


@dataclass(frozen=True)
class Request:
    """Describes what is to be planned.

    Attributes:
        topology: the machine; unknown links and rates are assumed to be those of Frontier.
        job: the model's shape, the micro-batches, what is recomputed, DeepSpeed's settings.
        numels: elements of each parameter, if they are known exactly; None takes those of the
            shape.
        reserve: share of a rank's memory left to the framework, the collectives' own buffers and
            fragmentation.
        sparse: modes of sync to try next to dense and quantized; they change how training
            converges.
        states_only: count only the shards of weights, gradients and optimizer, as papers do,
            without the other memory at the peak of a step.
        own_rates: rates of a rank, if they are known; None takes those of the machine's preset.
        frozen: elements of each parameter that no optimizer updates.
        whole: for each of ``numels``, whether its update is Muon's; empty if none.
        keeps_if_fits: keep activations in each plan that fits with them, and recompute them in the
            other plans, rather than as the job says.
    """

    topology: Topology
    job: Job
    numels: tuple[int, ...] | None = None
    reserve: float = RESERVE
    sparse: tuple[str, ...] = ()
    states_only: bool = False
    own_rates: Rates | None = None
    frozen: tuple[int, ...] = ()
    whole: tuple[bool, ...] = ()
    keeps_if_fits: bool = False

    def price(self, config: ResolvedConfig) -> Price:
        """Return the cost of a plan: its step time, the bytes it sends, and the memory of a
        rank.
        """
        return first_that_fits(Price(config, each) for each in self.choices)

    @cached_property
    def choices(self) -> tuple[Request, ...]:
        """Return the requests of which a plan takes the first with which it fits; see
        ``keeps_if_fits``.
        """
        if not self.keeps_if_fits:
            return (self,)
        kept, recomputed = (
            replace(self.job, checkpointing=recompute) for recompute in (False, True)
        )
        fixed = replace(self, keeps_if_fits=False)
        return replace(fixed, job=kept), replace(fixed, job=recomputed)

    @cached_property
    def machine(self) -> Topology:
        """Return the topology as far as costs depend on it, with assumed links where they are
        unknown.
        """
        links = {**load_machine(ASSUMED_MACHINE).links, **self.topology.links}
        return replace(self.topology, links=links, order=None, hosts=None)

    @cached_property
    def tree(self) -> Topology:
        """Return the tree of the ranks that a plan counts: of each data-parallel group, with
        assumed links.
        """
        return tree_of(self.machine, self.job.tensor)

    @property
    def known_rates(self) -> Rates | None:
        """Return the rates of a rank, if they are known."""
        return self.own_rates or rates_of(self.topology)

    @cached_property
    def rates(self) -> Rates:
        """Return the rates of a rank; Frontier's if they are not known."""
        rates = self.known_rates or rates_of(self.topology, ASSUMED_MACHINE)
        assert rates is not None
        return rates

    @property
    def assumed_links(self) -> list[str]:
        """Return the domains with several parts whose link is not known."""
        degree = self.topology.degree
        links = self.topology.links
        return [
            name
            for inner, name in pairwise(DOMAINS)
            if degree(name) > degree(inner) and name not in links
        ]

    @cached_property
    def work(self) -> Workload:
        """Return the parameters and the step, as far as bytes depend on them."""
        job = self.job
        numels, dims = (
            (job.part.numels(), job.part.dims()) if self.numels is None else (self.numels, None)
        )
        work = Workload.uniform(numels, job.itemsize, job.micro_batches, dims)
        frozen = (
            Workload.uniform(self.frozen, job.itemsize, job.micro_batches) if self.frozen else None
        )
        whole = self.whole if self.numels is not None else job.part.whole() if job.muon else ()
        return replace(work, frozen=frozen, whole=whole, loss_scaled=job.loss_scaled)

    @property
    def limit(self) -> int | None:
        """Return the bytes that a plan may use on a rank; None if the machine's memory is not
        known.
        """
        return self._usable(self.topology.memory_per_rank)

    def _usable(self, memory: int | None) -> int | None:
        return None if memory is None else max(0, int(memory * (1 - self.reserve)))


@dataclass(frozen=True)
class Price:
    """Computes the costs of a plan, each on first access.

    Attributes:
        config: the plan on the request's machine.
        request: machine and job.
    """

    config: ResolvedConfig
    request: Request
    predict = staticmethod(predict_step)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Return the memory of a rank in bytes, by role."""
        config = self.config
        request = self.request
        if request.job.expert > 1:
            return dict(sum((Counter(part.memory) for part in self.shares), Counter()))
        if request.job.stock:  # stock hpZ stores its copy in 16 bits
            config = replace(config, secondary_spec=None)
        if request.states_only:
            return memory_bytes(config, request.work, request.work.itemsize)
        return predict_memory(config, request.work, request.job)

    @cached_property
    def shares(self) -> tuple[Price, ...]:
        """Return the prices of the dense parameters and of a rank's experts; see Note [Expert
        parallelism].
        """
        parts = shares(self._known, self.request.job)
        return tuple(
            Price(config, replace(self.request, job=job, whole=())) for config, job in parts
        )

    @cached_property
    def stored(self) -> int:
        """Return the total memory of a rank's device in bytes."""
        return sum(self.memory.values())

    @property
    def most(self) -> str:
        """Return for which role most of the memory is, and its bytes, as the end of a sentence."""
        role = max(self.memory, key=self.memory.__getitem__)
        return f"most of it for {role} ({format_bytes(self.memory[role])})"

    @property
    def fits(self) -> bool:
        """Return whether the plan fits into a rank's memory and its share of the host's; True where
        not known.
        """
        request = self.request
        return request.limit is None or self.stored <= request.limit

    @cached_property
    def sent(self) -> Mapping[Key, int]:
        """Return the bytes that a rank sends in a step, by phase and domain."""
        job = self.request.job
        if job.expert > 1:
            dense, experts = self.shares
            exchanged = sum(times * nbytes for times, nbytes in token_exchanges(job))
            own = {
                (phase, f"experts_{domain}"): nbytes
                for (phase, domain), nbytes in experts.sent.items()
            }
            return {
                **dense.sent,
                **own,
                ("tokens", self.request.machine.domain(job.expert)): int(exchanged),
            }
        sent = step_bytes(self.config, self.request.work, job.stock)
        if job.tensor > 1:
            count, half = all_reduces(job)
            sent["tensor", self.request.machine.domain(job.tensor)] = int(2 * count * half)
        return sent

    @cached_property
    def step(self) -> Step:
        """Return the predicted step with its breakdown in seconds."""
        return self.predict(self._known, self.request.job, self.request.rates)

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.step.seconds

    @property
    def sent_by_domain(self) -> dict[str, int]:
        """Return the bytes that a rank sends in a step, by domain."""
        return by_domain(self.sent)

    @cached_property
    def range(self) -> Range:
        """Return the range of the predicted step."""
        return step_range(self._known, self.request.job, self.request.rates, self.predict)

    @property
    def _known(self) -> ResolvedConfig:
        """Return the plan with the whole machine, and assumed links where they are unknown."""
        return replace(self.config, topology=self.request.machine)


P = TypeVar("P", bound=Price)


def first_that_fits(prices: Iterable[P]) -> P:
    """Return the first price that fits into a rank's memory; the last if none does."""
    for price in prices:
        if price.fits:
            break
    return price


@dataclass(frozen=True)
class Priced(Price):
    """Computes the costs of a candidate.

    Attributes:
        candidate: the plan.
    """

    candidate: Candidate

    @cached_property
    def weighed(self) -> float:
        """Return the seconds of a step, raised by :data:`LOSS_MUST_GAIN` for each part of the plan
        that is lossy.
        """
        return self.seconds * (1 + LOSS_MUST_GAIN) ** len(self.candidate.losses)

    def why_not(self, limit: int) -> str:
        """Return why the plan does not fit, as a sentence."""
        name = self.candidate.name
        needs = f"{format_bytes(self.stored)} of {format_bytes(limit)}"
        return f"{name} does not fit: it needs {needs}, {self.most}"


@dataclass(frozen=True)
class Ranking:
    """Holds the result of the planner.

    Attributes:
        request: what was planned.
        timed: plans that fit, best first.
        refused: plans that do not fit, least memory first.
        lossier: plans that fit, but quantize more than was asked for, best first.
    """

    request: Request
    timed: tuple[Priced, ...]
    refused: tuple[Priced, ...]
    lossier: tuple[Priced, ...] = ()

    @property
    def best(self) -> Priced:
        """Return the best plan.

        Raises:
            ValueError: if nothing fits.
        """
        if self.timed:
            return self.timed[0]
        limit = self.request.limit
        leanest = self.refused[0]
        assert limit is not None
        lossier = (
            f'{self.lossier[0].candidate.name} would fit, but is lossier ("lossy": true); '
            if self.lossier
            else ""
        )
        raise ValueError(
            f"none of {len(self.refused)} plans fits {format_count(self.request.job.model.params)} "
            f"parameters into the {format_bytes(limit)} of a rank of {self.request.topology.name}; "
            f"even {leanest.why_not(limit)}; {lossier}{_way_out(leanest, self.request)}"
        )

    @property
    def fastest(self) -> Priced:
        """Return the fastest plan that loses no more than the winner, which may need less
        memory.
        """
        losses = len(self.best.candidate.losses)
        return min(
            (plan for plan in self.timed if len(plan.candidate.losses) <= losses),
            key=lambda plan: plan.seconds,
        )

    @property
    def faster(self) -> Priced | None:
        """Return the fastest plan that quantizes more than was asked for, if it is faster than the
        winner.
        """
        fastest = min(self.lossier, key=lambda plan: plan.seconds, default=None)
        return fastest if fastest is not None and fastest.seconds < self.best.seconds else None


def rank_plans(asked: ZeroTopoConfig, request: Request) -> Ranking:
    """Price and rank the plans that keep the user's keys; see the module docstring.

    Args:
        asked: the user's block, treated as automatic.
        request: machine and job.

    Raises:
        ValueError: if the user's keys fit no plan, or only plans that quantize more than they ask
            for.
    """
    found = _careful(candidates(asked, request.tree, request.sparse), request)
    plans = [_priced(candidate, request) for candidate in found]
    allowed = [plan for plan in plans if plan.candidate.allowed_by(asked)]
    if not allowed:
        raise ValueError(
            f'"scheme": "{AUTO}": all plans that keep the other keys of the block quantize more '
            "than these ask for; "
            'allow it ("lossy": true), or set what may be quantized ("quantize", "sync", "publish")'
        )
    refused = sorted((plan for plan in allowed if not plan.fits), key=lambda plan: plan.stored)
    lossier = [plan for plan in plans if plan.fits and not plan.candidate.allowed_by(asked)]
    return Ranking(
        request,
        _in_order([plan for plan in allowed if plan.fits]),
        tuple(refused),
        _in_order(lossier),
    )


def _priced(candidate: Candidate, request: Request) -> Priced:
    return first_that_fits(Priced(candidate.config, each, candidate) for each in request.choices)


def _careful(found: Sequence[Candidate], request: Request) -> Sequence[Candidate]:
    """Return the plans that shard weights over at least a node if a rank's memory is not known;
    else all plans.

    With unknown memory no plan is refused, and the fastest plans would store everything on every
    rank.
    """
    if request.limit is not None:
        return found
    sharded = [plan for plan in found if plan.config.plan.weights >= request.tree.ranks_per_node]
    return sharded or found


def _in_order(timed: Sequence[Priced]) -> tuple[Priced, ...]:
    """Sort plans by time, and plans of equal time by loss, memory, name and bytes; see the module
    docstring.
    """
    fastest = min((plan.weighed for plan in timed), default=0.0)

    def equals(plan: Priced) -> tuple[float, int]:
        slower = plan.weighed / fastest - 1 if fastest else 0.0
        return slower // EQUAL, len(plan.candidate.losses)

    leanest: dict[tuple[float, int], int] = {}
    for plan in timed:
        leanest[equals(plan)] = min(plan.stored, leanest.get(equals(plan), plan.stored))

    def key(plan: Priced) -> tuple[float, int, float, bool, int, float]:
        more = plan.stored / max(1, leanest[equals(plan)]) - 1
        return (
            *equals(plan),
            more // HOLDS_ALIKE,
            not plan.candidate.named,
            plan.stored,
            plan.seconds,
        )

    return _leaner_first(sorted(timed, key=key))


def _leaner_first(timed: Sequence[Priced]) -> tuple[Priced, ...]:
    """Move the plan with the least memory to the front, among those that :data:`LEANER` lets
    replace the first.
    """

    def may_win(plan: Priced) -> bool:
        losses = len(plan.candidate.losses)
        first = timed[0]
        alike = losses <= len(first.candidate.losses) and plan.seconds <= first.seconds * (
            1 + LEANER
        )
        leaner = alike and plan.stored < first.stored * (1 - HOLDS_LESS)
        return leaner and all(
            plan.weighed <= of.weighed for of in timed if len(of.candidate.losses) < losses
        )

    leanest = min(filter(may_win, timed), key=lambda plan: plan.stored, default=None)
    return (
        tuple(timed)
        if leanest is None
        else (leanest, *(plan for plan in timed if plan is not leanest))
    )


def _way_out(leanest: Priced, request: Request) -> str:
    """Return what would make the leanest plan fit: changes of the job, or more nodes, each tried
    separately.
    """
    job = request.job
    topology = request.machine
    leaner = {
        "recompute activations (checkpointing)": replace(job, checkpointing=True),
        "use flash attention": replace(job, attention="flash"),
        "use micro-batches of one sequence": replace(job, micro_batch=1),
        "offload the optimizer to the host (offload_optimizer)": replace(job, offload=True),
    }
    leaner = {what: changed for what, changed in leaner.items() if changed != job}
    found = [
        what for what, changed in leaner.items() if _on(leanest, replace(request, job=changed)).fits
    ]
    if (enough := _enough_nodes(leanest, request)) is not None:
        found.append(f"use {enough:,} nodes")
    if found:
        return f"what would do, each by itself: {'; '.join(found)}"
    job = replace(job, checkpointing=True, attention="flash", micro_batch=1, offload=True)
    all_of_it = replace(request, job=job)
    enough = topology.nodes if _on(leanest, all_of_it).fits else _enough_nodes(leanest, all_of_it)
    if enough is None:
        most = max([topology.nodes, *_more_nodes(topology)])
        return (
            f"even {most:,} nodes would not do; make the model smaller, or the sequence (--seq) "
            "shorter"
        )
    return f"what would do, all together on {enough:,} nodes: {'; '.join(leaner)}"


def _enough_nodes(plan: Priced, request: Request) -> int | None:
    """Return the smallest number of nodes, by doubling, on which a plan fits; None if there is
    none.
    """
    larger = (
        replace(request, topology=replace(request.machine, nodes=count))
        for count in _more_nodes(request.machine)
    )
    return next((changed.topology.nodes for changed in larger if _on(plan, changed).fits), None)


def _more_nodes(machine: Topology) -> list[int]:
    """Return the numbers of nodes to try, each twice the one before, up to the ranks that a machine
    may have.
    """
    counts = (machine.nodes * 2**power for power in range(1, MOST_DOUBLINGS + 1))
    return [count for count in counts if count * machine.ranks_per_node <= MOST_RANKS]


def _on(plan: Priced, request: Request) -> Price:
    """Return the cost of a plan under another request."""
    return request.price(resolve_config(plan.candidate.chosen, request.tree))
