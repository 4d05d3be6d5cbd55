# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines which rank stores what: degrees, the dependency rule, and the index arithmetic of nested
shards (no torch).

Note [Nested shards]
    Let ``N`` be the world size and ``t = order[rank]`` a rank's *tree position*: ranks numbered so
    that the ranks (GCDs) of a GPU, then the GPUs of a node, are consecutive. DeepSpeed cuts each
    parameter into ``N`` *world shards*, one per rank. The shard of degree ``d`` at tree position
    ``t`` is the set of world shards owned by the ranks whose tree position is congruent to ``t``
    modulo ``d``. It has ``N / d`` rows, ordered by tree position, and row ``t // d`` is the rank's
    own world shard. If ``lo`` divides ``hi``, a degree-``hi`` shard is a subset of the rank's
    degree-``lo`` shard. The optimizer shard lies inside the gradient shard, and that inside the
    weight shard (the dependency rule of AMSP, arXiv 2311.00257, and of ZeRO-topo), for any tree and
    any rank order. DeepSpeed's own shard is never copied.

Note [Process groups]
    The process group ``(lo, hi)`` of a rank, in code a ``pair``, has the ranks with equal
    ``t % lo`` and equal ``t // hi``: ``hi / lo`` members in tree order. From ``hi`` to ``lo`` it
    all-gathers degree-``hi`` shards into a degree-``lo`` shard; from ``lo`` to ``hi`` it
    reduce-scatters. Row ``j`` of the degree-``lo`` shard belongs to member ``j % (hi / lo)`` and is
    row ``j // (hi / lo)`` there, so a collective of the group is a transpose of
    ``[N / hi, hi / lo]``. Gather, scatter, sync and publish all use such groups: this file has
    their only index arithmetic.

