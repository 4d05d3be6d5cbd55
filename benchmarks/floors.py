# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a step must move over each link of a cluster, by the cost formulas, and the time below which
no step can be.

Note [Loads]
    The cost formulas give what a rank sends per phase and domain. It sends equal parts to the other
    ranks of that phase and domain's process group. A link's load is what the ranks behind it send
    to all other ranks. Units of one level are loaded alike. Stock ZeRO-3 on gloo uses rings in rank
    order instead: one member of each unit sends to the next unit, so all links of the tree carry
    the same.

    Where ``shared`` consecutive ranks of a GPU share each layer, a process group has one of them,
    and a unit's link carries what each of its groups sends.

Note [Floors]
    A collective cannot end before its busiest link has moved its load. Collectives that wait for
    one another add up: ``serial``. If everything could overlap, the busiest link would still have
    to move the loads of all: ``overlapped``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.emulated_cluster.spec import LEVELS, Spec
from benchmarks.training_setup import TrainingSetup
from zero_topo.config import ResolvedConfig
from zero_topo.cost import Workload, step_bytes
from zero_topo.plan import Plan

ITEMSIZE = 2  # stock ZeRO-3 in 16-bit training


@dataclass(frozen=True)
class Load:
    """What one process group of a phase puts on the links in an optimizer step.

    Attributes:
        phase, domain: as the meter books it.
        out: level -> bytes that leave each unit of that level.
    """

    phase: str
    domain: str
    out: Mapping[str, float]

    def seconds(self, spec: Spec) -> float:
        """The least time in which the links can move it."""
        return max(self.out[level] / spec.rates_mbit.bytes_per_s(level) for level in LEVELS)


def loads(config: ResolvedConfig, work: Workload, spec: Spec, shared: int = 1) -> list[Load]:
    """Loads of one optimizer step of one of our schemes, see Note [Loads]."""
    found = []
    for (phase, domain), nbytes in step_bytes(config, work).items():
        lo, hi = _pair(config, phase, domain)
        out = {}
        for level in LEVELS:
            groups = _groups(spec, level, shared)
            ranks = spec.ranks_below(level) // groups
            out[level] = nbytes * groups * _outside(config.plan, (lo, hi), ranks)
        found.append(Load(phase, domain, out))
    return found


def stock_loads(
    numels: Iterable[int],
    micro_batches: int,
    spec: Spec,
    ring: bool,
    matrices: Iterable[int] = (),
    shared: int = 1,
) -> list[Load]:
    """Loads of one optimizer step of stock ZeRO-3 on gloo, with its own reduce-scatter or with the
    ring.

    With Muon's ``matrices``, stock reduces all gradients on all ranks, which is as much as gloo's
    reduce-scatter.
    """
    ranks = spec.world_size // shared
    shards, whole = (
        sum(-(-numel // ranks) for numel in of) * ITEMSIZE for of in (numels, matrices)
    )
    once = micro_batches * (ranks - 1) * shards
    scatter = once if ring else 2 * once
    sent = {
        "gather_forward": once,
        "gather_backward": once,
        "scatter": scatter,
        "matrices": 4 * (ranks - 1) * whole,
    }
    found = []
    for phase, nbytes in sent.items():
        out = {level: nbytes * _groups(spec, level, shared) for level in LEVELS}
        found.append(Load(phase, "world", out))
    return found


def tensor_load(setup: TrainingSetup, micro_batches: int, shared: int) -> Load:
    """Load of the all-reduces of activations between the ranks of a GPU that share each layer.

    Two forward and two backward for each layer, of the samples of all these ranks: Shoeybi et al.,
    arXiv 1909.08053, section 3.
    """
    reduced = 4 * setup.layers * micro_batches * shared * setup.activations
    itemsize = ITEMSIZE if setup.bf16 else 2 * ITEMSIZE
    sent = reduced * itemsize * 2 * (shared - 1) / shared
    return Load("tensor", "gpu", {"gcd": sent, "gpu": 0.0, "node": 0.0})


def all_reduce_loads(numels: Iterable[int], spec: Spec, itemsize: int) -> list[Load]:
    """Loads of one optimizer step in which torch's all-reduce, gloo's ring, sums all gradients."""
    sent = 2 * (spec.world_size - 1) / spec.world_size * sum(numels) * itemsize
    return [Load("all_reduce", "world", dict.fromkeys(LEVELS, sent))]


def uplink_bytes(found: Sequence[Load]) -> float:
    """Bytes that leave each node in an optimizer step."""
    return sum(load.out["node"] for load in found)


def floors(found: Sequence[Load], spec: Spec) -> dict[str, float]:
    """Seconds below which no step can be, see Note [Floors]."""
    total = {level: sum(load.out[level] for load in found) for level in LEVELS}
    return {
        "serial": sum(load.seconds(spec) for load in found),
        "overlapped": max(total[level] / spec.rates_mbit.bytes_per_s(level) for level in LEVELS),
    }


def phases(found: Sequence[Load], spec: Spec) -> dict[str, dict[str, Any]]:
    """Phase -> its floor in seconds and the bytes it puts on each level's links, in JSON types."""
    table: dict[str, dict[str, Any]] = {}
    for load in found:
        row = table.setdefault(load.phase, {"floor_s": 0.0, "level_bytes": Counter()})
        row["floor_s"] += load.seconds(spec)
        row["level_bytes"].update(load.out)
    return {phase: {**row, "level_bytes": dict(row["level_bytes"])} for phase, row in table.items()}


def _groups(spec: Spec, level: str, shared: int) -> int:
    """How many of the ``shared`` groups that divide the ranks have ranks behind a level's link."""
    return min(spec.ranks_below(level), shared)


def _pair(config: ResolvedConfig, phase: Any, domain: str) -> tuple[int, int]:
    """The process group of a phase that spans the domain."""
    fitting = [
        group
        for group in config.plan.stages(*config.plan.pair_of(phase))
        if config.topology.domain(group[1]) == domain
    ]
    assert fitting, f"{phase} has no process group in the {domain}"
    return fitting[-1]


def _outside(plan: Plan, group: tuple[int, int], unit: int) -> float:
    """How often what a rank sends in a group leaves a unit of ``unit`` ranks, times the ranks of
    the unit.

    Tree positions of a unit are consecutive. Every rank of it sends equal parts to the others of
    its group.
    """
    lo, hi = group
    others = hi // lo - 1
    leaving = 0
    for position in range(unit):
        start = position // hi * hi + position % lo
        leaving += sum(1 for other in range(start, start + hi, lo) if other >= unit)
    return leaving / others
