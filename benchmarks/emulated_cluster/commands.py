# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The ``ip`` and ``tc`` commands that build an emulated cluster: pure functions of its spec.

Note [The tree of links]
    One network namespace per rank, and one more, the *fabric*, with all bridges:

        rank's eth0 <-> r<rank> | GPU bridge | gpu<g>-up <-> gpu<g>-dn | node bridge | node<n>-up
        <-> node<n>-dn | core

    Each ``<->`` is a veth pair with a token bucket filter at both ends, so that every link has its
    rate in each direction by itself. What a device ``x-up`` transmits leaves the unit, what
    ``x-dn`` transmits enters it. Two ranks in one namespace would talk over its loopback device,
    past every limit.

Note [Token buckets]
    Tried: a queue under 64 MB drops packets, and retransmissions spoil the timing; a burst under 64
    KB starves large segments, one of 1 MB overshoots the rate. Frames of 9000 bytes and
    segmentation offload keep the CPU's share low.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.emulated_cluster.spec import LinkRates, Spec

Command = tuple[str, ...]

MTU = 9000
BURST = 1 << 17
QUEUE = 1 << 26
FABRIC = "fabric"

# No IPv6, so that nothing talks by itself while counters are read; TCP keeps its pace after a pause
# for computation.
_QUIET = (
    "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 > "
    "/proc/sys/net/ipv6/conf/default/disable_ipv6; "
    "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"
)


def fabric(prefix: str) -> str:
    """Name of the namespace with the bridges."""
    return f"{prefix}-{FABRIC}"


def rank_space(prefix: str, rank: int) -> str:
    """Name of a rank's namespace."""
    return f"{prefix}-r{rank}"


def spaces(spec: Spec, prefix: str) -> list[str]:
    """All namespaces of a cluster; without them nothing of it is left, links vanish with their
    namespaces.
    """
    return [fabric(prefix), *(rank_space(prefix, rank) for rank in range(spec.world_size))]


def build(spec: Spec, prefix: str) -> list[Command]:
    """The commands that build a cluster, in order; see Note [The tree of links]."""
    return list(_build(spec, prefix))


def limits(spec: Spec, prefix: str, rates: LinkRates) -> list[Command]:
    """The commands that give every link of a built cluster the rate of its level."""
    return [
        _limit(space, device, getattr(rates, level))
        for space, device, level in _devices(spec, prefix)
    ]


def _devices(spec: Spec, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Namespace, name and level of both ends of every link."""
    inside = fabric(prefix)
    for level, count in (("node", spec.nodes), ("gpu", spec.gpus)):
        for unit in range(count):
            yield inside, f"{level}{unit}-up", level
            yield inside, f"{level}{unit}-dn", level
    for rank in range(spec.world_size):
        yield inside, f"r{rank}", "gcd"
        yield rank_space(prefix, rank), "eth0", "gcd"


def _build(spec: Spec, prefix: str) -> Iterator[Command]:
    inside = fabric(prefix)
    for space in spaces(spec, prefix):
        yield "ip", "netns", "add", space
        yield "ip", "netns", "exec", space, "sh", "-c", _QUIET
    yield from _bridge(inside, "core")
    for node in range(spec.nodes):
        yield from _bridge(inside, f"node{node}")
        yield from _pair(inside, f"node{node}-up", inside, f"node{node}-dn")
        yield _attach(inside, f"node{node}-up", f"node{node}")
        yield _attach(inside, f"node{node}-dn", "core")
    for gpu in range(spec.gpus):
        yield from _bridge(inside, f"gpu{gpu}")
        yield from _pair(inside, f"gpu{gpu}-up", inside, f"gpu{gpu}-dn")
        yield _attach(inside, f"gpu{gpu}-up", f"gpu{gpu}")
        yield _attach(inside, f"gpu{gpu}-dn", f"node{gpu // spec.gpus_per_node}")
    for rank in range(spec.world_size):
        space = rank_space(prefix, rank)
        yield from _pair(space, "eth0", inside, f"r{rank}")
        yield _attach(inside, f"r{rank}", f"gpu{rank // spec.gcds_per_gpu}")
        yield "ip", "-n", space, "addr", "add", f"{spec.address(rank)}/16", "dev", "eth0"
        yield "ip", "-n", space, "link", "set", "eth0", "up"
        yield "ip", "-n", space, "link", "set", "lo", "up"
    yield from limits(spec, prefix, spec.rates_mbit)


def _bridge(space: str, name: str) -> Iterator[Command]:
    bridge = ("type", "bridge", "stp_state", "0", "mcast_snooping", "0")
    yield "ip", "-n", space, "link", "add", name, "mtu", str(MTU), *bridge
    yield "ip", "-n", space, "link", "set", name, "up"


def _pair(space: str, name: str, other_space: str, other: str) -> Iterator[Command]:
    here = ("ip", "-n", space, "link", "add", name)
    there = ("type", "veth", "peer", "name", other)
    yield (*here, "mtu", str(MTU), *there, "netns", other_space, "mtu", str(MTU))


def _attach(space: str, name: str, bridge: str) -> Command:
    return "ip", "-n", space, "link", "set", name, "master", bridge, "up"


def _limit(space: str, name: str, mbit: int) -> Command:
    return "tc", "-n", space, "qdisc", "replace", "dev", name, "root", *bucket(mbit)


def bucket(mbit: int) -> Command:
    """The token bucket of a link, as ``tc`` takes it; see Note [Token buckets]."""
    return "tbf", "rate", f"{mbit}mbit", "burst", str(BURST), "limit", str(QUEUE)
