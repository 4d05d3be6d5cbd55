# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes how long collectives over the process groups of a plan take on the links of a machine.

Links
    A byte uses the link of the smallest domain that holds both ends: the GPU's link between its
    GCDs, the node's between GPUs, the world's between nodes. A :class:`Link` gives the rate of one
    rank while all ranks of the domain send at once. Every rank of the world takes part in all
    collectives of a plan, each in its own group, so all do send. Rings are the exception: a ring
    through ``g`` members of a node leaves it once, so only ``L / g`` of the ``L`` ranks of a node
    send to other nodes. If the domain's link is shared (a node's uplink), each of these gets ``g``
    times the rate.

Note [Patterns]
    A process group has ``d`` members, ``g`` of them in one unit of the machine; a rank sends ``B``
    bytes in all. *direct*: the rank sends ``B / (d - 1)`` to each member at once.
    ``B (d - g) / (d - 1)`` leave the unit, and the latency counts once. *ring*: the rank sends
    everything to the next member, as NCCL and RCCL gather. Each unit's link carries ``B`` for each
    group, and latencies add up around the ring. This is the alpha-beta model of Thakur,
    Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
    per level of the tree.

Measured rings
    If a machine's rings were measured (``Rates.rings``), these rates replace those of the links.
    They were measured with one ring through all ranks of a unit, which uses all of its links. With
    ``L`` ranks in a unit and ``g`` of them in each ring, ``L / g`` rings run in parallel and share
    the links. Each of the ``P - 1`` steps of a ring takes the
    step time of the widest domain: all ranks send at once, and the slowest pair sets the pace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from zero_topo.topology.model import DOMAINS, Topology
from zero_topo.topology.presets import load_machine, preset_names
from zero_topo.topology.rates import Rates


@dataclass(frozen=True)
class StageTime:
    """Holds the time of a collective over one process group on otherwise idle links.

    Attributes:
        latency: seconds.
        busy: domain -> seconds for which its link is busy.
    """

    latency: float
    busy: Mapping[str, float]

    @cached_property
    def seconds(self) -> float:
        """Return the seconds from the first byte to the last."""
        return self.latency + max(self.busy.values(), default=0.0)


@dataclass(frozen=True)
class Network:
    """Computes the times of collectives on the links of a machine.

    Attributes:
        topology: tree and links.
        rates: efficiencies, and which links are shared.
        stride: ranks of the machine for each rank that process groups count, which is the first of
            them.
    """

    topology: Topology
    rates: Rates
    stride: int = 1

    @cached_property
    def units(self) -> Mapping[str, int]:
        """Return domain -> its number of ranks."""
        return {domain: self.topology.degree(domain) for domain in DOMAINS}

    def bandwidth(self, domain: str) -> float:
        """Return the bytes/s of a domain's link that collectives reach."""
        return self.topology.links[domain].bandwidth * self.rates.link_efficiency.get(domain, 1.0)

    def stage_time(self, lo: int, hi: int, sent: float, pattern: str) -> StageTime:
        """Return the time of a collective over ``(lo, hi)`` of ``plan.py`` in which every rank
        sends ``sent`` bytes.

        Args:
            lo, hi: the process group.
            sent: bytes to all other members together.
            pattern: "direct", or "ring" or "reduce ring", see Note [Patterns].
        """
        # The other ranks' groups send at the same time, so members and rings are those of the
        # machine.
        lo = lo * self.stride
        hi = hi * self.stride
        size = hi // lo
        busy = dict[str, float]()
        latency = 0.0
        members = {domain: _members(lo, hi, unit) for domain, unit in self.units.items()}
        measured = self.rates.rings.get("reduce" if pattern == "reduce ring" else "gather", {})
        for below, domain in pairwise(DOMAINS):
            inner = members[below]
            outer = members[domain]
            if outer == inner:
                continue
            if pattern == "direct":
                busy[domain] = sent * (outer - inner) / (size - 1) / self.bandwidth(domain)
                latency = max(latency, self.topology.links[domain].latency)
            elif (ring := measured.get(domain)) is not None:
                unit = "gpu" if domain == "gpu" else "node"
                busy[domain] = sent * self.units[unit] / (members[unit] * ring.bandwidth)
                latency = ring.latency(size, sent / (size - 1))
            else:
                busy[domain] = sent / (
                    (inner if domain in self.rates.shared else 1) * self.bandwidth(domain)
                )
                steps = size // inner - (size // outer if outer < size else 0)
                latency += steps * self.topology.links[domain].latency * (size - 1) / size
        return StageTime(latency, busy)


def _members(lo: int, hi: int, unit: int) -> int:
    """Return the number of members of a process group in one unit of a domain, which has ``unit``
    ranks.
    """
    size = hi // lo
    return size if unit % hi == 0 else max(1, min(size, unit // lo))


def rates_of(topology: Topology, name: str | None = None) -> Rates | None:
    """Return a preset's rates, by default those of the topology's name; None if it has none, or is
    no preset.

    Measured rings count only over links equal to the preset's.
    """
    name = name or topology.name
    machine = load_machine(name) if name in preset_names() else None
    if machine is None or machine.rates is None:
        return None
    known = {name: link.bandwidth for name, link in machine.links.items()}
    stated = {name for name, link in topology.links.items() if link.bandwidth != known.get(name)}
    kept = {}
    for collective, of in machine.rates.rings.items():
        kept[collective] = {name: of[name] for name in of if name not in stated}
    return replace(machine.rates, rings=kept)
