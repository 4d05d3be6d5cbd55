# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Schemes against numbers of ranks and of micro-batches: who scales how, and from how many micro-batches one wins.

Note [Break-even]
    Between two barriers a step's micro-batches are alike, but for the first, which waits for publish, and the last,
    which overlaps sync. From two micro-batches on, a step's time is thus a straight line in their number, which two
    simulations give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.simulator import Job, Simulation, simulate
from zero_topo.cost.uncertainty import Overlap, Range, overlapping, step_range
from zero_topo.topology.model import Topology
from zero_topo.topology.rates import Rates

NEVER = 10**6
"""Micro-batches beyond which nobody breaks even: a step of so many takes days."""


@dataclass(frozen=True)
class Entry:
    """A scheme to simulate: its block, and whether DeepSpeed's own engine sends it (Note [Stock] in ``step.py``)."""

    block: ZeroTopoConfig
    stock: bool = False


@dataclass(frozen=True)
class Point:
    """One simulated step, and how far it may be off."""

    scheme: str
    ranks: int
    micro_batches: int
    simulation: Simulation
    range: Range

    def to_json(self) -> dict[str, Any]:
        """In JSON types, without the events."""
        found = self.simulation
        return {
            "scheme": self.scheme,
            "ranks": self.ranks,
            "micro_batches": self.micro_batches,
            "step_s": found.step_s,
            "tflops_per_gpu": found.tflops_per_gpu,
            "breakdown": dict(found.breakdown),
            "range": self.range.to_json(),
        }


@dataclass(frozen=True)
class Sweep:
    """What to simulate.

    Attributes:
        machines: topologies, from few ranks to many.
        schemes: name -> what it is.
        job: what is trained; its micro-batches are replaced.
        micro_batches: per optimizer step.
        rates: of a rank.
        overlap: how much communication is hidden; None is all of it, as the best case of what is not known.
    """

    machines: Sequence[Topology]
    schemes: Mapping[str, Entry]
    job: Job
    micro_batches: Sequence[int]
    rates: Rates
    overlap: Overlap | None = None

    def points(self) -> list[Point]:
        """All combinations, by scheme, ranks and micro-batches.

        Raises:
            ValueError: if a scheme does not fit a machine or the machine's rates are not known.
        """
        return [
            self._point(name, machine, count)
            for name in self.schemes
            for machine in self.machines
            for count in self.micro_batches
        ]

    def _point(self, name: str, machine: Topology, count: int) -> Point:
        config, job = self._step(name, machine, count)
        within = step_range(config, job, self.rates, self.overlap is not None)
        return Point(name, machine.world_size, count, simulate(config, job, self.rates), within)

    def break_even(self) -> list[dict[str, Any]]:
        """For each machine and pair of schemes: from how many micro-batches on the one that is slower at 1 wins."""
        rows = []
        for machine in self.machines:
            times = {name: [self._simulate(name, machine, k).step_s for k in (1, 2, 3)] for name in self.schemes}
            for pair in combinations(self.schemes, 2):
                ahead, behind = sorted(pair, key=lambda name, times=times: times[name][0])  # type: ignore[misc]
                gaps = [there - here for here, there in zip(times[ahead], times[behind], strict=True)]
                names = {"ahead_at_1": ahead, "behind_at_1": behind}
                rows.append({"ranks": machine.world_size, **names, "break_even": _zero(gaps)})
        return rows

    def _simulate(self, name: str, machine: Topology, count: int) -> Simulation:
        return simulate(*self._step(name, machine, count), self.rates)

    def _step(self, name: str, machine: Topology, count: int) -> tuple[ResolvedConfig, Job]:
        entry = self.schemes[name]
        job = replace(self.job, micro_batches=count, stock=entry.stock)
        return overlapping(resolve_config(entry.block, machine), job, self.overlap or "full")


def _zero(gaps: Sequence[float]) -> float | None:
    """Where a gap at 1, 2 and 3, and straight on, becomes zero; None if never, or beyond :data:`NEVER`."""
    first, second, third = gaps
    if second < 0:
        return 1 + first / (first - second)
    found = 2 + second / (second - third) if third < second else None
    return found if found is not None and found <= NEVER else None


def scaling_efficiency(points: Sequence[Point]) -> list[dict[str, Any]]:
    """TFLOP/s per rank over that on the fewest ranks simulated, for each scheme and number of micro-batches."""
    least = min((point.ranks for point in points), default=0)
    base = {(p.scheme, p.micro_batches): p.simulation.tflops_per_gpu for p in points if p.ranks == least}
    return [
        {
            "scheme": point.scheme,
            "micro_batches": point.micro_batches,
            "ranks": point.ranks,
            "over": least,
            "efficiency": point.simulation.tflops_per_gpu / base[point.scheme, point.micro_batches],
        }
        for point in points
        if point.ranks != least
    ]
