# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The gather and the reduce-scatter that FSDP2 calls for each module.

Blocks of a message
    FSDP2 passes all parameters of a module as one flat tensor. A block of values with one scale
    would then span two parameters, and a norm would set the scale of a matrix. The flat tensor is
    therefore cut where parameters begin. FSDP2 says only how long it is, so it is not cut where a
    part of the module's parameters takes part (some without a gradient), or where several modules
    share one group (``fully_shard([norm, head])``).

Streams
    FSDP2 calls both on its own streams. Collectives wait for that stream and it waits for them, so
    their buffers are freed and used again in its order. Both have ended, in that order, when the
    call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.module_tracker import ModuleTracker

from zero_topo.collectives.transport import all_gather_views, reduce_scatter
from zero_topo.config.sync_config import Move, gather_moves, reduce_moves, rows_message
from zero_topo.fsdp.host import Host, own_parameters, sharded_modules
from zero_topo.quant.operands import FLOATS, View, at_blocks
from zero_topo.quant.ops import cast_to
from zero_topo.quant.spec import BlockSpec


def install(host: Host) -> None:
    """Give every module that FSDP2 shards our collectives."""
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError("this torch has no custom collectives of FSDP2; install torch 2.13")
    config = host.config
    for module in sharded_modules(host.model):
        stored = own_parameters(module)
        trained = [param for param in stored if param.requires_grad]
        module.set_custom_all_gather(Gather(host, config.weights_spec, stored))
        module.set_custom_reduce_scatter(Scatter(host, config.gradients_spec, trained))
        # FSDP2 then divides nothing and asks for sums: the sum is divided once, in FP32.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class ModuleCollective:
    """A collective of one module, as FSDP2 calls it.

    Args:
        host: the attached model.
        spec: the format; None sends values as they are.
        params: the module's parameters, as far as they usually take part.
    """

    def __init__(self, host: Host, spec: BlockSpec | None, params: Sequence[DTensor]) -> None:
        self._host = host
        self._spec = spec
        # Elements of each parameter in a rank's shard: FSDP2 pads dimension 0.
        self._sizes = []
        for param in params:
            rows = -(-param.shape[0] // host.config.plan.weights)
            self._sizes.append(rows * param.shape[1:].numel())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _counted(self, phase: str, shard: Tensor) -> Sequence[int]:
        """Count a call, and return the sizes at which its shards are cut."""
        sizes = self._sizes if sum(self._sizes) == shard.numel() else [shard.numel()]
        message = rows_message(1, sizes, self._spec, shard.itemsize)
        plan = self._host.config.plan
        moves = reduce_moves if phase == "scatter" else gather_moves
        self._host.book(phase, moves(plan, (1, plan.weights), message))
        return sizes


class Gather(ModuleCollective):
    """All-gathers a module's weights."""

    _tracker = ModuleTracker()  # never entered: of it, only `is_bw` is asked

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Fill ``output_tensor``, which has this rank's shard, with those of all ranks.

        FSDP2 gathers over fewer ranks in the backward pass if ``reshard_after_forward`` is a
        number, and passes bytes if a module's parameters have several types. Both are sent as they
        are, by FSDP2's own group.
        """
        group: dist.ProcessGroup = how["group"]
        phase = "gather_backward" if self._tracker.is_bw else "gather_forward"
        hierarchy = self._host.hierarchy.metered(phase)
        meter = self._host.mesh.meter
        if hierarchy.size == 1:  # the shard is in place and is all there is; no format rounds it
            return
        if group.size() != hierarchy.size or output_tensor.dtype not in FLOATS:
            sent = (group.size() - 1) * input_tensor.nbytes
            self._host.book(phase, [Move(1, group.size(), sent, gathers=True)])
            meter.record(phase, self._host.config.topology.domain(group.size()), sent)
            with meter.timing(phase):
                dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return
        spec = self._spec or cast_to(output_tensor.dtype)
        sizes = self._counted(phase, input_tensor)
        views = cut(output_tensor, sizes, hierarchy.size)
        with meter.timing(phase):
            # All ranks compute with the same bits: a rank decodes its own message too if the format
            # rounds.
            blocks = at_blocks(views, spec.block_size)
            all_gather_views(hierarchy, blocks, spec, own=spec.lossy).wait()


class Scatter(ModuleCollective):
    """Reduce-scatters a module's gradients."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer: FSDP2's first call in a module's reduction, before it reads the
        gradients of shards.
        """
        self._host.before_reduction()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Fill ``output_tensor`` with this rank's shard of the sums, in FP32 and tree order."""
        hierarchy = self._host.hierarchy.metered("scatter")
        spec = self._spec or cast_to(output_tensor.dtype)
        sizes = self._counted("scatter", output_tensor)
        parts = cut(input_tensor, sizes, hierarchy.size)
        sums = cut(output_tensor, sizes, 1)
        with self._host.mesh.meter.timing("scatter"):
            reduce_scatter(hierarchy, parts, spec, sums, 1 / self._host.divisor).wait()


def cut(flat: Tensor, sizes: Sequence[int], members: int) -> list[View]:
    """Return views of each parameter in the adjacent shards of all members."""
    shard = sum(sizes)
    begins = accumulate(sizes, initial=0)
    return [
        View(flat[begin:], 1, size, size, members, shard)
        for begin, size in zip(begins, sizes, strict=False)
    ]
