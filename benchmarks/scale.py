# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``benchmarks scale``: what a step asks of a device and its host, by the number of ranks.

What is counted where
    Every scheme runs in this process, as rank 0 of a world that is pretended, on small parameters:
    what a step launches depends on how many there are, hardly on their sizes. Its seconds are those
    of this host, with the work of the CPU's kernels in them, and without any network. Next to it
    stands what is counted in the same way inside DeepSpeed's engine on a few real ranks, stock
    ZeRO-3 among them: there it includes what DeepSpeed does for a step beyond moving bytes (Note
    [What DeepSpeed's engine adds] in ``scale_ranks.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from benchmarks.bare import BareStep, fake_world
from benchmarks.counting import Counts, Launches
from benchmarks.ranks import Ranks, on_loopback
from benchmarks.records import GrowingRecord, Spread, Tick, record
from benchmarks.schemes import KNOWN, BenchScheme
from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.quant import spec
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

PROGRAM = "benchmarks.scale_ranks:measure_all"
GPUS = 4
DIES = 2  # of a node
BLOCK = 64  # values
REAL = ("stock", "zero3", "topo")
SOON: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "oktopk": {"tau": 2, "tau_prime": 2},
        "radius": {"start": 1, "interval": 2},
        "scape": {"warmup": 0},
    }
)
WARM_UP = 1  # steps: buffers and tables that are made once, masks that are chosen at a first step


@dataclass(frozen=True)
class ScaleBench:
    """What to measure.

    Attributes:
        schemes: of ``benchmarks/schemes.py`` or a file; not stock, which is measured on real ranks.
        ranks: sizes of the pretended world, 8 on each node.
        params: parameters of the model.
        numel: elements of each.
        repeats: timed steps.
        real_ranks: processes that count inside DeepSpeed's engine; 0 for none.

    Raises:
        ValueError: for ranks that fill no nodes, a scheme that has no engine of ours, or what the
            config refuses.
    """

    schemes: tuple[BenchScheme, ...]
    ranks: tuple[int, ...]
    params: int = 32
    numel: int = 1 << 17
    repeats: int = 5
    real_ranks: int = 8

    def __post_init__(self) -> None:
        if odd := [n for n in (*self.ranks, self.real_ranks) if n % (GPUS * DIES)]:
            raise ValueError(f"{odd[0]} ranks fill no nodes of {GPUS * DIES}: give a multiple")
        if min(self.params, self.numel, self.repeats) < 1 or not self.ranks:
            raise ValueError(
                f"{self.params} parameters, {self.numel} elements, {self.repeats} repeats: give 1 "
                "or more"
            )
        for scheme in self.schemes:
            for size in self.ranks:
                self.config(scheme, size)

    def config(self, scheme: BenchScheme, ranks: int) -> ResolvedConfig:
        """A scheme on so many ranks, without overlap: every phase ends what it begins. Modes begin
        at once.

        Blocks are small, so that large parameters are stored as INT8 on 75,264 ranks too; launches
        do not depend on it.
        """
        if scheme.block is None:
            raise ValueError(
                f"{scheme.name!r} is measured on real ranks, with the others: choose a scheme of "
                "zero_topo"
            )
        block = {**scheme.block, "overlap": False}
        if "sync" in block:
            block["sync"] = {**block["sync"], **SOON.get(block["sync"].get("mode"), {})}
        with patch.object(spec, "BLOCK", BLOCK):
            return resolve_config(ZeroTopoConfig.parse(block), machine(ranks))

    def ticks(self) -> int:
        """Measurements that :func:`run` announces, one tick each."""
        return len(self.schemes) * len(self.ranks) + (len(REAL) if self.real_ranks else 0)


def machine(ranks: int) -> Topology:
    """Nodes of 4 GPUs with 2 ranks each."""
    return emulated(ranks // (GPUS * DIES), GPUS, DIES)


def run(wanted: ScaleBench, tick: Tick) -> GrowingRecord:
    """Measure everything.

    Args:
        wanted: what.
        tick: called after each measurement, with a few words and the number done since.

    Yields:
        The record so far. ``real`` has an entry for each scheme measured inside DeepSpeed,
        ``results`` one for each scheme and number of ranks: launches_per_parameter, phases (see
        :class:`Counts`, and seconds), setup_s, communicators, sent (bytes by domain).

    Raises:
        RuntimeError: if a real rank fails.
    """
    settings = {**asdict(wanted), "schemes": [scheme.job_on({}) for scheme in wanted.schemes]}
    results: list[dict[str, Any]] = []
    real: list[dict[str, Any]] = []
    if wanted.real_ranks:
        tick(f"{wanted.real_ranks} real ranks: starting", 0)
        topology = {
            "nodes": wanted.real_ranks // (GPUS * DIES),
            "gpus_per_node": GPUS,
            "ranks_per_gpu": DIES,
        }
        jobs = [KNOWN[name].job_on(topology) for name in REAL]
        with Ranks(
            PROGRAM, {"params": wanted.params, "jobs": jobs}, on_loopback(wanted.real_ranks, 1)
        ) as ranks:
            for job, result in ranks.results(jobs, lambda *_: None):
                real.append(result)
                tick(f"{wanted.real_ranks} real ranks: {job['scheme']}", 1)
        yield record("scale", settings, {"real": real, "results": results})
    for size in wanted.ranks:
        for scheme in wanted.schemes:
            results.append(
                {
                    "scheme": scheme.name,
                    "ranks": size,
                    **measure(wanted.config(scheme, size), wanted),
                }
            )
            tick(f"{size} ranks: {scheme.name}", 1)
        yield record("scale", settings, {"real": real, "results": results})


def measure(config: ResolvedConfig, wanted: ScaleBench) -> dict[str, Any]:
    """One scheme on one number of ranks: times first, then counts, each in a world of its own."""
    numels = [wanted.numel] * wanted.params
    seconds: dict[str, list[float]] = {}
    with fake_world(config.plan.world_size):
        began = time.perf_counter()
        step = BareStep(config, numels)
        setup_s = time.perf_counter() - began
        for repeat in range(WARM_UP + wanted.repeats):
            for name, do in step.phases().items():
                began = time.perf_counter()
                do()
                if repeat >= WARM_UP:
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
        stages = [step.engine.mesh.hierarchy(*pair) for pair in config.plan.pairs()]
        communicators = {
            id(group.group)
            for hierarchy in stages
            for group in hierarchy.groups
            if group.group is not None
        }
        sent: dict[str, int] = {}
        for (_, domain), nbytes in step.engine.meter.last_step.items():
            sent[domain] = sent.get(domain, 0) + nbytes
    phases = count(config, numels)
    return {
        "launches_per_parameter": total(phases) / wanted.params,
        "phases": {
            name: {**asdict(counts), "seconds": Spread.of(seconds[name]).to_json()}
            for name, counts in phases.items()
        },
        "step_s": Spread.of(
            [sum(times) for times in zip(*seconds.values(), strict=True)]
        ).to_json(),
        "setup_s": setup_s,
        "communicators": len(communicators),
        "sent": sent,
    }


def count(
    config: ResolvedConfig, numels: Sequence[int], together: int | None = None, steps: int = 2
) -> Mapping[str, Counts]:
    """Counts by phase of the optimizer step, of some, that launches most; rank 0 of a pretended
    world.

    Args:
        config: as for :class:`BareStep`, which takes ``numels`` and ``together`` as well.
        numels: elements of each parameter.
        together: parameters in one collective.
        steps: to count, after one that is not.
    """
    launches = Launches()
    counted: list[Mapping[str, Counts]] = []
    with fake_world(config.plan.world_size):
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
