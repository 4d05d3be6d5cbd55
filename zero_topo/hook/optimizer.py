# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's stage-3 optimizer on nested shards; one of the files (see ``seam.py``) that use its
private names.

DeepSpeed's flat parameter and gradient buffers become rows of our nested shards. The optimizer
step, clipping, overflow handling, ``state_dict`` and checkpoints remain DeepSpeed's code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import Tensor

from zero_topo.config import ResolvedConfig
from zero_topo.engine.stage3 import Stage3
from zero_topo.engine.state_offload import offload
from zero_topo.hook.muon import all_finite, apply_muon, check_muon
from zero_topo.hook.parts import Parts
from zero_topo.hook.passes import BackwardPasses, graph_task, module_hook
from zero_topo.hook.seam import Stock, at_boundary, empty_bucket, forget_backward, replaced
from zero_topo.hook.start import meeting_place
from zero_topo.observe.watch import watched
from zero_topo.sync import Moment

logger = logging.getLogger(__name__)

LP_PARAMS = OffloadStateTypeEnum.lp_params
LP_GRADS = OffloadStateTypeEnum.lp_grads
BUCKET = OffloadStateTypeEnum.contiguous_grad_buffer

SEVERAL_BACKWARDS = (
    "zero_topo: this step has several backward passes, each of them taken for its last, so "
    "gradients cross nodes in "
    'each: set "gradient_accumulation_steps" to their number; or run them under '
    "engine.coalesce_grad_reduction(), or "
    "call engine.set_gradient_accumulation_boundary(False) before and (True) for the last; or set "
    '"managed_gradient_accumulation": false'
)


