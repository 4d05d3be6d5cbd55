# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How far a predicted step may be off, and on what it hangs.

Note [Range]
    A machine's file says by which share its rates may be off (``Rates.spread``; a third where it does not). How much of
    the communication a device really hides is not known either: the simulator's own schedule is the best case, nothing
    hidden the worst. A step is never longer on a faster machine or with more hidden, so two simulations, everything at
    its best and everything at its worst, bound it; one more for each unknown alone at its worst says what it hangs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from zero_topo.config import ResolvedConfig
from zero_topo.cost.simulator import Job, simulate
from zero_topo.topology.rates import UNKNOWN_SPREAD, Rates, Ring, Unknown

Overlap = Literal["none", "prefetch", "full"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
RATES: tuple[Unknown, ...] = get_args(Unknown)


@dataclass(frozen=True)
class Range:
    """Of a predicted step.

    Attributes:
        low_s, high_s: seconds with everything unknown at its best and at its worst.
        hangs_on: unknown -> by which share the step is longer with this one at its worst, the largest first.
    """

    low_s: float
    high_s: float
    hangs_on: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """In JSON types."""
        return {"low_s": self.low_s, "high_s": self.high_s, "hangs_on": dict(self.hangs_on)}

    def sentence(self) -> str:
        """On what it hangs, largest first; what changes it by less than a percent is left out."""
        told = [f"{what} ({share:+.0%})" for what, share in self.hangs_on.items() if share >= 0.01]
        return ", ".join(told) or "nothing that is unknown"


def overlapping(config: ResolvedConfig, job: Job, how: Overlap) -> tuple[ResolvedConfig, Job]:
    """A step that hides its communication so far: all of it, only gathers ahead, or none."""
    if how == "full":
        return config, job
    ahead = 0 if how == "none" else max(1, job.prefetch)
    return replace(config, overlap=False), replace(job, prefetch=ahead, overlap_scatter=False)


def step_range(config: ResolvedConfig, job: Job, rates: Rates, overlap_known: bool = False) -> Range:
    """The range of a step; see Note [Range].

    Args:
        config: plan and machine.
        job: what is trained.
        rates: of a rank.
        overlap_known: whether the job's schedule is what will be, and not the best case.
    """

    unknown = (*RATES, *(() if overlap_known else ("overlap",)))
    usual = simulate(config, job, rates).step_s
    shares = {what: _seconds(config, job, rates, (what,)) / usual - 1 for what in unknown}
    order = sorted(shares, key=lambda what: -shares[what])
    low, high = bounds(config, job, rates, overlap_known)
    return Range(low, high, MappingProxyType({what: shares[what] for what in order}))


def bounds(config: ResolvedConfig, job: Job, rates: Rates, overlap_known: bool = False) -> tuple[float, float]:
    """The ends of :func:`step_range` alone: seconds with everything unknown at its best and at its worst."""
    unknown = (*RATES, *(() if overlap_known else ("overlap",)))
    return _seconds(config, job, rates, RATES, by=1.0), _seconds(config, job, rates, unknown)


def _seconds(config: ResolvedConfig, job: Job, rates: Rates, off: tuple[str, ...], by: float = -1.0) -> float:
    """Of a step with these unknowns off by their spread, downwards unless told."""
    if "overlap" in off:
        config, job = overlapping(config, job, "none")
    factors = {what: 1 + by * rates.spread.get(what, UNKNOWN_SPREAD) for what in RATES if what in off}
    links, machine = scaled(config, rates, factors)
    return simulate(links, job, machine).step_s


def scaled(config: ResolvedConfig, rates: Rates, factors: Mapping[Unknown, float]) -> tuple[ResolvedConfig, Rates]:
    """The same on a machine whose rates are so many times higher; latencies are as many times lower."""
    links, steps = factors.get("links", 1.0), 1 / factors.get("latency", 1.0)
    topology = config.topology
    slower = {
        domain: replace(link, bandwidth=link.bandwidth * links, latency=link.latency * steps)
        for domain, link in topology.links.items()
    }

    def ring_of(ring: Ring) -> Ring:
        small = None if ring.small_step is None else ring.small_step * steps
        return replace(ring, bandwidth=ring.bandwidth * links, step=ring.step * steps, small_step=small)

    machine = replace(
        rates.with_rings(ring_of),
        peak_flops=rates.peak_flops * factors.get("compute", 1.0),
        memory_bandwidth=rates.memory_bandwidth * factors.get("memory", 1.0),
    )
    return replace(config, topology=replace(topology, links=slower)), machine
