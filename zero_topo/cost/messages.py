# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes of the messages that a rank holds at once in each phase: what it sends, what comes, and FP32 tables between.

Sync and publish carry a run of parameters at a time (``packed_runs``). A route of two hops holds most in its first, for
a reduction, and in its last, for a gather.
"""

from __future__ import annotations

from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import FP32, ITEMSIZES, rows_message
from zero_topo.cost.codes import change_bytes
from zero_topo.cost.volume import Workload, slot_runs


def scatter_bytes(config: ResolvedConfig, bucket: int, work: Workload) -> int:
    """Of a bucket: messages to all members, and what comes from them.

    Args:
        config: plan and formats.
        bucket: its elements.
        work: the parameters, of which each is filled up to whole blocks.
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
    """Of a run of weights: differences, the message made of them, and what comes; or of codes, if all blocks escape."""
    plan, spec, codes = config.plan, config.publish.spec, config.resident_spec
    rows, size = plan.world_size // plan.optimizer, plan.optimizer // plan.weights
    widths, coded = (widest_run(config, work, kind) for kind in (False, True))
    itemsize = ITEMSIZES[config.publish.dtype] if config.publish.dtype else work.itemsize
    own = rows_message(rows, widths, spec, itemsize)
    if codes is not None:
        own = max(own, change_bytes(rows, coded, codes, rows * sum(map(codes.blocks, coded))))
    differences = 0 if spec is None else FP32 * rows * sum(widths)
    if size == 1:
        return 0 if spec is None else differences + own
    route = plan.route(plan.weights, plan.optimizer)
    if len(route) == 1:
        return differences + own + own * size
    came = own * (route[-1][1] // route[-1][0])
    return max(differences + own + came if spec else 0, came + own * size)


def widest_run(config: ResolvedConfig, work: Workload, coded: bool | None = None) -> list[int]:
    """Columns of each parameter of the run that has most; of publish, by whether codes of them are held."""
    slots = [slot for slot, held in enumerate(work.coded(config)) if coded in (None, held)]
    runs = slot_runs(config.plan, work, slots, work.run_numel)
    return max(([config.plan.shard_numel(work.numels[slot]) for slot in run] for run in runs), key=sum, default=[])
