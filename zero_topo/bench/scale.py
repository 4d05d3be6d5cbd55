# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo bench scale``: what a step asks of a device and its host, by the number of ranks; in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zero_topo.bench.bare import BareStep, fake_world
from zero_topo.bench.counting import Counts, Launches
from zero_topo.config import ResolvedConfig

WARM_UP = 1  # steps: buffers and tables that are made once, masks that are chosen at a first step


def count(
    config: ResolvedConfig, numels: Sequence[int], together: int | None = None, steps: int = 2
) -> Mapping[str, Counts]:
    """Counts by phase of the optimizer step, of some, that launches most; rank 0 of a pretended world.

    Args:
        config: as for :class:`BareStep`, which takes ``numels`` and ``together`` as well.
        numels: elements of each parameter.
        together: parameters in one collective.
        steps: to count, after one that is not.
    """
    launches = Launches()
    counted: list[Mapping[str, Counts]] = []
    with fake_world(config.plan.world_size), launches.kernels():
        step = BareStep(config, numels, together)
        for _ in range(WARM_UP + steps):
            launches.phases.clear()
            for name, do in step.phases().items():
                with launches.phase(name):
                    do()
            counted.append(dict(launches.phases))
    return max(counted[WARM_UP:], key=total)


def total(phases: Mapping[str, Counts]) -> int:
    """Launches of all phases."""
    return sum(counts.launches for counts in phases.values())
