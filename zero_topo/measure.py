# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Measures the machine's tree where no tool and no launcher reports it: ranks exchange in pairs,
then in whole domains.

1. Every pair of the schedule exchanges messages of growing sizes, both ways at once, until one
   takes long enough.
2. The pairs' latencies and bandwidths give the tree (Note [Levels from pairs] in
   ``topology/fitting.py``). If it is not regular, other load may have disturbed the times: all
   pairs exchange again, and the best of all times count.
3. In each domain of the tree, all ranks exchange with their counterparts at once. The rate that
   each rank then gets is the rate of the domain's link.

Every rank gathers all times and evaluates them itself, so all ranks end with the same topology or
the same error.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.topology.fitting import Pair, cluster, fit, meeting, with_links
from zero_topo.topology.model import Link, Topology
from zero_topo.topology.schedule import inner_degree, neighbours, pair_rounds, shared_domains, turns
from zero_topo.units import KIB, MIB

SMALL = 8
SMALL_REPEATS = 5
SMALL_RUN = 10  # small messages timed together
FIRST = 256 * KIB
GROWTH = 4
MOST = 64 * MIB
LONG_S = 0.03  # a message that takes this long is enough to measure the bandwidth
PAIR_REPEATS = 3
PASSES = 3  # rounds over all pairs, while their tree is not regular
SHARED_S = 0.05
SHARED_REPEATS = 4

Samples = list[tuple[int, float]]
OnProgress = Callable[[str, int, int], None]


def measure(device: torch.device, tick: OnProgress = lambda words, done, total: None) -> Topology:
    """Measure the machine. Collective: every rank of the world calls it, without other
    communication.

    Args:
        device: device of the messages: the CPU for gloo, this rank's accelerator for NCCL and RCCL.
        tick: called as ``tick(words, done, total)`` before each round.

    Returns:
        The same topology on every rank. Links: bytes/s of one rank while all ranks of the domain
        send, and seconds.

    Raises:
        ValueError: on every rank, if the machine is no regular tree; names the odd ranks and hosts.
    """
    hosts = _gathered(socket.gethostname())
    # Refuses hosts with unequally many ranks before anything is measured
    alone = cluster({}, hosts)
    if len(hosts) == 1:
        return alone
    prober = Prober(device)
    topology, pairs = _tree(prober, hosts, tick)
    shared = _shared(prober, topology, hosts, pairs, tick)
    return with_links(topology, pairs, shared)


