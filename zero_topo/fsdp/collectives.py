# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The gather and the reduce-scatter that FSDP2 calls for each module, quantized and hierarchical, and metered.

Note [Blocks of a message]
    FSDP2 passes all parameters of a module as one flat tensor. A block of values with one scale would then span two
    parameters, and a norm would set the scale of a matrix. The flat tensor is therefore cut where parameters begin.
    FSDP2 says only how long it is, so it is not cut where a part of the module's parameters takes part (some without a
    gradient), or where several modules share one group (``fully_shard([norm, head])``).

Note [Streams]
    FSDP2 calls both on its own streams. Collectives wait for that stream and it waits for them, so their buffers are
    freed and used again in its order. Both have ended, in that order, when the call returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.transport import Route, all_gather_views, reduce_scatter
from zero_topo.config.sync_config import rows_message
from zero_topo.quant.operands import FLOATS, View, at_blocks
from zero_topo.quant.ops import cast_to
from zero_topo.quant.spec import BlockSpec
from zero_topo.topology.model import Topology


class Call(NamedTuple):
    """A collective that FSDP2 asked for.

    Attributes:
        phase: of ``plan.PHASES``.
        message: bytes of a rank's message, by the formula.
        degree: ranks of the group if it is FSDP2's own; None for the groups of the plan.
    """

    phase: str
    message: int
    degree: int | None = None


@dataclass
class Shared:
    """What the collectives of all modules share.

    Attributes:
        route: the groups of the ranks that share the weights.
        topology: the machine.
        calls: counts the calls of the current step.
        last_calls: those of the last step.
    """

    route: Route
    topology: Topology
    calls: Counter[Call] = field(default_factory=Counter)
    last_calls: Counter[Call] = field(default_factory=Counter)

    def end_step(self) -> None:
        """End an optimizer step."""
        self.last_calls = self.calls
        self.calls = Counter()


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
        self._shared.calls[Call(phase, message)] += 1
        return sizes


class Gather(ModuleCollective):
    """All-gathers a module's weights."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Fill ``output_tensor`` with the shards of all ranks; this rank's shard is in place already.

        FSDP2 gathers over fewer ranks in the backward pass if ``reshard_after_forward`` is a number, and passes bytes
        if a module's parameters have several types. Both are sent as they are, by FSDP2's own group.
        """
        group: dist.ProcessGroup = how["group"]
        phase = "gather_forward" if torch._C._current_graph_task_id() == -1 else "gather_backward"
        route = self._shared.route.metered(phase)
        meter = route.hops[0].meter
        if (
            route.size == 1
        ):  # the shard, which is in place, is all there is, and no format rounds it
            return
        if group.size() != route.size or output_tensor.dtype not in FLOATS:
            self._shared.calls[Call(phase, input_tensor.nbytes, group.size())] += 1
            domain = self._shared.topology.domain(group.size())
            meter.record(phase, domain, (group.size() - 1) * input_tensor.nbytes)
            with meter.timing(phase):
                dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return
        spec = self._spec or cast_to(output_tensor.dtype)
        sizes = self._counted(phase, input_tensor)
        views = cut(output_tensor, sizes, route.size)
        with meter.timing(phase):
            # All ranks compute with the same bits: a rank decodes its own message too if the format rounds.
            blocks = at_blocks(views, spec.block_size)
            all_gather_views(route, blocks, spec, own=spec.lossy).wait()


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
        """Fill ``output_tensor`` with this rank's shard of the sums, added in FP32 in tree order."""
        route = self._shared.route.metered("scatter")
        spec = self._spec or cast_to(output_tensor.dtype)
        sizes = self._counted("scatter", output_tensor)
        parts = cut(input_tensor, sizes, route.size)
        with route.hops[0].meter.timing("scatter"):
            reduce_scatter(route, parts, spec, cut(output_tensor, sizes, 1), self._factor).wait()


def cut(flat: Tensor, sizes: Sequence[int], members: int) -> list[View]:
    """Return views of each parameter in the shards of all members, which lie one after the other in ``flat``."""
    shard = sum(sizes)
    begins = accumulate(sizes, initial=0)
    return [
        View(flat[begin:], 1, size, size, members, shard)
        for begin, size in zip(begins, sizes, strict=False)
    ]