Note [Hierarchical collectives]
    A group ``(lo, hi)`` that spans nodes of ``L`` ranks may have several members in each node. Sent
    in one collective, each member's message would cross to every member on other nodes. A
    hierarchical collective (in code a ``hierarchy``) has the same result and uses two groups,
    ``(lo, L)`` inside the node and ``(L, hi)`` across nodes. A reduce-scatter sums inside the node
    first (ZeRO++'s qgZ). A gather sends each message to one rank of each node, which passes it on
    inside the node. Each node's uplink then carries the node's own share, once. Member ``c`` of
    ``(lo, hi)`` is member ``c % (L / lo)`` of the inner and ``c // (L / lo)`` of the outer group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from zero_topo.topology.model import Topology

Degree = int | str

Phase = Literal[
    "gather_forward",
    "gather_backward",
    "gather_exact",
    "scatter",
    "sync",
    "matrices",
    "publish",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of communication, in the order of an optimizer step.

"gather_exact" gathers persistent parameters. "matrices" moves gradients and updates of Muon's
matrices to and from the ranks that compute them.
"""


@dataclass(frozen=True)
class Plan:
    """Holds the degrees of the four roles over ``world_size`` ranks.

    Attributes:
        world_size: number of ranks ``N``.
        weights: ranks that share one copy of the weights (``W``).
        secondary: ranks that share one secondary copy for the backward gather (``S``), or None for
            no copy.
        gradients: ranks that share one gradient buffer (``G``).
        optimizer: ranks that share one copy of the optimizer states (``O``).
        order: ``order[rank]`` is the rank's tree position; None means the identity (block
            placement).
        inner: ranks of a node, if collectives that span nodes are hierarchical (Note [Hierarchical
            collectives]); None makes every collective use a single process group.

    Raises:
        ValueError: if a degree does not divide the world or the dependency rule W | G | O | N is
            broken.
    """

    world_size: int
    weights: int
    secondary: int | None
    gradients: int
    optimizer: int
    order: tuple[int, ...] | None = None
    inner: int | None = None

    def __post_init__(self) -> None:
        self._check_degrees()
        self._check_dependency_rule()
        if self.order is not None:
            if sorted(self.order) != list(range(self.world_size)):
                raise ValueError(
                    f"order {list(self.order)[:16]} is not a permutation of "
                    f"0..{self.world_size - 1}"
                )
            if list(self.order) == list(range(self.world_size)):
                object.__setattr__(self, "order", None)

    def _check_degrees(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world size {self.world_size} is not a positive number of ranks")
        for role, degree in {**self.degrees(), "inner": self.inner}.items():
            if degree is not None and (degree < 1 or self.world_size % degree):
                raise ValueError(
                    f"{role} degree {degree} does not divide the world of {self.world_size} ranks; "
                    f"choose one of {divisors(self.world_size)}"
                )

    def _check_dependency_rule(self) -> None:
        chain = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
        ]
        for (inner, low), (outer, high) in pairwise(chain):
            if high % low:
                raise ValueError(
                    f"the plan breaks the dependency rule: {inner} degree {low} does not divide "
                    f"{outer} degree {high}, "
                    f"so a rank would own a shard of {outer} whose {inner} it does not store; "
                    f"raise {outer} to a multiple of {low} or lower {inner} to a divisor of {high}"
                )
        secondary = self.secondary
        if secondary is not None and secondary % self.weights and self.weights % secondary:
            raise ValueError(
                f"secondary degree {secondary} and weights degree {self.weights} do not divide one "
                f"another; choose a multiple or a divisor of {self.weights}, or null"
            )

    @classmethod
    def build(
        cls,
        topology: Topology,
        degrees: Sequence[Degree | None],
    ) -> Plan:
        """Build a machine's plan from (weights, secondary, gradients, optimizer), each a domain
        name, a degree or None.

        Raises:
            ValueError: for an unknown domain, a degree that straddles the machine's units, or a
                broken rule.
        """
        roles = ("weights", "secondary", "gradients", "optimizer")
        w, s, g, o = (
            None if value is None else aligned_degree(topology, role, value)
            for role, value in zip(roles, degrees, strict=True)
        )
        assert w is not None and g is not None and o is not None
        return cls(topology.world_size, w, s, g, o, topology.order, topology.degree("node"))

    def degrees(self) -> dict[str, int | None]:
        """Return role -> degree."""
        return {
            "weights": self.weights,
            "secondary": self.secondary,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
        }

    # -- sizes -------------------------------------------------------------------------------------

    def shard_numel(self, numel: int) -> int:
        """Return the elements of one world shard of a parameter of ``numel`` elements:
        ``ceil(numel / N)``.
        """
        return -(-numel // self.world_size)

    # -- index arithmetic (see Note [Nested shards] and Note [Process groups]) ---------------------

    @cached_property
    def rank_at(self) -> tuple[int, ...]:
        """Return tree position -> rank, the inverse of ``order``."""
        if self.order is None:
            return tuple(range(self.world_size))
        inverse = [0] * self.world_size
        for rank, position in enumerate(self.order):
            inverse[position] = rank
        return tuple(inverse)

    def position(self, rank: int) -> int:
        """Return the rank's tree position."""
        return rank if self.order is None else self.order[rank]

    def row(self, rank: int, degree: int) -> int:
        """Return the index of the rank's own world shard among the rows of its degree-``degree``
        shard.
        """
        return self.position(rank) // degree

    def rows(self, rank: int, degree: int) -> list[int]:
        """Return the world shards (ranks) that make up the rank's shard of ``degree``, in row
        order.
        """
        return [
            self.rank_at[p] for p in range(self.position(rank) % degree, self.world_size, degree)
        ]

    def group(self, rank: int, lo: int, hi: int) -> list[int]:
        """Return the ``hi // lo`` ranks of the group ``(lo, hi)`` to which ``rank`` belongs, in
        tree order.
        """
        position = self.position(rank)
        start = position // hi * hi + position % lo
        return [self.rank_at[p] for p in range(start, start + hi, lo)]

    def groups(self, lo: int, hi: int) -> list[list[int]]:
        """Return all process groups ``(lo, hi)``; they partition the world."""
        found = []
        for base in range(0, self.world_size, hi):
            for first in range(base, base + lo):
                found.append([self.rank_at[p] for p in range(first, base + hi, lo)])
        return found

    def pair_of(self, phase: Phase) -> tuple[int, int]:
        """Return the group ``(lo, hi)`` of one of :data:`PHASES`; for sync, that of the reduction
        to one row a rank.
        """
        copy = self.weights if self.secondary is None or self.weights == 1 else self.secondary
        return {
            "gather_forward": (1, self.weights),
            "gather_backward": (1, copy),
            "gather_exact": (1, self.weights),
            "scatter": (1, self.gradients),
            "sync": (self.gradients, self.world_size),
            "matrices": (1, self.optimizer),
            "publish": (self.weights, self.optimizer),
        }[phase]

    def pairs(self) -> list[tuple[int, int]]:
        """Return every ``(lo, hi)`` that an engine of this plan may use, in the order in which all
        ranks create groups.

        They are the groups of the phases; from one row per rank to the optimizer shard, for sync's
        gather and the FP32 masters; and from the world shards to the weights, for the start.
        """
        pair = self.pair_of
        world = self.world_size
        first = [
            pair("gather_forward"),
            pair("scatter"),
            pair("sync"),
            (self.optimizer, world),
            pair("publish"),
        ]
        return list(dict.fromkeys([*first, (self.weights, world), pair("gather_backward")]))

    def stages(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """Return the groups of a collective over ``(lo, hi)``, innermost first (Note [Hierarchical
        collectives]).
        """
        middle = self.inner
        if middle is None or not lo < middle < hi or middle % lo or hi % middle:
            return [(lo, hi)]
        return [(lo, middle), (middle, hi)]


def packed_runs(sizes: Sequence[int], limit: int | None) -> list[range]:
    """Pack consecutive items in order into runs of at most ``limit`` in total; a larger item is a
    run of its own.

    Sync and publish process the parameters in such runs, one collective each. None makes one run of
    everything.
    """
    runs: list[range] = []
    first = 0
    total = 0
    for index, size in enumerate(sizes):
        if index > first and limit is not None and total + size > limit:
            runs.append(range(first, index))
            first = index
            total = 0
        total += size
    return [*runs, range(first, len(sizes))] if sizes else []


def coded_params(
    plan: Plan, numels: Sequence[int], dims: Sequence[int], persistent: Sequence[bool], block: int
) -> tuple[bool, ...]:
    """Return for each parameter whether it is stored as INT8, in blocks of ``block`` values inside
    a world shard.

    Three kinds stay in the model's dtype: persistent parameters; vectors, which are sensitive; and
    parameters that would grow by more than an eighth if each world shard were padded to whole
    blocks.

    Args:
        plan: the number of world shards.
        numels: elements of each parameter.
        dims: dimensions of the shape of each.
        persistent: for each, whether every rank stores it unsharded.
        block: values that share a scale.
    """
    return tuple(
        shape >= 2
        and not kept
        and 0 < 8 * plan.world_size * (-(-plan.shard_numel(m) // block) * block) <= 9 * m
        for m, shape, kept in zip(numels, dims, persistent, strict=True)
    )


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def aligned_degree(topology: Topology, role: str, value: Degree) -> int:
    """Convert a domain name or an integer to a degree that nests with the machine's units.

    Raises:
        ValueError: if the name is unknown, the degree does not divide the world, or a domain of
            that degree would hold parts of several GPUs or nodes.
    """
    degree = topology.degree(value) if isinstance(value, str) else value
    world = topology.world_size
    if degree < 1 or world % degree:
        raise ValueError(
            f"{role} degree {degree} does not divide the world of {world} ranks; choose one of "
            f"{divisors(world)}"
        )
    sizes = {unit: topology.degree(unit) for unit in ("gpu", "node")}
    for unit, size in sizes.items():
        if degree % size and size % degree:
            fitting = divisors(world)
            for other in sizes.values():
                fitting = [d for d in fitting if not (d % other and other % d)]
            raise ValueError(
                f"{role} degree {degree} cuts across the {unit}s of this machine ({size} ranks "
                f"each); choose one of {fitting}"
            )
    return degree