def choose_device(env: Mapping[str, str]) -> torch.device:
    """Make this rank's accelerator current and return it; the CPU if there is none or
    ``DS_ACCELERATOR`` is "cpu".
    """
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or env.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    device = torch.device(
        kind.type, int(env.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    )
    torch.accelerator.set_device_index(device.index)
    return device


def _gathered(own: Any) -> list[Any]:
    """Gather each rank's object, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


class Prober:
    """Measures the time of messages that this rank sends.

    Args:
        device: device of the messages.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self._device = device
        self._buffers = self._new_buffers(FIRST)
        self.barrier()

    def barrier(self) -> None:
        """Wait for all ranks. The first call also makes NCCL set up the group in which pairs
        exchange.
        """
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=self._device))
        self._finish()

    def exchange(self, to: int, source: int, nbytes: int, times: int = 1) -> float:
        """Return the mean seconds of sending ``nbytes`` to one rank while receiving as many from
        another.
        """
        sent, received = self._buffer(nbytes)
        began = time.perf_counter()
        for _ in range(times):
            self._swap(to, source, sent, received)
        self._finish()
        return (time.perf_counter() - began) / times

    def pair(self, other: int) -> Samples:
        """Time messages to and from another rank, which calls this too: small ones, then ever
        larger ones.
        """
        self.exchange(other, other, SMALL)
        samples = [
            (SMALL, self.exchange(other, other, SMALL, SMALL_RUN)) for _ in range(SMALL_REPEATS)
        ]
        nbytes = FIRST
        while True:
            seconds = [self._together(other, nbytes) for _ in range(PAIR_REPEATS)]
            samples += [(nbytes, value) for value in seconds]
            if (self._longer(other, min(seconds)) >= LONG_S and nbytes > FIRST) or nbytes >= MOST:
                return samples
            nbytes *= GROWTH

    def _together(self, other: int, nbytes: int) -> float:
        """Time one exchange that both ranks begin at the same time."""
        self._buffer(nbytes)
        self.exchange(other, other, SMALL)
        return self.exchange(other, other, nbytes)

    def _longer(self, other: int, seconds: float) -> float:
        """Return the longer of both ranks' times, so that both continue or both stop."""
        own = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        theirs = torch.zeros_like(own)
        self._swap(other, other, own, theirs)
        return max(seconds, float(theirs.item()))

    def _swap(self, to: int, source: int, sent: Tensor, received: Tensor) -> None:
        # The receive first: on gloo both ways of a connection take turns if both ends begin with
        # the send.
        ends = [dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, to)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    def _buffer(self, nbytes: int) -> tuple[Tensor, Tensor]:
        if self._buffers[0].numel() < nbytes:
            self._buffers = self._new_buffers(nbytes)
        return self._buffers[0][:nbytes], self._buffers[1][:nbytes]

    def _new_buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        sent, received = (
            torch.ones(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        return sent, received

    def _finish(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _tree(
    prober: Prober, hosts: Sequence[str], tick: OnProgress
) -> tuple[Topology, dict[Pair, Link]]:
    """Return the tree without its links, and the links of the pairs from which it follows."""
    samples: dict[Pair, Samples] = defaultdict(list)
    passes = 0
    while True:
        for pair, more in _pairs(prober, hosts, tick).items():
            samples[pair] += more
        passes += 1
        try:
            pairs = {pair: fit(times) for pair, times in samples.items()}
            return cluster(pairs, hosts), pairs
        except ValueError:
            if passes == PASSES:
                raise


def _pairs(prober: Prober, hosts: Sequence[str], tick: OnProgress) -> dict[Pair, Samples]:
    """Return the times of each pair of the schedule."""
    own: dict[Pair, Samples] = {}
    rounds = pair_rounds(hosts)
    for done, pairs in enumerate(rounds):
        tick("pairs of ranks", done, len(rounds))
        prober.barrier()
        for left, right in pairs:
            if prober.rank in (left, right):
                samples = prober.pair(right if prober.rank == left else left)
                own |= {(left, right): samples} if prober.rank == left else {}
    return {pair: samples for found in _gathered(own) for pair, samples in found.items()}


def _shared(
    prober: Prober,
    topology: Topology,
    hosts: Sequence[str],
    pairs: Mapping[Pair, Link],
    tick: OnProgress,
) -> dict[str, float]:
    """Return domain -> bytes/s of each rank when all ranks of the domain send: the median over the
    domain's units.
    """
    rates = {}
    met = meeting(topology, pairs)
    for domain in shared_domains(topology):
        expected = median(link.bandwidth for link in met[domain]) / inner_degree(topology, domain)
        nbytes = max(FIRST // GROWTH, min(int(SHARED_S * expected), MOST // GROWTH))
        own: Samples = []
        schedule = turns(topology, domain, hosts)
        for done, units in enumerate(schedule):
            tick(f"all ranks of a {domain}", done, len(schedule))
            talks = topology.position(prober.rank) // topology.degree(domain) in units
            own += _talk(
                prober, neighbours(topology, domain, prober.rank) if talks else None, nbytes
            )
        rates[domain] = _rate(topology, domain, _gathered(own))
    return rates


def _talk(prober: Prober, ring: tuple[int, int] | None, nbytes: int) -> Samples:
    """Time messages of two sizes in this rank's ring; a rank without a ring only joins the
    barriers.
    """
    samples = []
    for size in (nbytes, GROWTH * nbytes):
        for _ in range(SHARED_REPEATS):
            prober.barrier()
            if ring is not None:
                samples.append((size, prober.exchange(*ring, size)))
    return samples


def _rate(topology: Topology, domain: str, samples: Sequence[Samples]) -> float:
    """Return the bytes/s of a rank: a message has arrived when the last rank of the unit has it."""
    degree = topology.degree(domain)
    rates = []
    for first in range(0, topology.world_size, degree):
        ranks = [samples[topology.rank_at(position)] for position in range(first, first + degree)]
        last = [max(each, key=itemgetter(1)) for each in zip(*ranks, strict=True)]
        rates.append(fit(last).bandwidth)
    return median(rates)
