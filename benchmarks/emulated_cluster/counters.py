# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes and drops as the kernel counts them on the links of an emulated cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.emulated_cluster.spec import Spec


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
        uplink: bytes that left a node, on average.
        drops: packets dropped anywhere.
    """

    uplink: float
    drops: int


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
    """What left the nodes from one snapshot to another."""
    names = [f"node{node}-up" for node in range(spec.nodes)]
    sent = [after.links[name].sent - before.links[name].sent for name in names]
    return Traffic(sum(sent) / spec.nodes, after.drops - before.drops)
