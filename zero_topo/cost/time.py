# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How long a collective takes on a machine: latency and bytes over bandwidth, link by link.

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
    each group, and latencies add up around the ring. *tree*, for an all-reduce only: twice the message, and
    ``2 ceil(log2 d)`` latencies.

Source: the alpha-beta model of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), per level of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from zero_topo.cost.volume import Books
from zero_topo.plan import Plan
from zero_topo.topology.checks import nearest
from zero_topo.topology.model import DOMAINS, Link, Topology
from zero_topo.topology.presets import load_machine, preset_names
from zero_topo.topology.rates import Rates

BELOW: Mapping[str, str] = MappingProxyType({"gpu": "rank", "node": "gpu", "world": "node"})


@dataclass(frozen=True)
class HopTime:
    """One hop on links that nothing else uses.

    Attributes:
        domain: the widest domain it uses.
        latency: seconds.
        busy: domain -> seconds for which its link is busy.
        nbytes: what a rank sends.
    """

    domain: str
    latency: float
    busy: Mapping[str, float]
    nbytes: float

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
    _known: dict[tuple[int, int, float, str], HopTime] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

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
        """Time of a hop ``(lo, hi)`` of ``plan.py`` in which every rank sends ``sent`` bytes; see Note [Patterns].

        Raises:
            ValueError: for an unknown pattern, or a link without a bandwidth.
        """
        key = (lo, hi, sent, pattern)
        if key not in self._known:
            if pattern not in _TIMES:
                raise ValueError(
                    f"unknown pattern {pattern!r}; did you mean {nearest(pattern, _TIMES)!r}? (known: {list(_TIMES)})"
                )
            self._known[key] = _TIMES[pattern](self, _Group(self.topology, lo, hi), sent)
        return self._known[key]


