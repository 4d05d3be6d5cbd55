# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes and drops as the kernel counts them on the links of an emulated cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.emulated_cluster.spec import LEVELS, Spec


@dataclass(frozen=True)
class LinkCounters:
    """Counters of one device."""

    sent: int
    received: int
    dropped: int


@dataclass(frozen=True)
class Snapshot:
    """All counters of the fabric at one moment.

    Attributes:
        links: device -> counters.
        drops: packets that any token bucket of the cluster dropped.
    """

    links: Mapping[str, LinkCounters]
    drops: int

    @property
    def total(self) -> int:
        """Bytes all devices sent and received: two snapshots with equal totals had no traffic
        between them.
        """
        return sum(link.sent + link.received for link in self.links.values())


@dataclass(frozen=True)
class Traffic:
    """What crossed the links between two snapshots.

    Attributes:
        out: level -> bytes that left each unit of that level, in tree order.
        into: level -> bytes that entered each.
        drops: packets dropped anywhere.
    """

    out: Mapping[str, tuple[int, ...]]
    into: Mapping[str, tuple[int, ...]]
    drops: int

    def mean(self, level: str) -> float:
        """Bytes that left a unit of a level, on average."""
        return sum(self.out[level]) / len(self.out[level])

    def busiest(self, level: str) -> int:
        """Bytes on the busiest direction of the busiest link of a level."""
        return max(*self.out[level], *self.into[level])


def parse_links(text: str) -> dict[str, LinkCounters]:
    """Counters by device, from the output of ``ip -s -j link``."""
    links = {}
    for entry in json.loads(text):
        sent = entry["stats64"]["tx"]
        received = entry["stats64"]["rx"]
        links[entry["ifname"]] = LinkCounters(
            sent["bytes"], received["bytes"], sent["dropped"] + received["dropped"]
        )
    return links


def parse_drops(text: str) -> int:
    """Packets dropped by all queues of a namespace, from the output of ``tc -s -j qdisc``."""
    return sum(entry.get("drops", 0) for entry in json.loads(text))


def take(links: str, queues: Sequence[str]) -> Snapshot:
    """A snapshot from the fabric's ``ip -s -j link`` and every namespace's ``tc -s -j qdisc``."""
    parsed = parse_links(links)
    dropped = sum(link.dropped for link in parsed.values())
    return Snapshot(parsed, dropped + sum(parse_drops(text) for text in queues))


def between(spec: Spec, before: Snapshot, after: Snapshot) -> Traffic:
    """What crossed each link from one snapshot to another."""

    def difference(device: str, counter: str) -> int:
        return int(getattr(after.links[device], counter)) - int(
            getattr(before.links[device], counter)
        )

    counts = {"gpu": spec.gpus, "node": spec.nodes}
    out = {
        level: tuple(difference(f"{level}{i}-up", "sent") for i in range(n))
        for level, n in counts.items()
    }
    into = {
        level: tuple(difference(f"{level}{i}-dn", "sent") for i in range(n))
        for level, n in counts.items()
    }
    ranks = range(spec.world_size)
    out["gcd"] = tuple(difference(f"r{rank}", "received") for rank in ranks)  # what its eth0 sent
    into["gcd"] = tuple(difference(f"r{rank}", "sent") for rank in ranks)
    assert set(out) == set(LEVELS)
    return Traffic(out, into, after.drops - before.drops)
