# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes that leave a node of a cluster in an optimizer step, by the cost formulas.

The cost formulas give what a rank sends per phase and domain. It sends equal parts to the other
ranks of that phase and domain's process group. Stock ZeRO-3 on gloo uses rings in rank order
instead: one member of each node sends to the next node.

Where ``shared`` consecutive ranks of a GPU share each layer, a process group has one of them, and a
node's link carries what each of its groups sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.emulated_cluster.spec import Spec
from zero_topo.config import ResolvedConfig
from zero_topo.cost import Workload, step_bytes
from zero_topo.plan import Plan

ITEMSIZE = 2  # stock ZeRO-3 in 16-bit training


def uplink(config: ResolvedConfig, work: Workload, spec: Spec, shared: int = 1) -> float:
    """Of one of our schemes."""
    groups = min(spec.ranks_per_node, shared)
    ranks = spec.ranks_per_node // groups
    total = 0.0
    for (phase, domain), nbytes in step_bytes(config, work).items():
        pair = _pair(config, phase, domain)
        total += nbytes * groups * _outside(config.plan, pair, ranks)
    return total


def stock_uplink(
    numels: Iterable[int],
    micro_batches: int,
    spec: Spec,
    ring: bool,
    matrices: Iterable[int] = (),
    shared: int = 1,
) -> float:
    """Of stock ZeRO-3 on gloo, with its own reduce-scatter, which sends every byte twice, or with
    the ring.

    With Muon's ``matrices``, stock reduces all gradients on all ranks, which is as much as gloo's
    reduce-scatter.
    """
    ranks = spec.world_size // shared
    shards, whole = (
        sum(-(-numel // ranks) for numel in of) * ITEMSIZE for of in (numels, matrices)
    )
    exchanges = 3 if ring else 4
    sent = (ranks - 1) * (exchanges * micro_batches * shards + 4 * whole)
    return sent * min(spec.ranks_per_node, shared)


def all_reduce_uplink(numels: Iterable[int], spec: Spec, itemsize: int) -> float:
    """Where torch's all-reduce, gloo's ring, sums all gradients."""
    return 2 * (spec.world_size - 1) / spec.world_size * sum(numels) * itemsize


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
