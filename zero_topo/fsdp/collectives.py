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

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.transport import Hierarchy, all_gather_views, reduce_scatter
from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import Move, gather_moves, reduce_moves, rows_message
from zero_topo.quant.operands import FLOATS, View, at_blocks
from zero_topo.quant.ops import cast_to
from zero_topo.quant.spec import BlockSpec


@dataclass
class Shared:
    """What the collectives of all modules share.

    Attributes:
        config: the plan and the formats.
        hierarchy: the groups of the ranks that share the weights.
        formula: bytes of the current step by the formulas: ``(phase, domain) -> bytes``.
    """

    config: ResolvedConfig
    hierarchy: Hierarchy
    formula: Counter[tuple[str, str]] = field(default_factory=Counter)

    def book(self, phase: str, moves: Iterable[Move]) -> None:
        """Add what a rank sends in a collective."""
        for move in moves:
            self.formula[phase, self.config.topology.domain(move.hi)] += move.sent


class ModuleCollective(ABC):
    """A collective of one module, as FSDP2 calls it.

    Args:
        shared: with other modules.
        spec: the format; None sends values as they are.
        sizes: elements of each parameter in a rank's shard, as far as they are known.
    """

    def __init__(self, shared: Shared, spec: BlockSpec | None, sizes: Sequence[int]) -> None:
        self._shared = shared
        self._spec = spec
        self._sizes = tuple(sizes)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Run the collective."""

    def _counted(self, phase: str, shard: Tensor) -> Sequence[int]:
        """Count a call, and return the sizes at which its shards are cut."""
        sizes = self._sizes if sum(self._sizes) == shard.numel() else (shard.numel(),)
        message = rows_message(1, sizes, self._spec, shard.itemsize)
        plan = self._shared.config.plan
        moves = reduce_moves if phase == "scatter" else gather_moves
        self._shared.book(phase, moves(plan, (1, plan.weights), message))
        return sizes


class Gather(ModuleCollective):
    """All-gathers a module's weights."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Fill ``output_tensor``, which has this rank's shard, with those of all ranks.

        FSDP2 gathers over fewer ranks in the backward pass if ``reshard_after_forward`` is a
        number, and passes bytes if a module's parameters have several types. Both are sent as they
        are, by FSDP2's own group.
        """
        group: dist.ProcessGroup = how["group"]
        phase = "gather_forward" if torch._C._current_graph_task_id() == -1 else "gather_backward"
        hierarchy = self._shared.hierarchy.metered(phase)
        meter = hierarchy.groups[0].meter
        if hierarchy.size == 1:  # the shard is in place and is all there is; no format rounds it
            return
        if group.size() != hierarchy.size or output_tensor.dtype not in FLOATS:
            sent = (group.size() - 1) * input_tensor.nbytes
            self._shared.book(phase, [Move(1, group.size(), sent, gathers=True)])
            meter.record(phase, self._shared.config.topology.domain(group.size()), sent)
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
    """Reduce-scatters a module's gradients.

    Args:
        factor: multiplies the sums; FSDP2 is set to divide nothing.
        before: called before FSDP2 reads the gradients of shards.
    """

    def __init__(
        self,
        shared: Shared,
        spec: BlockSpec | None,
        sizes: Sequence[int],
        factor: float,
        before: Callable[[], None],
    ) -> None:
        super().__init__(shared, spec, sizes)
        self._factor = factor
        self._before = before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer: FSDP2's first call in a module's reduction."""
        self._before()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Fill ``output_tensor`` with this rank's shard of the sums, in FP32 and tree order."""
        hierarchy = self._shared.hierarchy.metered("scatter")
        spec = self._spec or cast_to(output_tensor.dtype)
        sizes = self._counted("scatter", output_tensor)
        parts = cut(input_tensor, sizes, hierarchy.size)
        with hierarchy.groups[0].meter.timing("scatter"):
            reduce_scatter(
                hierarchy, parts, spec, cut(output_tensor, sizes, 1), self._factor
            ).wait()


def cut(flat: Tensor, sizes: Sequence[int], members: int) -> list[View]:
    """Return views of each parameter in the adjacent shards of all members."""
    shard = sum(sizes)
    begins = accumulate(sizes, initial=0)
    return [
        View(flat[begin:], 1, size, size, members, shard)
        for begin, size in zip(begins, sizes, strict=False)
    ]
