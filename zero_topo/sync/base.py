# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a mode of ``sync`` is, and how the config's block finds its class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.mesh import Mesh
from zero_topo.plan import Plan
from zero_topo.quant.ops import Quantizer


@dataclass(frozen=True)
class SyncContext:
    """What a mode needs to know of the engine.

    Attributes:
        plan: the degrees.
        mesh: holds the hop ``(gradients, world)`` and those named by the mode's ``hops``.
        meter: counts the bytes sent under phase "sync".
        quantizer: block quantization, for modes that use it.
        dtype: type in which dense values travel.
        chunk_numel: elements that one collective may carry; bounds the temporary memory.
    """

    plan: Plan
    mesh: Mesh
    meter: Meter
    quantizer: Quantizer
    dtype: torch.dtype
    chunk_numel: int


class SyncMode(ABC):
    """One way to reduce gradient shards. The engine calls :meth:`sync` once per optimizer step, on every rank."""

    @abstractmethod
    def sync(self, shard: Tensor) -> None:
        """Reduce in place.

        Args:
            shard: ``[N / G, F]``, the rank's gradient shard: this gradient domain's sum, already divided by N. On
                return the rows of the rank's optimizer shard hold the sum over all gradient domains.
        """

    @abstractmethod
    def wire_bytes(self, columns: int) -> Mapping[str, int]:
        """Domain -> bytes one rank sends per call for rows of ``columns`` elements."""

    def state_bytes(self, columns: int) -> int:
        """Bytes of state (residuals, masks) the mode keeps per rank."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """State to save with a checkpoint, this rank's own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: for state of another mode.
        """
        if state:
            raise ValueError(f"this sync mode keeps no state, but the checkpoint carries {sorted(state)}")


@singledispatch
def build_mode(config: object, context: SyncContext) -> SyncMode:
    """The mode of a config block; each mode registers itself by the type of its block.

    Raises:
        ValueError: if no mode is registered for the block.
    """
    raise ValueError(f"no sync mode is registered for {type(config).__name__}")


def mode_hops(config: object, plan: Plan) -> list[tuple[int, int]]:
    """Hops a mode may use: up to the world, and back down to the optimizer or gradient shard."""
    return [(plan.gradients, plan.world_size), (plan.optimizer, plan.world_size)]
