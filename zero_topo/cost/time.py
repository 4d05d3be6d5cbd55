# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How long a hop takes on a machine: latency and bytes over bandwidth, link by link.

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
    each group, and latencies add up around the ring.

Note [Measured rings]
    Where a machine's rings were measured (``Rates.rings``), these rates count in place of the links'. They are of one
    ring through all ranks of a unit, which has all of its links; of ``L`` ranks of a unit, ``g`` of them in each ring,
    ``L / g`` rings run beside each other and share them. The widest domain's step is paid by every rank of the ring
    but one: all pass on at once, and the slowest pair sets the pace.

Source: the alpha-beta model of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), per level of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from zero_topo.topology.model import DOMAINS, Link, Topology
from zero_topo.topology.presets import Machine, load_machine, preset_names
from zero_topo.topology.rates import Collective, Rates

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
        """Time of a hop ``(lo, hi)`` of ``plan.py`` in which every rank sends ``sent`` bytes.

        Args:
            lo, hi: the hop.
            sent: bytes, to all other members together.
            pattern: "direct", or "ring" or "reduce ring", see Note [Patterns].

        Raises:
            ValueError: for a link without a bandwidth.
        """
        key = (lo, hi, sent, pattern)
        if key not in self._known:
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


def _ring(network: Network, group: _Group, sent: float, collective: Collective = "gather") -> HopTime:
    measured, rates = network.rates.rings.get(collective, {}), network.rates
    busy, latency, size = {}, 0.0, group.size
    for domain, inner, outer in group.crossed():
        ring = measured.get(domain)
        if ring is not None:
            unit = "gpu" if domain == "gpu" else "node"
            busy[domain] = sent * network.topology.degree(unit) / (group.inside(unit) * ring.bandwidth)
            latency = ring.latency(size, sent / (size - 1))
            continue
        link = network.link(domain)
        times = inner if domain in rates.shared else 1
        busy[domain] = sent / (times * link.bandwidth)
        steps = size // inner - (size // outer if outer < size else 0)
        latency += steps * link.latency * (size - 1) / size
    return HopTime(group.widest, latency, busy, sent)


_TIMES: Mapping[str, Callable[[Network, _Group, float], HopTime]] = MappingProxyType(
    {"direct": _direct, "ring": _ring, "reduce ring": partial(_ring, collective="reduce")}
)


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
