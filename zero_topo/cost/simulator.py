# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How long an optimizer step takes on a machine, and what of it waits for what.

Ranks of a regular tree are alike: all do the same at the same time, each with its share of the links. One rank thus
stands for all, and a step of a million ranks is simulated as fast as one of eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zero_topo.config import ResolvedConfig
from zero_topo.cost.events import Event, schedule
from zero_topo.cost.step import Job, Program
from zero_topo.cost.time import Network, rates_of
from zero_topo.topology.rates import Rates

__all__ = ["PHASES", "Event", "Job", "Simulation", "simulate"]

TERA = 10**12
PHASES = ("compute", "gather_forward", "gather_backward", "scatter", "sync", "publish", "optimizer")


@dataclass(frozen=True)
class Simulation:
    """One optimizer step of one rank.

    Attributes:
        step_s: seconds.
        tflops_per_gpu: model FLOPs of a rank (what is computed twice counted once) per second, in 10^12.
        breakdown: phase -> seconds that the rank computed, or waited for that phase with nothing to compute; they sum
            to ``step_s``.
        events: what ran when, packing and transfers included.
    """

    step_s: float
    tflops_per_gpu: float
    breakdown: Mapping[str, float]
    events: tuple[Event, ...]


def simulate(config: ResolvedConfig, job: Job, machine: Rates | None = None) -> Simulation:
    """Simulate one optimizer step, module by module; see Note [A step] in ``step.py``.

    The step begins with the weights of the step before still to be published, and ends with the optimizer.

    Args:
        config: plan, formats and machine.
        job: what is trained.
        machine: rates of a rank; None takes those of the preset that the topology has its name from.

    Raises:
        ValueError: if the machine's rates or the bandwidth of a link that is used are not known.
    """
    rates = rates_of(config.topology) if machine is None else machine
    timeline = schedule(Program(config, job, Network(config.topology, rates)).tasks)
    exposed = timeline.exposed()
    return Simulation(
        step_s=timeline.end_s,
        tflops_per_gpu=job.flops / timeline.end_s / TERA,
        breakdown=MappingProxyType({phase: exposed.get(phase, 0.0) for phase in PHASES}),
        events=timeline.events,
    )
