# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The gather and the reduce-scatter that FSDP2 calls for each module.

Blocks of a message
    FSDP2 passes all parameters of a module as one flat tensor. A block of values with one scale
    would then span two parameters, and a norm would set the scale of a matrix. The flat tensor is
    therefore cut where parameters begin. FSDP2 says only how long it is, so it is not cut where a
    part of the module's parameters takes part (some without a gradient).

Parameters of several types
    FSDP2 passes them as bytes, one parameter after the other. Those of each type are copied
    together, sent as the plan says, and copied back.

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

from zero_topo.collectives.transport import all_gather_views, reduce_scatter
from zero_topo.config.sync_config import Move, gather_moves, reduce_moves, rows_message
from zero_topo.fsdp.host import PASS, Host, own_parameters, sharded_modules
from zero_topo.fsdp.settings import before_attach, follow, refuse
from zero_topo.quant.operands import FLOATS, View, at_blocks
from zero_topo.quant.ops import cast_to
from zero_topo.quant.spec import BlockSpec


def install(host: Host) -> None:
    """Give every module that FSDP2 shards our collectives."""
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError("this torch has no custom collectives of FSDP2; install torch 2.13")
    config = host.config
    together = {module._get_fsdp_state()._modules: module for module in sharded_modules(host.model)}
    for modules, module in together.items():
        stored = own_parameters(module)
        trained = [param for param in stored if param.requires_grad]
        computed = module._get_fsdp_state()._mp_policy.param_dtype
        module.set_custom_all_gather(Gather(host, config.weights_spec, stored, computed))
        scatter = Scatter(host, config.gradients_spec, trained)
        scatter.params = stored
        scatter.set_divisor(host.divisor or before_attach(module, "gradient_divide_factor"))
        module.set_custom_reduce_scatter(scatter)
        # FSDP2 then divides nothing and asks for sums: the sum is divided once, in FP32.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        for one in modules:
            refuse(one)
            follow(one, "set_gradient_divide_factor", scatter.set_divisor, call=False)
            # Sums they are already.
            follow(one, "set_force_sum_reduction_for_comms", lambda enable: None, call=False)


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

    def _counted(self, phase: str, shard: Tensor, sizes: Sequence[int]) -> Sequence[int]:
        """Count a call, and return the sizes at which its shards are cut."""
        if sum(sizes) != shard.numel():
            sizes = [shard.numel()]
        message = rows_message(1, sizes, self._spec, shard.itemsize)
        plan = self._host.config.plan
        moves = reduce_moves if phase == "scatter" else gather_moves
        self._host.book(phase, moves(plan, (1, plan.weights), message))
        return sizes


class Gather(ModuleCollective):
    """All-gathers a module's weights.

    Args:
        host: the attached model.
        spec: the format; None sends values as they are.
        params: the module's parameters.
        computed: the type to which FSDP2 casts weights before it gathers them, if any.
    """

    def __init__(
        self,
        host: Host,
        spec: BlockSpec | None,
        params: Sequence[DTensor],
        computed: torch.dtype | None,
    ) -> None:
        super().__init__(host, spec, params)
        self._params = params
        self._computed = computed

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Fill ``output_tensor``, which has this rank's shard, with those of all ranks."""
        group: dist.ProcessGroup = how["group"]
        types = self._places() if output_tensor.dtype == torch.uint8 else {}
        sent = sum(end - begin for places in types.values() for begin, end, _ in places)
        if len(types) < 2 or sent != input_tensor.nbytes:
            self._gather(output_tensor, input_tensor, self._sizes, group)
            return
        table = output_tensor.view(group.size(), -1)
        for dtype, places in types.items():
            # Copied: bytes of a type may begin where none of its values may
            pieces = [table[:, begin:end] for begin, end, _ in places]
            rows = torch.cat(pieces, dim=1)
            values = rows.view(dtype)
            sizes = [numel for _, _, numel in places]
            self._gather(values.view(-1), values[group.rank()], sizes, group)
            received = rows.split([piece.shape[1] for piece in pieces], dim=1)
            for piece, gathered in zip(pieces, received, strict=True):
                piece.copy_(gathered)

    def _places(self) -> dict[torch.dtype, list[tuple[int, int, int]]]:
        """Return by type where parameters begin and end in a shard's bytes, and their elements."""
        places: dict[torch.dtype, list[tuple[int, int, int]]] = {}
        begin = 0
        for param, numel in zip(self._params, self._sizes, strict=True):
            dtype = param.dtype
            if self._computed is not None and dtype.is_floating_point:
                dtype = self._computed
            end = begin + numel * dtype.itemsize
            places.setdefault(dtype, []).append((begin, end, numel))
            begin = end
        return places

    def _gather(
        self, output: Tensor, shard: Tensor, sizes: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        """Gather values of one type, as the plan says.

        FSDP2 gathers over fewer ranks in the backward pass if ``reshard_after_forward`` is a
        number. Such gathers, and those of whole numbers, are sent as they are, by FSDP2's own
        group.
        """
        phase = "gather_backward" if PASS.is_bw else "gather_forward"
        hierarchy = self._host.hierarchy.metered(phase)
        meter = self._host.mesh.meter
        if hierarchy.size == 1:  # the shard is in place and is all there is; no format rounds it
            return
        if group.size() != hierarchy.size or output.dtype not in FLOATS:
            sent = (group.size() - 1) * shard.nbytes
            self._host.book(phase, [Move(1, group.size(), sent)])
            meter.record(phase, self._host.config.topology.domain(group.size()), sent)
            with meter.timing(phase):
                dist.all_gather_into_tensor(output, shard, group=group)
            return
        spec = self._spec or cast_to(output.dtype)
        sizes = self._counted(phase, shard, sizes)
        views = cut(output, sizes, hierarchy.size)
        with meter.timing(phase):
            # All ranks compute with the same bits: a rank decodes its own message too if the format
            # rounds.
            blocks = at_blocks(views, spec.block_size)
            all_gather_views(hierarchy, blocks, spec, own=spec.lossy).wait()


class Scatter(ModuleCollective):
    """Reduce-scatters a module's gradients.

    Attributes:
        params: all parameters whose gradients it may reduce.
        divisor: what sums are divided by.
    """

    params: Sequence[DTensor] = ()

    def set_divisor(self, factor: float | None) -> None:
        """Divide by a factor, or by the number of ranks."""
        self.divisor = factor or float(self._host.config.plan.world_size)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer: FSDP2's first call in a module's reduction, before it reads the
        gradients of shards.
        """
        self._host.before_reduction(self.params, self.divisor)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Fill ``output_tensor`` with this rank's shard of the sums, in FP32 and tree order."""
        hierarchy = self._host.hierarchy.metered("scatter")
        spec = self._spec or cast_to(output_tensor.dtype)
        sizes = self._counted("scatter", output_tensor, self._sizes)
        parts = cut(input_tensor, sizes, hierarchy.size)
        sums = cut(output_tensor, sizes, 1)
        with self._host.mesh.meter.timing("scatter"):
            reduce_scatter(hierarchy, parts, spec, sums, 1 / self.divisor).wait()


def cut(flat: Tensor, sizes: Sequence[int], members: int) -> list[View]:
    """Return views of each parameter in the adjacent shards of all members."""
    shard = sum(sizes)
    begins = accumulate(sizes, initial=0)
    return [
        View(flat[begin:], 1, size, size, members, shard)
        for begin, size in zip(begins, sizes, strict=False)
    ]
