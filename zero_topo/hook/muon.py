# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Muon's update of whole matrices, by DeepSpeed's own functions; one of the files that use its
private names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.config import ResolvedConfig
from zero_topo.config.modes import MUON_REFUSED, MUON_WITH_EXPERTS, SPARSE_MODES
from zero_topo.engine.stage3 import Stage3
from zero_topo.hook.seam import SINCE, has

APPLY = "_apply_muon_to_accumulated_grads"


def check_muon(optimizer: Any, configs: Sequence[ResolvedConfig]) -> None:
    """Raise ValueError if torch's optimizer is Muon and a plan or this DeepSpeed does not support
    it.

    Before :data:`APPLY` existed, DeepSpeed computed Muon's updates in its reduction, which is not
    used here.
    """
    if type(optimizer).__name__ != "MuonWithAuxAdam":
        return
    if len(configs) > 1:
        raise ValueError(f"optimizer Muon: {MUON_WITH_EXPERTS}")
    if isinstance(configs[0].sync, SPARSE_MODES):
        raise ValueError(f"optimizer Muon: {MUON_REFUSED}")
    if not has(APPLY):
        raise ValueError(
            f"Muon needs DeepSpeed {SINCE[APPLY]} or later under zero_topo; use Adam or AdamW"
        )


def all_finite(topo: Stage3) -> Tensor:
    """Return whether all gradients of all ranks are finite, bool ``[]`` on their device; the host
    does not wait.
    """
    # NaN if any element is
    least_and_most = torch.stack(topo.gradients.optimizer_rows().aminmax())
    finite = least_and_most.isfinite().all().to(torch.uint8)
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return finite.bool()


def apply_muon(
    topo: Stage3,
    rows: Tensor,
    momentum: Tensor,
    params: Mapping[int, Any],
    settings: Mapping[str, Any],
    finite: Tensor,
) -> None:
    """Replace gradients by Nesterov momentum, and each matrix of it by Muon's update. Collective.

    If a gradient of any rank is not finite, the momentum stays, and all rows become NaN. DeepSpeed
    finds that in their norm and skips the step; only with FP16 does it look before.

    Args:
        topo: the engine.
        rows: the gradients of a sub-group's optimizer shard, ``[N / O, columns]``; changed in
            place.
        momentum: FP32, of the same shape, on any device; changed in place.
        params: parameter index -> parameter, of the sub-group.
        settings: ``momentum`` and ``ns_method`` of the parameter group.
        finite: the result of :func:`all_finite`.
    """
    blended = rows.float()
    beta = settings["momentum"]
    added = blended.to(momentum.device)
    # Where a value is not finite the momentum moves towards itself, and stays.
    torch.where(finite.to(momentum.device), added, momentum, out=added)
    momentum.lerp_(added, 1 - beta)
    blended.lerp_(momentum.to(rows.device), beta)
    blended.masked_fill_(finite.logical_not(), torch.nan)
    shard_ranges = topo.layout.shard_ranges(params)
    first = min(shard_ranges)[0]
    parts = {}
    for param_index, (begin, end) in zip(params, shard_ranges, strict=True):
        parts[param_index] = blended[:, begin - first : end - first]
    plan = topo.config.plan

    def update(owned: Sequence[int], matrices: Tensor) -> Tensor:
        heads = [getattr(params[index], "muon_num_heads", None) for index in owned]
        with equal_bits(plan.optimizer < plan.world_size):
            return orthogonalized(matrices, heads, settings["ns_method"])

    shapes = {param_index: tuple(param.ds_shape) for param_index, param in params.items()}
    topo.matrices.apply(parts, shapes, update)
    rows.copy_(blended)


@contextmanager
def equal_bits(replicated: bool) -> Iterator[None]:
    """Give equal matrix products equal bits in all processes, within the context, if their results
    are replicated.

    On ROCm rocBLAS may add partial products by atomics, in any order, unless torch's algorithms are
    deterministic. cuBLAS gives equal bits for one stream.
    """
    if not replicated or torch.version.hip is None or torch.are_deterministic_algorithms_enabled():
        yield
        return
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False, warn_only=warns_only)


def orthogonalized(matrices: Tensor, heads: Sequence[int | None], method: str) -> Tensor:
    """Return Muon's updates of matrices that have their momentum already, as stock computes them,
    scale included.

    Args:
        matrices: FP32 ``[count, rows, columns]``, or weights of convolutions
            ``[count, out, in, height, width]``.
        heads: for each matrix, the number of attention heads that are computed separately; None for
            the whole.
        method: "gram" or "standard".
    """
    # Imported here because importing Muon compiles its kernels.
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    # With a beta of zero `muon_update` neither reads nor blends the momentum that it is given.
    # One batch of all matrices, or of all their heads
    if matrices.dim() == 3 and len({*heads}) == 1:
        batch = matrices.reshape(-1, matrices.shape[1] // (heads[0] or 1), matrices.shape[2])
        update = muon_update(
            batch, torch.zeros_like(batch), beta=0.0, ns_method=method, is_expert_group=True
        )
        return update.reshape(matrices.shape)
    updates = [
        muon_update(matrix, torch.zeros_like(matrix), beta=0.0, ns_method=method, num_heads=count)
        for matrix, count in zip(matrices, heads, strict=True)
    ]
    return torch.stack([update.view(matrices.shape[1:]) for update in updates])
