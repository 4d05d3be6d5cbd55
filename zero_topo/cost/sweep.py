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

from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.cost.simulator import Job, Simulation, simulate
from zero_topo.topology.model import Topology
from zero_topo.topology.rates import Rates


@dataclass(frozen=True)
class Point:
    """One simulated step."""

    scheme: str
    ranks: int
    micro_batches: int
    simulation: Simulation

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
        }


@dataclass(frozen=True)
class Sweep:
    """What to simulate.

    Attributes:
        machines: topologies, from few ranks to many.
        schemes: name -> its config.
        job: what is trained; its micro-batches are replaced.
        micro_batches: per optimizer step.
        rates: of a rank; None takes the preset's.
    """

    machines: Sequence[Topology]
    schemes: Mapping[str, ZeroTopoConfig]
    job: Job
    micro_batches: Sequence[int]
    rates: Rates | None = None

    def points(self) -> list[Point]:
        """All combinations, by scheme, ranks and micro-batches.

        Raises:
            ValueError: if a scheme does not fit a machine or the machine's rates are not known.
        """
        return [
            Point(name, machine.world_size, count, self._simulate(name, machine, count))
            for name in self.schemes
            for machine in self.machines
            for count in self.micro_batches
        ]

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
        return simulate(resolve_config(self.schemes[name], machine), replace(self.job, micro_batches=count), self.rates)


def _zero(gaps: Sequence[float]) -> float | None:
    """Where a gap at 1, 2 and 3, and straight on, becomes zero; None if never."""
    first, second, third = gaps
    if second < 0:
        return 1 + first / (first - second)
    return 2 + second / (second - third) if third < second else None


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
