# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The part of the hook that DeepSpeed's backward pass meets: buckets, ``zero_grad``, gradients that users look at."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from zero_topo.engine.frozen import Frozen
from zero_topo.engine.hook_offload import BUCKET, LP_GRADS, OffloadHooks
from zero_topo.engine.seam import at_boundary, empty_bucket, forget_backward

logger = logging.getLogger(__name__)

SEVERAL_BACKWARDS = (
    "zero_topo: this step has several backward passes, each of them taken for its last, so gradients cross nodes in "
    'each: set "gradient_accumulation_steps" to their number; or run them under engine.coalesce_grad_reduction(), or '
    "call engine.set_gradient_accumulation_boundary(False) before and (True) for the last; or set "
    '"managed_gradient_accumulation": false'
)


class GradientHooks(OffloadHooks):
    """What becomes of gradients, up to the step.

    Attributes:
        slots: ``ds_id`` -> slot of each trained parameter.
        frozen: the others.
        stepping: whether the step is being taken.
    """

    frozen: Frozen

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.slots: dict[int, int] = {}
        self.stepping = False
        self._in_backward = False
        self._forwards = 0  # since the last step
        self._hinted = False
        super().__init__(*args, **kwargs)

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """A gradient's second part (Note [Zeroed, then added]) may already be in the bucket, added in place."""
        self.require_states(LP_GRADS, BUCKET)
        self._in_backward = True
        if not any(param is waiting for bucket in self.ipg_buckets.values() for waiting in bucket.params):
            super().reduce_independent_p_g_buckets_and_remove_grads(param)

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> None:
        slots = [self.slots[p.ds_id] for p in params_to_reduce]
        # With optimizer offload the whole sync waits for the step, which copies the result to the host.
        last = at_boundary(self) and not self.offload_optimizer
        repeated = self.topo.gradients.scatter(slots, [p.grad for p in params_to_reduce], last)
        if repeated and self._forwards > 1 and not self._hinted:
            self._hinted = True
            if dist.get_rank() == 0 and self.topo.config.plan.gradients < dist.get_world_size():
                logger.warning(SEVERAL_BACKWARDS)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: None) -> list[Tensor]:
        for param in params_to_release:
            if not get_accelerator().is_synchronized_device():  # DeepSpeed scatters on a stream of its own
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def independent_gradient_partition_epilogue(self) -> None:
        """The end of a backward pass, or of a part of it."""
        super().independent_gradient_partition_epilogue()
        self._in_backward = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._forwards = 0
        if not self.stepping:  # DeepSpeed's step calls this before the masters have read the gradients
            for bucket in self.ipg_buckets.values():
                self.partition_grads(bucket.params, None)
                empty_bucket(bucket)
            forget_backward(self)
            self._in_backward = False
            self.topo.gradients.zero()
        super().zero_grad(set_to_none)

    def forward_begins(self, *_: Any) -> None:
        """Of a backward pass that failed half-way (out of memory, caught) nothing may stay."""
        self.frozen.refuse_unfrozen()
        self._forwards += torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if self._in_backward and torch._C._current_graph_task_id() == -1:  # not if that backward pass recomputes this
            if dist.get_rank() == 0:
                logger.warning("zero_topo: a backward pass did not end; all gradients since the last step are dropped")
            self.zero_grad()

    def refuse_half_a_backward(self) -> None:
        """Before a step: raise RuntimeError if the last backward pass failed half-way."""
        if self._in_backward:
            raise RuntimeError(
                "the backward pass did not end, so its gradients are not whole: repeat the micro-batches since the "
                "last step, or drop their gradients with optimizer.zero_grad(); where torch.autograd.grad was taken of "
                "the engine's output, take it of output.detach().requires_grad_() and pass it to output.backward()"
            )

    # -- gradients seen by the user (safe_get_*, safe_set_*) ---------------------------------------------------------

    def _get_norm_groups(self) -> list[Tensor]:
        if not self.stepping:  # asked for by a user: nothing is synced yet, nor on the host
            self._peek()
            if self.offload_optimizer:
                self.note_norms()
        return super()._get_norm_groups()

    def note_norms(self) -> None:
        """What DeepSpeed's reduction notes for optimizer offload: norms of the rank's own part of each gradient."""
        own = self.grad_partitions_flat_buffer
        for param in (p for group in self.fp16_groups for p in group):
            view = self.topo.gradients.layout.slot(own[None], self.slots[param.ds_id])
            self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(view)

    def _peek(self) -> Tensor:
        self.require_states(LP_GRADS)
        return self.topo.gradients.peek()

    def _synced_slot(self, param: Any) -> Tensor:
        return self.topo.gradients.layout.slot(self._peek()[None], self.slots[param.ds_id])[0]

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[Tensor, int]:
        return self._synced_slot(param), self.grad_position[self.get_param_id(param)][0]

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        return {
            i: {j: self._synced_slot(param).float() for j, param in enumerate(group)}
            for i, group in enumerate(self.fp16_groups)
        }

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[Tensor, Any], Tensor], param_list: list[Any]
    ) -> None:
        for param in (p for p in param_list if p.requires_grad):
            full = self._fp32_state_allgather(param, self._synced_slot(param))
            self.set_fp32_grad_for_param(update_func(full, param), param)

    def set_fp32_grad_for_param(self, value: Tensor, param: Any) -> None:
        if param.requires_grad:
            self.require_states(LP_GRADS)
            self.topo.gradients.replace(self.slots[param.ds_id], value)
