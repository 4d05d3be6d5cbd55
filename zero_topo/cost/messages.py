# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of the packed buffers that a rank stores at one time: sent, received, and FP32 tables.

Sync and publish carry a run of parameters at a time (``packed_runs``). In a hierarchical collective of two groups, a
reduction needs most memory in the first group, an all-gather in the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import FP32, ITEMSIZES, rows_message
from zero_topo.cost.codes import largest_change_bytes
from zero_topo.cost.volume import Workload
from zero_topo.plan import packed_runs


def scatter_bytes(config: ResolvedConfig, bucket: int, work: Workload) -> int:
    """Return the bytes of the reduce-scatter of a bucket: the buffers sent to all group ranks and those received.

    Args:
        config: plan and formats.
        bucket: elements of the bucket.
        work: the parameters, each of which is padded to whole blocks.
    """
    plan, spec = config.plan, config.gradients_spec
    if plan.gradients == 1:
        return bucket * FP32
    if spec is None:
        return 2 * bucket * work.scatter_itemsize
    sizes = [plan.world_size // plan.gradients * width for width in widest_run(config, work)]
    added = sum(-size % spec.block_size for size in sizes)
    return 2 * spec.nbytes(bucket + plan.gradients * added)


def publish_bytes(config: ResolvedConfig, work: Workload) -> int:
    """Return the bytes of a publish of one run of weights: differences, their packed buffer, and the receive buffer.

    For INT8 weights the packed buffer is the largest possible one, in which every block is sent whole.
    """
    plan, spec, codes = config.plan, config.publish.spec, config.resident_spec
    rows, size = plan.world_size // plan.optimizer, plan.optimizer // plan.weights
    widths, coded = (widest_run(config, work, kind) for kind in (False, True))
    itemsize = ITEMSIZES[config.publish.dtype] if config.publish.dtype else work.itemsize
    own = rows_message(rows, widths, spec, itemsize)
    if codes is not None:
        own = max(own, largest_change_bytes(rows, coded, codes))
    differences = 0 if spec is None else FP32 * rows * sum(widths)
    if size == 1:
        return 0 if spec is None else differences + own
    route = plan.route(plan.weights, plan.optimizer)
    if len(route) == 1:
        return differences + own + own * size
    came = own * (route[-1][1] // route[-1][0])
    return max(differences + own + came if spec else 0, came + own * size)


def widest_run(config: ResolvedConfig, work: Workload, coded: bool | None = None) -> Sequence[int]:
    """Return the elements, in a world shard, of each parameter of the largest run.

    ``coded`` selects parameters stored as INT8 (True) or not (False), as publish packs them; None takes all.
    """
    kinds = work.coded(config) if coded is not None else ()
    return _widest(work.shards(config.plan), config.plan.world_size, kinds, coded, work.run_numel)


@lru_cache  # the planner asks for the same run in most of its plans
def _widest(
    shards: Sequence[int], ranks: int, kinds: Sequence[bool], coded: bool | None, limit: int | None
) -> Sequence[int]:
    widths = shards if coded is None else [width for width, kind in zip(shards, kinds, strict=True) if kind == coded]
    runs = packed_runs([ranks * width for width in widths], limit)
    return max((widths[run.start : run.stop] for run in runs), key=sum, default=())