@dataclass(frozen=True)
class _Group:
    """The members of one hop and how many of them each unit holds."""

    topology: Topology
    lo: int
    hi: int

    @property
    def size(self) -> int:
        return self.hi // self.lo

    def inside(self, domain: str) -> int:
        """Members in one unit of the domain."""
        unit = self.topology.degree(domain)
        return self.size if unit % self.hi == 0 else max(1, min(self.size, unit // self.lo))

    def crossed(self) -> Iterator[tuple[str, int, int]]:
        """The domains whose links are used, each with the members in a unit below it and in one of its own."""
        for domain, below in BELOW.items():
            inner, outer = self.inside(below), self.inside(domain)
            if outer > inner:
                yield domain, inner, outer

    @property
    def widest(self) -> str:
        return max((domain for domain, _, _ in self.crossed()), key=DOMAINS.index, default="rank")


def _direct(network: Network, group: _Group, sent: float) -> HopTime:
    busy = {}
    for domain, inner, outer in group.crossed():
        busy[domain] = sent * (outer - inner) / (group.size - 1) / network.link(domain).bandwidth
    latency = max((network.link(domain).latency for domain in busy), default=0.0)
    return HopTime(group.widest, latency, busy, sent)


def _ring(network: Network, group: _Group, sent: float) -> HopTime:
    busy, latency, size = {}, 0.0, group.size
    for domain, inner, outer in group.crossed():
        link = network.link(domain)
        times = inner if domain in network.rates.shared else 1
        busy[domain] = sent / (times * link.bandwidth)
        steps = size // inner - (size // outer if outer < size else 0)
        latency += steps * link.latency * (size - 1) / size
    return HopTime(group.widest, latency, busy, sent)


def _tree(network: Network, group: _Group, sent: float) -> HopTime:
    ring = _ring(network, group, sent)
    depth = (group.size - 1).bit_length()
    slowest = max((network.link(domain).latency for domain in ring.busy), default=0.0)
    return HopTime(ring.domain, 2 * depth * slowest, ring.busy, sent)


_TIMES: Mapping[str, Callable[[Network, _Group, float], HopTime]] = MappingProxyType(
    {"direct": _direct, "ring": _ring, "tree": _tree}
)


@dataclass(frozen=True)
class Collective:
    """A collective over the hop ``(lo, hi)``.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_to_all" or "all_reduce".
        lo, hi: the group, as in ``plan.py``.
        message: bytes that a member sends to each other one; for an all-reduce, of the whole tensor.
    """

    kind: str
    lo: int
    hi: int
    message: float

    @property
    def size(self) -> int:
        """Members."""
        return self.hi // self.lo


def collective_seconds(network: Network, what: Collective, algorithm: str = "hierarchical") -> float:
    """Seconds of a collective on links that nothing else uses.

    Args:
        network: the machine.
        what: the collective.
        algorithm: "ring", "direct", "tree" (all-reduce only), or "hierarchical": by the routes of ``plan.py``, inside
            the node and between nodes apart.

    Raises:
        ValueError: for an unknown kind or algorithm, or a tree of something else than an all-reduce.
    """
    if what.kind not in _KINDS:
        raise ValueError(
            f"unknown collective {what.kind!r}; did you mean {nearest(what.kind, _KINDS)!r}? (known: {list(_KINDS)})"
        )
    if what.size == 1:
        return 0.0
    if algorithm == "hierarchical":
        hops = _KINDS[what.kind](_routed(network.topology), what)
        pattern = network.rates.gather
        return sum(
            network.hop(lo, hi, sent, pattern if gathers else "direct").seconds for lo, hi, sent, gathers in hops
        )
    if algorithm == "tree":
        if what.kind != "all_reduce":
            raise ValueError(f"a tree is an algorithm for all_reduce, not for {what.kind}; choose ring or hierarchical")
        return network.hop(what.lo, what.hi, 2 * what.message, "tree").seconds
    hops = _KINDS[what.kind](_straight(network.topology), what)
    return sum(network.hop(lo, hi, sent, algorithm).seconds for lo, hi, sent, _ in hops)


_Hops = list[tuple[int, int, float, bool]]


def _straight(topology: Topology) -> Plan:
    return Plan(topology.world_size, 1, None, topology.world_size, topology.world_size)


def _routed(topology: Topology) -> Plan:
    world = topology.world_size
    return Plan(world, 1, None, world, world, inner=topology.degree("node"))


def _booked(books: Books) -> _Hops:
    return [(hop.lo, hop.hi, float(hop.sent), hop.gathers) for hop in books.hops()]


def _all_gather(plan: Plan, what: Collective) -> _Hops:
    books = Books(plan)
    books.gather(what.kind, (what.lo, what.hi), what.message)  # type: ignore[arg-type]
    return _booked(books)


def _reduce_scatter(plan: Plan, what: Collective) -> _Hops:
    books = Books(plan)
    books.reduce(what.kind, (what.lo, what.hi), what.message)  # type: ignore[arg-type]
    return _booked(books)


def _all_to_all(plan: Plan, what: Collective) -> _Hops:
    """Nothing is summed on the way, so every hop carries the messages of all members beyond it."""
    return [
        (lo, hi, (hi // lo - 1) * (what.size // (hi // lo)) * what.message, False)
        for lo, hi in plan.route(what.lo, what.hi)
    ]


def _all_reduce(plan: Plan, what: Collective) -> _Hops:
    part = Collective("all_reduce", what.lo, what.hi, what.message / what.size)
    return [*_reduce_scatter(plan, part), *_all_gather(plan, part)]


_KINDS: Mapping[str, Callable[[Plan, Collective], _Hops]] = MappingProxyType(
    {
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "all_reduce": _all_reduce,
    }
)


def rates_of(topology: Topology) -> Rates:
    """Rates of the preset that a topology has its name from.

    Raises:
        ValueError: if there is none.
    """
    known = {name: load_machine(name).rates for name in preset_names()}
    rates = known.get(topology.name)
    if rates is None:
        having = [name for name, found in known.items() if found is not None]
        raise ValueError(
            f"how fast a rank of {topology.name!r} computes is not known; take a preset of {having}, or give rates"
        )
    return rates
