# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes the bytes that one rank stores, by role: exactly, as the engine allocates them, and the paper's table.

Only the shards are counted; activations, gathered parameters and buckets in flight are in ``footprint.py``. Sizes are
those of Note [Sizes] in ``volume.py``. A rank that stores INT8 weights still has the weights it updates, in DeepSpeed's
own buffer, and the weights of parameters that are not quantized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from zero_topo.config import ROLES, ResolvedConfig
from zero_topo.cost.codes import codes_bytes
from zero_topo.cost.volume import Workload

ADAM_BYTES = 12  # per parameter: FP32 master, momentum and variance
VARIANCE_BYTES = 4  # per parameter: the part of ADAM_BYTES that AdamS and Muon do not store
AGE_BYTES = 1  # per parameter: what AgedAdamW stores in addition to ADAM_BYTES
ADAM_BYTES_FP32 = 8  # per parameter when the weights are FP32 and serve as their own master


def memory_bytes(
    config: ResolvedConfig, work: Workload, accumulation_itemsize: int, optimizer_bytes: int = ADAM_BYTES
) -> dict[str, int]:
    """Return the bytes per rank of each role's shard.

    Args:
        config: plan and formats.
        work: the model.
        accumulation_itemsize: bytes per element of the gradient buffer.
        optimizer_bytes: bytes per parameter of the optimizer states, FP32 master included.

    Returns:
        Role -> bytes; "frozen" only if some parameters are, "residual" only if sync keeps one. An unquantized secondary
        inside the weight shard is a view of it and costs nothing.
    """
    plan = config.plan
    shards = work.shards(plan)
    columns, n = sum(shards), plan.world_size
    held = {
        "weights": _weights_bytes(config, work),
        "secondary": _secondary_bytes(config, shards, work.itemsize),
        "gradients": n // plan.gradients * columns * accumulation_itemsize,
        "optimizer": n // plan.optimizer * columns * optimizer_bytes,
    }
    held["optimizer"] -= n // plan.optimizer * sum(map(plan.shard_numel, work.of_muon())) * VARIANCE_BYTES
    if work.frozen is not None:  # no rank stores more exact weights than a world shard
        still = replace(config, plan=replace(plan, optimizer=n))
        copied = _secondary_bytes(still, work.frozen.shards(plan), work.itemsize)
        held["frozen"] = _weights_bytes(still, work.frozen) + copied
    residual = config.sync.memory(plan, columns, work.loss_scaled)[0]
    return {**held, "residual": residual} if residual else held


def padding_bytes(
    config: ResolvedConfig, work: Workload, accumulation_itemsize: int, optimizer_bytes: int = ADAM_BYTES
) -> dict[str, int]:
    """Return the part of :func:`memory_bytes` beyond an even split of the true parameters, rounded up.

    World shards are padded to ``ceil(m / N)`` elements. INT8 weights and a quantized secondary add scales and
    alignment.
    """
    held = memory_bytes(config, work, accumulation_itemsize, optimizer_bytes)
    plan, true = config.plan, sum(work.numels)
    coded = sum(m for m, kept in zip(work.numels, work.coded(config), strict=True) if kept)
    own = 0 if config.resident_spec is None else Fraction(true * work.itemsize, plan.optimizer)
    copied = work.itemsize if config.secondary_spec is None else Fraction(config.secondary_spec.bits, 8)
    even: Mapping[str, Fraction] = {
        "weights": own + Fraction((true - coded) * work.itemsize + coded, plan.weights),
        "secondary": true * copied / Fraction(plan.secondary or 1),
        "gradients": Fraction(true * accumulation_itemsize, plan.gradients),
        "optimizer": Fraction(true * optimizer_bytes - sum(work.of_muon()) * VARIANCE_BYTES, plan.optimizer),
    }
    return {role: held[role] - int(even[role]) if held[role] else 0 for role in ROLES}


def _weights_bytes(config: ResolvedConfig, work: Workload) -> int:
    plan, spec = config.plan, config.resident_spec
    rows, shards = plan.world_size // plan.weights, work.shards(plan)
    if spec is None:
        return rows * sum(shards) * work.itemsize
    coded = Counter(width for width, kept in zip(shards, work.coded(config), strict=True) if kept)
    plain = sum(shards) - sum(coded.elements())
    own = plan.world_size // plan.optimizer * sum(shards)
    codes = sum(count * codes_bytes(rows, width, spec) for width, count in coded.items())
    return (rows * plain + own) * work.itemsize + codes


def _secondary_bytes(config: ResolvedConfig, shards: Sequence[int], itemsize: int) -> int:
    plan, spec = config.plan, config.secondary_spec
    if plan.secondary is None or plan.weights == 1:
        return 0
    rows = plan.world_size // plan.secondary
    if spec is not None:
        return sum(count * spec.nbytes(rows * width) for width, count in Counter(shards).items())
    is_view = plan.secondary % plan.weights == 0
    return 0 if is_view else rows * sum(shards) * itemsize