class TopoStage3(Stock):
    """DeepSpeed's stage-3 optimizer on nested shards. It only overrides methods; :class:`Stage3`
    does the work.

    Attributes:
        topo: the shards, independent of DeepSpeed.
        param_indices: ``ds_id`` -> parameter index in its set of weights, trained or frozen.
        predicted_memory: role -> bytes at the peak of a step, as predicted; filled
            on first use.
        recorder: writes the run's folder on rank 0, if the block names one.
        stepping: whether ``step`` is running.
        offloaded_states: the states that ``offload_states`` has moved to the host.
    """

    topo: Stage3
    lp_param_buffer: Tensor
    inf_or_nan_tracker: Tensor
    fp32_partitioned_groups_flat: list[Any]
    persistent_parameters: list[Any]

    def __init__(self, *args: Any, configs: Sequence[ResolvedConfig], **kwargs: Any) -> None:
        self._configs = configs
        self._parts = Parts()
        # Whether stock's FP32 masters would be the weights themselves: edits of weights must then
        # update our masters.
        self._edits_reach_masters = False
        self.param_indices: dict[int, int] = {}
        self.stepping = False
        # Read before DeepSpeed's __init__ sets its own
        self.offloaded_states: set[OffloadStateTypeEnum] = set()
        self._passes = BackwardPasses()
        # Forward passes with gradients since the last step; whether SEVERAL_BACKWARDS was logged
        # (only once).
        self._forwards = 0
        self._hinted = False
        # The loss scale of `torch_autocast` in FP16, read once a step: DeepSpeed's own is 1 then.
        self._autocast_scale: float | None = None
        # Stock rejects Muon with `reduce_scatter`; our scatter, which this key chooses, serves it
        # too. Our scatter reads gradients in place and needs no contiguous buffer. Stock would copy
        # each gradient to that buffer on the reduction's stream, while autograd may add a second
        # part on the computation's stream.
        super().__init__(
            *args, **(kwargs | {"reduce_scatter": False, "contiguous_gradients": False})
        )
        self.reduce_scatter = True
        self._read_autocast_scale()
        # Each reloads what one call of `offload_states` has moved.
        self._reloads: list[Callable[[bool], None]] = []
        self.recorder: Any = None
        self.predicted_memory: dict[str, int] = {}
        store = meeting_place()
        self._watch = watched(store, self.topo.meter) if store else None

    def engines(self) -> list[Stage3]:
        """Return the engines: with expert parallelism also that of the experts."""
        return [part.topo for part in self._parts]

    def notes(self) -> list[str | None]:
        """Return lines for the log: which parameters do not follow the plan."""
        return [part.gathers.note() for part in self._parts]

    # -- buffers -----------------------------------------------------------------------------------

    def _create_fp16_partitions_with_defragmentation(self, fp16_param_groups: Any) -> None:
        check_muon(self.optimizer, self._configs)
        # zero.Init stores them on the host if its config has offload_param
        for param in self.module.parameters():
            param.ds_tensor.data = param.ds_tensor.data.to(get_accelerator().current_device_name())
        # DeepSpeed makes its flat buffer; ours then take its values, and it is freed.
        super()._create_fp16_partitions_with_defragmentation(fp16_param_groups)

        def scale() -> float:
            return self._autocast_scale or float(self.loss_scale)

        self._parts.build(self, self._configs, self._moments, scale)
        self.topo = self._parts.parts[0].topo
        self.param_indices = self._parts.param_indices
        # From here on DeepSpeed's flat buffers are our rows, so its views of the old buffer are
        # replaced.
        self.lp_param_buffer = self.topo.weights.own_row
        self.fp16_partitioned_groups_flat[:] = self._parts.flats()
        for sub_group in range(len(self.fp16_groups)):
            self._unflatten_partitioned_parameters(sub_group)
        for part in self._parts:
            part.topo.restart()
            part.gathers.serve(part.topo, self._write_back, partial(self.require_states, LP_PARAMS))
        self._beginning = self.module.register_forward_pre_hook(module_hook(self.forward_begins))

    def _setup_for_real_optimizer(self) -> None:
        self.topo.gradients.mode.check_optimizer(self.optimizer)
        super()._setup_for_real_optimizer()
        own = self.topo.gradients.own_row
        self.grad_partitions_flat_buffer = own
        # With optimizer offload DeepSpeed stores gradients and this tensor on the host; ours stay
        # on the accelerator.
        self.inf_or_nan_tracker = self.inf_or_nan_tracker.to(own.device)
        # DeepSpeed copies from these views to the host, and takes norms of them.
        views = {param.ds_id: self._parts.own_param_index(param) for param in self._parts.trained()}
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = views
        self._replace_masters()
        if self.offload_optimizer_pin_memory:
            self._pin_masters()

    def _replace_masters(self) -> None:
        engines = [self._parts.at(index) for index in range(len(self._parts.columns))]
        if not any(topo.separate_masters for topo in engines):
            return
        if self.optimizer.state:
            raise ValueError(
                f"{type(self.optimizer).__name__} fills its state when it is built, which "
                'zero_topo cannot replicate; use an Adam-like optimizer or "optimizer": "world"'
            )
        self._edits_reach_masters = self.masters_are_weights()
        for i, topo in enumerate(engines):
            if not topo.separate_masters:
                continue
            begin, end = self._parts.columns[i]
            stock = self.fp32_partitioned_groups_flat[i]
            rows = topo.weights.own[:, begin:end].to(stock, copy=True)
            master = rows.reshape(-1).requires_grad_()
            # DeepSpeed finds a master's swapped state by this number.
            master.ds_id = stock.ds_id  # type: ignore[attr-defined]
            if stock.grad is not None:  # optimizer offload: a buffer that each step fills
                master.grad = torch.zeros_like(master)
                if self.offload_optimizer_pin_memory:
                    master.grad = get_accelerator().pin_memory(master.grad)
            self.fp32_partitioned_groups_flat[i] = master

    def _pin_masters(self) -> None:
        """Page-lock masters on the host, which publish copies to the device, as DeepSpeed does its
        gradients there.
        """
        for master in self.fp32_partitioned_groups_flat:
            if master.device.type == "cpu":
                master.data = get_accelerator().pin_memory(master.data)

    def masters_are_weights(self) -> bool:
        """Return whether the FP32 masters are views of the weights, as stock may make them for an
        FP32 model.
        """
        weights = self.lp_param_buffer.untyped_storage().data_ptr()
        return any(
            m.untyped_storage().data_ptr() == weights for m in self.fp32_partitioned_groups_flat
        )

    def _moments(self, sub_groups: Sequence[int]) -> list[Moment]:
        """Return the momentum of an Adam-like optimizer, of sub-groups updated before."""
        found = []
        for index in sub_groups:
            master = self.fp32_partitioned_groups_flat[index]
            mean = self.optimizer.state.get(master, {}).get("exp_avg")
            if mean is not None:
                table = self._parts.at(index).masters.table(mean)
                beta = float(self._settings(index)["betas"][0])
                found.append(Moment(self._parts.columns[index][0], table, beta))
        return found

    def _settings(self, sub_group: int) -> dict[str, Any]:
        """Return the optimizer's parameter group of a sub-group."""
        group: dict[str, Any] = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group]]
        return group

    def set_grad_positions(self) -> None:
        super().set_grad_positions()
        # DeepSpeed reads and edits masters at these offsets, which must lie in the row of its own
        # layout.
        for position in self.grad_position.values():
            position[1] += self._parts.own_offset(position[0])

    def _write_back(self, param: Any) -> None:
        """Store an edit under GatheredParameters, also in our master if stock's FP32 master is the
        weight itself.
        """
        topo = self._parts.of(param)
        weights = self._parts.weights_of(param)
        param_index = self.param_indices[param.ds_id]
        if not self._edits_reach_masters or weights is not topo.weights:
            weights.write_back(param_index, param.data)
            return
        rows = weights.layout.parameter(weights.own, param_index)
        # `rows` is a view that changes: the copy shows afterwards which elements were edited
        before = rows.clone()
        weights.write_back(param_index, param.data)
        group, begin, _ = self._master_columns(param)
        topo.masters.follow(self.fp32_partitioned_groups_flat[group], begin, rows, rows != before)

    def _master_columns(self, param: Any) -> tuple[int, int, int]:
        """Return the sub-group, first column and width of a parameter in the table of masters."""
        group, offset, width = self.grad_position[self.get_param_id(param)]
        return group, offset - self._parts.own_offset(group), width

    # -- backward pass -----------------------------------------------------------------------------

    def backward_prologue(self) -> None:
        """Record that a backward pass of the engine begins: DeepSpeed 0.18.3 and later call this
        from a hook in it.
        """
        self._passes.begin(outer=True)  # before any gradient
        super().backward_prologue()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass of the engine: DeepSpeed before 0.18.3 calls this."""
        self._passes.begin(outer=True)
        super().backward(loss, *args, **kwargs)

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """Put a gradient into the bucket, unless it is there already (Note [Zeroed, then
        added]).
        """
        self.require_states(LP_GRADS, BUCKET)
        self._passes.add()
        if not any(
            param is waiting for bucket in self.ipg_buckets.values() for waiting in bucket.params
        ):
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
        elif not get_accelerator().is_synchronized_device():
            # The stream that scatters the bucket waits for autograd's addition, as it did for the
            # first part.
            self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self,
        params_to_reduce: list[Any],
        communication_data_type: torch.dtype,
    ) -> None:
        # DeepSpeed calls this on its reduction's stream, once for each full bucket.
        param_indices = [self.param_indices[p.ds_id] for p in params_to_reduce]
        # With optimizer offload all of sync runs in the step, which copies the result to the host.
        last = self._passes.outer and at_boundary(self) and not self.offload_optimizer
        grads = [p.grad for p in params_to_reduce]
        # A bucket has parameters of one process group.
        gradients = self._parts.of(params_to_reduce[0]).gradients
        repeated = gradients.scatter(param_indices, grads, last, communication_data_type)
        # Several forward passes before a step, each reduced as the last: a sum crosses nodes again.
        if repeated and self._forwards > 1 and not self._hinted:
            self._hinted = True
            plan = self.topo.config.plan
            if dist.get_rank() == 0 and plan.gradients < plan.world_size:
                logger.warning(SEVERAL_BACKWARDS)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: None) -> list[Tensor]:
        for param in params_to_release:
            # DeepSpeed scatters on a separate stream
            if not get_accelerator().is_synchronized_device():
                # Autograd allocated it on the computation's stream, to which its memory returns.
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def independent_gradient_partition_epilogue(self) -> None:
        """Finish a backward pass, or a part of it."""
        with self._passes.epilogue():
            super().independent_gradient_partition_epilogue()
            self._parts.finish_scatter()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._forwards = 0
        # DeepSpeed's step calls this before the masters have read the gradients
        if not self.stepping:
            for bucket in self.ipg_buckets.values():
                self.partition_grads(bucket.params, None)
                empty_bucket(bucket)
            forget_backward(self)
            self._passes.forget()
            for part in self._parts:
                part.topo.gradients.zero()
        super().zero_grad(set_to_none)

    def forward_begins(self, args: tuple[Any, ...]) -> None:
        """Drop the gradients of a backward pass that failed half-way (out of memory, caught) before
        a forward pass.
        """
        for part in self._parts:
            part.gathers.warn_of_unfrozen()
        if graph_task() != -1:  # a recomputation inside a backward pass
            return
        self._forwards += torch.is_grad_enabled()
        half = self._passes.failed()
        if half:
            if dist.get_rank() == 0:
                logger.warning(
                    "zero_topo: a backward pass did not end; all gradients since the last step are "
                    "dropped"
                )
            self.zero_grad()

    # -- step --------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        if self._passes.failed():
            raise RuntimeError(
                "the backward pass did not end, so its gradients are not whole: repeat the "
                "micro-batches since the "
                "last step, or drop their gradients with optimizer.zero_grad()"
            )
        self.require_states()
        if self._passes.unreduced:
            # No epilogue came: the pass ran inside a forward pass, or torch.autograd.grad of the
            # engine's output had used up DeepSpeed's hook. The gradients are whole, and unmodified
            # DeepSpeed would drop them.
            self.independent_gradient_partition_epilogue()
        self.stepping = True
        try:
            self._parts.sync()
            self._parts.track_overflow(self.inf_or_nan_tracker)
            # DeepSpeed checks for overflow on this stream
            if not get_accelerator().is_synchronized_device():
                self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())
            if self.offload_optimizer:
                self._copy_gradients_to_host()
            super().step(closure)
        finally:
            self.stepping = False
        # DeepSpeed leaves them partitioned after a skipped step
        if self.overflow and self.persistent_parameters:
            self.persistent_parameters[0].all_gather(self.persistent_parameters)
        self._parts.end_step(self.overflow, self.fp32_partitioned_groups_flat)
        self._read_autocast_scale()

    def _read_autocast_scale(self) -> None:
        if self.torch_autocast_gradscaler is not None:
            self._autocast_scale = float(self.torch_autocast_gradscaler.get_scale())

    def _copy_gradients_to_host(self) -> None:
        """Fill the host gradients and their norms for optimizer offload, in place of DeepSpeed's
        own reduction.
        """
        for i, master in enumerate(self.fp32_partitioned_groups_flat):
            rows = self._parts.gradient_rows(i)
            grad = master.grad
            grad.copy_(rows.to(grad.dtype).reshape(-1), non_blocking=True)
        if not get_accelerator().is_synchronized_device():  # the host reads the copies
            get_accelerator().current_stream().synchronize()
        self.note_norms()

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        if not self._parts.at(sub_group_id).separate_masters:
            return super()._prepare_fp32_grad_for_sub_group(sub_group_id)
        rows = self._parts.gradient_rows(sub_group_id)
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        master.grad = rows.to(master.dtype, copy=True).reshape(-1)
        # As DeepSpeed does: these views have been read.
        self.averaged_gradients[sub_group_id] = None

    def _optimizer_step(self, sub_group_id: int) -> None:
        begin, _ = self._parts.columns[sub_group_id]
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        rate = self._settings(sub_group_id)["lr"]
        with self._parts.at(sub_group_id).watched(master, begin, rate):
            super()._optimizer_step(sub_group_id)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        # DeepSpeed calls this after each sub-group's update, to copy its masters to the weights.
        topo = self._parts.at(sub_group_id)
        rows = topo.masters.table(self.fp32_partitioned_groups_flat[sub_group_id].detach())
        param_indices = [
            self.param_indices[param.ds_id] for param in self.fp16_groups[sub_group_id]
        ]
        topo.weights.update(rows, range(param_indices[0], param_indices[-1] + 1))

    # -- Muon --------------------------------------------------------------------------------------

    def _create_momentum_buffer(self, num_elements: int, i: int, ds_id: str) -> None:
        """Do nothing: :meth:`_momentum` creates it, for all rows of the optimizer shard."""

    def _momentum(self, sub_group: int) -> Tensor:
        """Return the momentum of a sub-group, ``[N / O, columns]``, FP32, on the device of its
        masters.
        """
        master = self.fp32_partitioned_groups_flat[sub_group]
        state = self.optimizer.state[master]
        # A load gives it the dtype that the file has.
        momentum = state.get("momentum_buffer")
        if momentum is None:
            momentum = torch.zeros_like(master, requires_grad=False)
        state["momentum_buffer"] = momentum = momentum.to(torch.float32)
        return self.topo.masters.table(momentum)

    def _apply_muon_to_accumulated_grads(self) -> None:
        """Replace synced gradients of Muon's matrices by the updates; stock calls this before it
        computes the norm.
        """
        if not self.use_muon:
            return
        finite = all_finite(self.topo)
        for i, group in enumerate(self.fp16_groups):
            settings = self._settings(i)
            if settings["use_muon"]:
                self.sub_groups_lacking_loss_scale.add(i)
                params = {self.param_indices[param.ds_id]: param for param in group}
                rows = self._parts.gradient_rows(i)
                apply_muon(self.topo, rows, self._momentum(i), params, settings, finite)
        if self.offload_optimizer:
            self._copy_gradients_to_host()

    # -- masters edited by the user (safe_set_*) ---------------------------------------------------

    def set_full_hp_param(
        self,
        value: Tensor,
        param: Any,
        optim_state_key: str | None = None,
    ) -> None:
        self._parts.finish()  # publish reads the masters
        super().set_full_hp_param(value, param, optim_state_key)
        self._share_edit(param, optim_state_key)

    def set_local_hp_param(
        self,
        value: Tensor,
        param: Any,
        optim_state_key: str | None = None,
    ) -> None:
        self._parts.finish()
        super().set_local_hp_param(value, param, optim_state_key)
        self._share_edit(param, optim_state_key)

    def _share_edit(self, param: Any, optim_state_key: str | None) -> None:
        """Send an edited master or optimizer state to the ranks that store replicas of it.
        Collective.
        """
        if not param.requires_grad:
            return
        group, begin, width = self._master_columns(param)
        master = self.fp32_partitioned_groups_flat[group]
        flat = master if optim_state_key is None else self.optimizer.state[master][optim_state_key]
        topo = self._parts.of(param)
        topo.masters.share(flat, begin, width)
        if optim_state_key is None and self.masters_are_weights():
            self.require_states(LP_PARAMS)
            param_index = self.param_indices[param.ds_id]
            topo.weights.publish_world(range(param_index, param_index + 1))

    # -- gradients seen by the user (safe_get_*, safe_set_*) ---------------------------------------

    def _get_norm_groups(self) -> list[Tensor]:
        if not self.stepping:  # a user's call: gradients are neither synced nor on the host yet
            self._peek()
            if self.offload_optimizer:
                self.note_norms()
        return super()._get_norm_groups()

    def get_grad_norm_direct(
        self, gradients: list[Tensor], params: list[Any], norm_type: float = 2
    ) -> Tensor:
        """Return the norm of a sub-group. Its gradients are neighbours in the own row, so two
        kernels take the place of two for each.
        """
        # With tensor parallelism DeepSpeed counts replicated parameters on one rank alone.
        counted_alike = len({is_model_parallel_parameter(param) for param in params}) == 1
        if norm_type == 2 and counted_alike:
            gradients = [
                self._parts.own_gradient(self.grad_position[self.get_param_id(params[0])][0])
            ]
        return super().get_grad_norm_direct(gradients, params, norm_type)

    def note_norms(self) -> None:
        """Set the norms of the own part of each gradient, as DeepSpeed's reduction does for
        optimizer offload.
        """
        for param in self._parts.trained():
            norm = self._constant_buffered_norm2(self._parts.own_param_index(param))
            self.norm_for_param_grads[self.get_param_id(param)] = norm

    def _peek(self, write: bool = False) -> None:
        self.require_states(LP_GRADS)
        for part in self._parts:
            part.topo.gradients.peek(write)

    def _synced_param(self, param: Any, write: bool = False) -> Tensor:
        self._peek(write)
        return self._parts.own_param_index(param)

    def _get_fp32_grad_state_partition(
        self,
        param: Any,
        release_swap_buffers: bool,
    ) -> tuple[Tensor, int]:
        # DeepSpeed keeps its swap buffers if it is going to write.
        gradient = self._synced_param(param, write=not release_swap_buffers)
        return gradient, self.grad_position[self.get_param_id(param)][0]

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        found = {}
        for i, group in enumerate(self.fp16_groups):
            found[i] = {j: self._synced_param(param).float() for j, param in enumerate(group)}
        return found

    def update_fp32_grad_for_param_vectorized(
        self,
        update_func: Callable[[Tensor, Any], Tensor],
        param_list: list[Any],
    ) -> None:
        for param in (p for p in param_list if p.requires_grad):
            full = self._fp32_state_allgather(param, self._synced_param(param))
            self.set_fp32_grad_for_param(update_func(full, param), param)

    def set_fp32_grad_for_param(self, value: Tensor, param: Any) -> None:
        if param.requires_grad:
            self.require_states(LP_GRADS)
            self._parts.of(param).gradients.replace(self.param_indices[param.ds_id], value)

    # -- offload_states and reload_states: shards on the host between uses -------------------------

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to the host, as stock does (Note [Emptied storages]). Collective: it finishes
        publish first.

        Args:
            include: the kinds; None is all. Gradients include the state of sync, weights their
                secondary copies.
            device: the CPU.
            pin_memory: whether copies are page-locked.
            non_blocking: ignored: copies are queued together, and the host waits for all before it
                frees memory.
        """
        kinds = [kind for kind in OffloadStateTypeEnum if include is None or kind in include]
        kinds = [kind for kind in kinds if kind not in self.offloaded_states]
        self._parts.settle()
        self.empty_partition_cache()  # while the shards still exist
        engines = self.engines()
        stored: dict[OffloadStateTypeEnum, list[Tensor]] = {
            OffloadStateTypeEnum.optim_states: self.optimizer_tensors(),
            OffloadStateTypeEnum.hp_params: self.fp32_partitioned_groups_flat,
            LP_PARAMS: [
                *chain.from_iterable(topo.weight_tensors() for topo in engines),
                self.lp_param_buffer,
                *self.fp16_partitioned_groups_flat,
                *(param.ds_tensor for param in self.module.parameters()),
            ],
            LP_GRADS: [
                *chain.from_iterable(topo.gradients.tensors() for topo in engines),
                self.grad_partitions_flat_buffer,
            ],
        }
        # Views and their bases: a storage is moved once, and all views follow it.
        tensors = [tensor for kind in kinds for tensor in stored.get(kind, ())]
        self._reloads.append(offload(tensors, self.topo.like.device, pin_memory))
        super().offload_states(
            [kind for kind in kinds if kind is BUCKET], device, pin_memory, non_blocking
        )
        self.offloaded_states.update(kinds)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Copy all states back to the accelerator.

        Args:
            non_blocking: only queue the copies.
        """
        # Newest first: a later call may have moved views of what an earlier one left.
        while self._reloads:
            self._reloads.pop()(non_blocking)
        self.offloaded_states.intersection_update({BUCKET})
        super().reload_states(non_blocking)

    def require_states(self, *kinds: OffloadStateTypeEnum) -> None:
        """Raise RuntimeError if one of these states, by default any, is on the host."""
        wanted = kinds or OffloadStateTypeEnum
        away = [kind.value for kind in wanted if kind in self.offloaded_states]
        if away:
            raise RuntimeError(
                f"offload_states moved {', '.join(away)} to the host: call engine.reload_states() "
                "first"
            )

    def checkpoint_event_prologue(self) -> None:
        """Finish publish before DeepSpeed saves or loads a checkpoint, which reads or fills the
        weights. Collective.
        """
        self.require_states()
        self._parts.finish()
        super().checkpoint_event_prologue()

    def optimizer_tensors(self) -> list[Tensor]:
        """Return the optimizer's state tensors, without scalars."""
        values = chain.from_iterable(state.values() for state in self.optimizer.state.values())
        return [value for value in values if isinstance(value, Tensor) and value.dim()]

    # -- checkpoints -------------------------------------------------------------------------------

    @contextmanager
    def _stock_layout(self, share: bool) -> Iterator[None]:
        """Present masters and optimizer states in DeepSpeed's layout, one world shard per rank,
        within the context.
        """
        masters = self.fp32_partitioned_groups_flat
        with (
            self._parts.narrowed(masters, self.optimizer, share) as narrow,
            replaced(self, "fp32_partitioned_groups_flat", narrow),
        ):
            yield

    def _rigid_state_dict(self) -> dict[str, Any]:
        with self._stock_layout(share=False):
            return super()._rigid_state_dict() | self._parts.state_dict()

    def load_state_dict(self, state_dict_list: Any, *args: Any, **kwargs: Any) -> None:
        with self._stock_layout(share=True):
            super().load_state_dict(state_dict_list, *args, **kwargs)
            # The padding is whatever a file had; it may set the scale of a block.
            self._parts.clean(self.fp32_partitioned_groups_flat, self.optimizer.state)
        own = state_dict_list[self.topo.mesh.rank] if isinstance(state_dict_list, list) else None
        folder = kwargs.get("checkpoint_folder")
        self._parts.load_state_dict(
            own or {}, folder, self.fp32_partitioned_groups_flat, self.optimizer
        )

    def _restore_from_bit16_weights(self) -> None:
        numels = [master.numel() for master in self.fp32_partitioned_groups_flat]
        # Masters of one row, always or during a load
        if numels == self.fp16_partitioned_groups_flat_numel:
            return super()._restore_from_bit16_weights()
        for i, (begin, end) in enumerate(self._parts.columns):
            topo = self._parts.at(i)
            rows = topo.masters.table(self.fp32_partitioned_groups_flat[i].detach())
            rows.copy_(topo.weights.own[:, begin:end])

    def destroy(self) -> None:
        if self.recorder:
            self.recorder.close()
        if self._watch:
            self._watch.close()
        self._beginning.remove()
        # Before anything is freed: after an exception collectives may still be in progress
        self._parts.settle()
        for part in self._parts:
            part.gathers.release()  # behind `settle`: another engine may take over the weights
        super().destroy()
        self._parts.destroy()
        # DeepSpeed's caches keep a destroyed optimizer alive; this frees our groups, shards and the
        # views of gradients.
        del self.grad_partitions_flat_buffer
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.clear()
        self.averaged_gradients.clear()
        del self._beginning, self.topo
