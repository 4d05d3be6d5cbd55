# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The part of the hook that serves ``offload_states`` and ``reload_states``: shards on the host between uses."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor

from zero_topo.engine.seam import Stock
from zero_topo.engine.stage3 import Stage3
from zero_topo.engine.state_offload import HostCopies

LP_PARAMS, LP_GRADS = OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads
BUCKET = OffloadStateTypeEnum.contiguous_grad_buffer


class OffloadHooks(Stock):
    """Which states are on the host, and what must not run meanwhile.

    Attributes:
        topo: the shards.
    """

    topo: Stage3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.offloaded_states: set[OffloadStateTypeEnum] = set()  # asked for before DeepSpeed sets its own
        super().__init__(*args, **kwargs)
        self._host_copies = HostCopies(self.topo.setup.like.device)

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to the host, as stock does; see Note [Emptied storages]. Collective: publish is ended first.

        Args:
            include: which; None is all. With gradients goes what sync remembers, with weights their secondary copies.
            device: the CPU.
            pin_memory: whether copies are page-locked.
            non_blocking: copies run side by side in any case, and are waited for before anything is freed.
        """
        told = [kind for kind in OffloadStateTypeEnum if include is None or kind in include]
        kinds = [kind for kind in told if kind not in self.offloaded_states]
        self.topo.settle()
        self.empty_partition_cache()  # while there are shards to go back to
        held = self._offloadable()
        self._host_copies.offload([tensor for kind in kinds if kind in held for tensor in held[kind]()], pin_memory)
        super().offload_states([kind for kind in kinds if kind is BUCKET], device, pin_memory, non_blocking)
        self.offloaded_states.update(kinds)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring all states back to the accelerator.

        Args:
            non_blocking: only queue the copies.
        """
        self._host_copies.reload(non_blocking)
        self.offloaded_states.intersection_update({BUCKET})
        super().reload_states(non_blocking)

    def require_states(self, *kinds: OffloadStateTypeEnum) -> None:
        """Raise RuntimeError if one of these states, by default any, is on the host."""
        away = [kind.value for kind in kinds or OffloadStateTypeEnum if kind in self.offloaded_states]
        if away:
            raise RuntimeError(f"offload_states moved {', '.join(away)} to the host: call engine.reload_states() first")

    def checkpoint_event_prologue(self) -> None:
        """Before a checkpoint is saved or loaded; DeepSpeed fills masters and weights itself then. Collective."""
        self.require_states()
        self.topo.weights.finish()
        super().checkpoint_event_prologue()

    def _offloadable(self) -> dict[OffloadStateTypeEnum, Callable[[], Iterable[Tensor]]]:
        """Of each kind: its tensors."""
        return {
            OffloadStateTypeEnum.optim_states: self.optimizer_tensors,
            OffloadStateTypeEnum.hp_params: lambda: self.fp32_partitioned_groups_flat,
            LP_PARAMS: lambda: [
                *self.topo.weight_tensors(),
                self.lp_param_buffer,
                *self.fp16_partitioned_groups_flat,
                *(param.ds_tensor for param in self.module.parameters()),
            ],
            LP_GRADS: lambda: [*self.topo.gradients.tensors(), self.grad_partitions_flat_buffer],
        }

    def optimizer_tensors(self) -> list[Tensor]:
        """What the optimizer remembers, but for single numbers."""
        return [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
