# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How the engine gets into DeepSpeed; one of the five files (see ``seam.py``) that name its privates.

Note [The seam]
    ``DeepSpeedEngine._configure_zero_optimizer`` imports the stage-3 class by name; for the length of that call, and
    only for a config with a ``zero_topo`` block, the name means :class:`TopoStage3`. Everything else is overriding:
    DeepSpeed's flat parameter and gradient buffers become rows of our nested shards, so the optimizer step, clipping,
    overflow handling, ``state_dict`` and checkpoints stay DeepSpeed's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import accumulate, pairwise
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3 as ds_stage3
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import log_dist
from torch import Tensor

from zero_topo.config import ResolvedConfig, deepspeed_hints
from zero_topo.engine.frozen import Frozen
from zero_topo.engine.hook_gradients import GradientHooks
from zero_topo.engine.hook_offload import LP_PARAMS
from zero_topo.engine.initialize import checked_first, seed_everything
from zero_topo.engine.loading import loading_together
from zero_topo.engine.log import show_log, tell
from zero_topo.engine.masters import clean
from zero_topo.engine.monitor import report
from zero_topo.engine.parameters import ParameterGathers, by_owner
from zero_topo.engine.saving import copying_beside, saving_beside
from zero_topo.engine.seam import Stock, check_deepspeed, has
from zero_topo.engine.stage3 import Setup, Shards, Stage3
from zero_topo.engine.start import agreed, check_order, meeting, meeting_place
from zero_topo.engine.watch import watched
from zero_topo.sync import OPTIMIZERS, AgedAdamW, Moment


def install() -> None:
    """Install the hook once; later calls do nothing.

    Raises:
        ImportError: if this DeepSpeed lacks what the hook relies on.
    """
    if getattr(DeepSpeedEngine, "_zero_topo_hook", False):
        return
    check_deepspeed()
    DeepSpeedEngine._zero_topo_hook = True
    DeepSpeedEngine._configure_distributed_model = meeting(DeepSpeedEngine._configure_distributed_model)
    DeepSpeedEngine._configure_zero_optimizer = _choosing_class(DeepSpeedEngine._configure_zero_optimizer)
    DeepSpeedEngine.load_module_state_dict = _loading(DeepSpeedEngine.load_module_state_dict)
    DeepSpeedEngine._get_param_fragment_func = _cut_out(DeepSpeedEngine._get_param_fragment_func)
    DeepSpeedEngine.load_checkpoint = loading_together(DeepSpeedEngine.load_checkpoint)
    DeepSpeedEngine.save_checkpoint = saving_beside(DeepSpeedEngine.save_checkpoint)
    DeepSpeedEngine._copy_recovery_script = copying_beside(DeepSpeedEngine._copy_recovery_script)
    ZERO_SUPPORTED_OPTIMIZERS.extend(OPTIMIZERS.values())
    deepspeed.initialize = checked_first(deepspeed.initialize)
    Init.__init__ = checked_first(Init.__init__)
    Init._convert_to_deepspeed_param = by_owner(Init._convert_to_deepspeed_param)


def _choosing_class(configure: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(configure)
    def wrapper(engine: Any, optimizer: Any) -> Any:
        resolved = agreed(engine, optimizer)
        if resolved is None:
            return configure(engine, optimizer)
        hints = [] if get_accelerator().is_synchronized_device() else deepspeed_hints(engine._config._param_dict)
        rank = dist.get_rank()
        show_log(rank)
        tell(rank, [*resolved.log_lines(), *hints])
        ds_stage3.DeepSpeedZeroOptimizer_Stage3 = partial(TopoStage3, resolved=resolved)
        try:
            built = configure(engine, optimizer)
        finally:
            ds_stage3.DeepSpeedZeroOptimizer_Stage3 = Stock
        if not isinstance(built, TopoStage3):
            tell(rank, ["this engine has no optimizer: unmodified ZeRO-3 gathers its weights"])
        else:
            tell(rank, filter(None, [built.frozen.note(), *built.topo.notes()]))
            report(engine, built.topo, log_dist, deepspeed.comm.comms_logger)
        seed_everything(resolved.seed, rank)
        return built

    return wrapper


def _loading(load: Callable[..., None]) -> Callable[..., None]:
    """DeepSpeed's ``load``, which fills each rank's own shards of frozen parameters, then shared with the others."""

    @wraps(load)
    def wrapper(engine: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        ours = isinstance(engine.optimizer, TopoStage3)
        if ours:
            trained = [param for group in engine.optimizer.fp16_groups for param in group]
            check_order(checkpoint, [engine.param_names[param] for param in trained], engine.device)
        load(engine, checkpoint, *args, **kwargs)
        if ours:
            engine.optimizer.topo.restart_frozen()

    return wrapper


def _cut_out(fragment: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """DeepSpeed's ``fragment``, a frozen shard to be saved, without the storage that it is a view of on a CPU."""

    @wraps(fragment)
    def wrapper(engine: Any, param: Any) -> Tensor:
        found = fragment(engine, param)
        return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()

    return wrapper


class TopoStage3(GradientHooks):
    """DeepSpeed's stage-3 optimizer on nested shards. Overrides only; the work is done by :class:`Stage3`."""

    lp_param_buffer: Tensor
    inf_or_nan_tracker: Tensor
    fp32_partitioned_groups_flat: list[Any]
    persistent_parameters: list[Any]

    def __init__(self, *args: Any, resolved: ResolvedConfig, **kwargs: Any) -> None:
        self._topo_config = resolved
        self._edits_reach_masters = False
        super().__init__(*args, **kwargs)
        store = meeting_place()
        self._watch = watched(store, self.topo.meter) if store else None

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _create_fp16_partitions_with_defragmentation(self, fp16_param_groups: Any) -> None:
        if has("use_muon") and self.use_muon:
            raise ValueError("Muon needs whole gradient matrices that no rank of zero_topo holds; use Adam or AdamW")
        for param in self.module.parameters():  # zero.Init puts them on the host if its config has offload_param
            param.ds_tensor.data = param.ds_tensor.data.to(get_accelerator().current_device_name())
        super()._create_fp16_partitions_with_defragmentation(fp16_param_groups)
        params = [param for group in self.fp16_groups for param in group]
        self.slots = {param.ds_id: index for index, param in enumerate(params)}
        self.frozen = Frozen(self.module.parameters(), self.slots, self.param_names, self.lp_param_buffer.dtype)
        setup = Setup(
            numels=tuple(param.ds_numel for param in params),
            names=tuple(str(self.param_names.get(param, index)) for index, param in enumerate(params)),
            dims=tuple(len(param.ds_shape) for param in params),
            persistent=tuple(bool(param.ds_persist) for param in params),
            like=self.lp_param_buffer.new_empty(0),  # of the old buffer nothing may stay
            scatter_dtype=self.communication_data_type,
            accumulation_dtype=self.gradient_accumulation_dtype,
            bucket_numel=self.reduce_bucket_size,
            loss_scale=lambda: float(self.loss_scale),
            moments=self._moments,
            frozen=self.frozen.shapes,
            order=tuple(param.ds_id for param in params),  # counted as modules make them
        )
        self.topo = Stage3(self._topo_config, setup)
        row = self.topo.weights.own_row
        row.copy_(self.lp_param_buffer)
        # DeepSpeed's flat buffer is our row from here on: what it cut from the old one is cut again.
        self.lp_param_buffer = row
        self.fp16_partitioned_groups_flat.clear()
        self._set_fp16_partitioned_groups_flat()
        for sub_group in range(len(self.fp16_groups)):
            self._unflatten_partitioned_parameters(sub_group)
        self.topo.restart()
        served: list[tuple[Shards, dict[int, int]]] = [(self.topo.weights, self.slots)]
        if self.topo.frozen is not None:
            self.frozen.move(self.topo.frozen)
            self.topo.restart_frozen()
            served.append((self.topo.frozen, self.frozen.slots))
        require = partial(self.require_states, LP_PARAMS)
        self._gathers = ParameterGathers(self.topo, served, self._write_back, require, self._in_forward)
        self._gathers.adopt(self.module.parameters())
        self._beginning = self.module.register_forward_pre_hook(self.forward_begins)

    def _in_forward(self) -> bool:
        return bool(getattr(self.module._parameters, "_in_forward", False))  # of DeepSpeed's own kind of dictionary

    def _setup_for_real_optimizer(self) -> None:
        self.topo.gradients.mode.check_optimizer(self.optimizer)
        super()._setup_for_real_optimizer()
        gradients = self.topo.gradients
        own = gradients.own_row
        self.grad_partitions_flat_buffer = own
        # With optimizer offload DeepSpeed keeps gradients, and this, on the host; ours stay on the accelerator.
        self.inf_or_nan_tracker = self.inf_or_nan_tracker.to(own.device)
        views = {ds_id: gradients.layout.slot(own[None], index)[0] for ds_id, index in self.slots.items()}
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = views
        if self.topo.separate_masters:
            self._replace_masters()

    def _replace_masters(self) -> None:
        self.topo.masters.check_optimizer(self.optimizer)
        self._edits_reach_masters = self.masters_are_weights()
        for i, (begin, end) in enumerate(self._sub_group_columns()):
            stock = self.fp32_partitioned_groups_flat[i]
            master = self.topo.masters.build(self.topo.weights.optimizer_rows()[:, begin:end], stock)
            master.ds_id = stock.ds_id  # type: ignore[attr-defined]
            if stock.grad is not None:  # optimizer offload: a buffer that each step fills
                grad = torch.zeros_like(master)
                master.grad = get_accelerator().pin_memory(grad) if self.offload_optimizer_pin_memory else grad
            self.fp32_partitioned_groups_flat[i] = master

    def masters_are_weights(self) -> bool:
        """Whether the FP32 masters are views of the weights, as stock may make them for an FP32 model."""
        weights = self.lp_param_buffer.untyped_storage().data_ptr()
        return any(m.untyped_storage().data_ptr() == weights for m in self.fp32_partitioned_groups_flat)

    def _moments(self) -> list[Moment]:
        groups = [self.optimizer.param_groups[group] for _, group in sorted(self.sub_group_to_group_id.items())]
        begins = [begin for begin, _ in self._sub_group_columns()]
        return self.topo.masters.moments(self.optimizer.state, self.fp32_partitioned_groups_flat, begins, groups)

    def _sub_group_columns(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.fp16_partitioned_groups_flat_numel, initial=0)))

    def set_grad_positions(self) -> None:
        super().set_grad_positions()
        # DeepSpeed reads and edits masters at these offsets: they must fall into the row that it knows.
        for position in self.grad_position.values():
            position[1] += self.topo.masters.own_row * self.fp16_partitioned_groups_flat_numel[position[0]]

    def _write_back(self, param: Any) -> None:
        """An edit under GatheredParameters; where stock's FP32 master is the parameter itself, ours follows too."""
        if self.topo.frozen is not None and param.ds_id in self.frozen.slots:
            self.topo.frozen.write_back(self.frozen.slots[param.ds_id], param.data)
            return
        weights, slot = self.topo.weights, self.slots[param.ds_id]
        if not self._edits_reach_masters:
            weights.write_back(slot, param.data)
            return
        rows = weights.layout.slot(weights.optimizer_rows(), slot)
        before = rows.clone()  # a view of what is written: only a copy tells afterwards which elements were edited
        weights.write_back(slot, param.data)
        group, begin, _ = self._master_columns(param)
        self.topo.masters.follow(self.fp32_partitioned_groups_flat[group], begin, rows, rows != before)

    def _master_columns(self, param: Any) -> tuple[int, int, int]:
        """Sub-group, first column and width of a parameter in the table of masters."""
        group, offset, width = self.grad_position[self.get_param_id(param)]
        return group, offset - self.topo.masters.own_row * self.fp16_partitioned_groups_flat_numel[group], width

    # -- step ------------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        self.refuse_half_a_backward()
        self.require_states()
        self.stepping = True
        try:
            self.topo.gradients.sync()
            if not get_accelerator().is_synchronized_device():  # where DeepSpeed looks for overflow
                self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())
            if self.offload_optimizer:
                self._copy_gradients_to_host()
            super().step(closure)
        finally:
            self.stepping = False
        if self.overflow and self.persistent_parameters:  # DeepSpeed leaves them partitioned after a skipped step
            self.persistent_parameters[0].all_gather(self.persistent_parameters)
        self.topo.end_step(skipped=self.overflow)

    def _copy_gradients_to_host(self) -> None:
        """What DeepSpeed's own reduction would have done for optimizer offload: host gradients, and their norms."""
        rows = self.topo.gradients.optimizer_rows()
        for i, (begin, end) in enumerate(self._sub_group_columns()):
            grad = self.fp32_partitioned_groups_flat[i].grad
            grad.copy_(rows[:, begin:end].to(grad.dtype).reshape(-1), non_blocking=True)
        if not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().synchronize()
        self.note_norms()

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        if not self.topo.separate_masters:
            return super()._prepare_fp32_grad_for_sub_group(sub_group_id)
        begin, end = self._sub_group_columns()[sub_group_id]
        rows = self.topo.gradients.optimizer_rows()[:, begin:end]
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        master.grad = rows.to(master.dtype, copy=True).reshape(-1)
        self.averaged_gradients[sub_group_id] = None  # as DeepSpeed does: views of the buffer, which is read already

    def _optimizer_step(self, sub_group_id: int) -> None:
        begin, _ = self._sub_group_columns()[sub_group_id]
        rate = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]["lr"]
        with self.topo.watched(self.fp32_partitioned_groups_flat[sub_group_id], begin, rate):
            super()._optimizer_step(sub_group_id)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        weights, (begin, end) = self.topo.weights, self._sub_group_columns()[sub_group_id]
        rows = self.topo.masters.table(self.fp32_partitioned_groups_flat[sub_group_id].detach())
        slots = [self.slots[param.ds_id] for param in self.fp16_groups[sub_group_id]]
        if weights.needs_masters:
            weights.publish(range(slots[0], slots[-1] + 1), rows)
            return
        if self.topo.separate_masters:
            weights.optimizer_rows()[:, begin:end].copy_(rows.to(self.topo.publish_dtype))
        else:
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        weights.publish(range(slots[0], slots[-1] + 1))

    # -- masters edited by the user (safe_set_*) -------------------------------------------------------------------

    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        self.topo.weights.finish()  # publish reads the masters
        super().set_full_hp_param(value, param, optim_state_key)
        self._share_edit(param, optim_state_key)

    def set_local_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        self.topo.weights.finish()
        super().set_local_hp_param(value, param, optim_state_key)
        self._share_edit(param, optim_state_key)

    def _share_edit(self, param: Any, optim_state_key: str | None) -> None:
        """Bring an edited master or optimizer state to the ranks that hold copies of it. Collective."""
        if not param.requires_grad:
            return
        group, begin, width = self._master_columns(param)
        master = self.fp32_partitioned_groups_flat[group]
        flat = master if optim_state_key is None else self.optimizer.state[master][optim_state_key]
        self.topo.masters.share(flat, begin, width)
        if optim_state_key is None and self.masters_are_weights():
            self.require_states(LP_PARAMS)
            self.topo.weights.publish_world(self.slots[param.ds_id])

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @contextmanager
    def _stock_layout(self, share: bool) -> Iterator[None]:
        """Masters and optimizer states in DeepSpeed's own layout, one world shard per rank."""
        whole = self.fp32_partitioned_groups_flat
        try:
            with self.topo.masters.narrowed(whole, self.optimizer, share) as narrow:
                self.fp32_partitioned_groups_flat = narrow
                yield
        finally:
            self.fp32_partitioned_groups_flat = whole

    def _rigid_state_dict(self) -> dict[str, Any]:
        with self._stock_layout(share=False):
            return super()._rigid_state_dict() | self.topo.state_dict()

    def load_state_dict(self, state_dict_list: Any, *args: Any, **kwargs: Any) -> None:
        with self._stock_layout(share=True):
            super().load_state_dict(state_dict_list, *args, **kwargs)
            clean(self.topo.layout, self.fp32_partitioned_groups_flat, self.optimizer.state)
        # DeepSpeed filled it from the masters: rounded as publish does, the run goes on with the weights it had.
        self.lp_param_buffer.copy_(self.lp_param_buffer.to(self.topo.publish_dtype))
        own = state_dict_list[dist.get_rank()] if isinstance(state_dict_list, list) else None
        ages = self.topo.load_state_dict(own or {}, kwargs.get("checkpoint_folder"))
        if ages is not None and isinstance(self.optimizer, AgedAdamW):
            for master, (begin, end) in zip(self.fp32_partitioned_groups_flat, self._sub_group_columns(), strict=True):
                self.optimizer.state[master]["age"] = ages[:, begin:end].reshape(-1).to(master.device)
        masters = [self.topo.masters.table(m.detach()) for m in self.fp32_partitioned_groups_flat]
        own_row = torch.cat([table[self.topo.masters.own_row] for table in masters])
        self.topo.restart(own_row.to(self.lp_param_buffer.device, torch.float32))

    def _restore_from_bit16_weights(self) -> None:
        narrow = self.fp32_partitioned_groups_flat[0].numel() == self.fp16_partitioned_groups_flat_numel[0]
        if narrow:  # one row each, always or for the length of a load
            return super()._restore_from_bit16_weights()
        for master, (begin, end) in zip(self.fp32_partitioned_groups_flat, self._sub_group_columns(), strict=True):
            rows = self.topo.weights.optimizer_rows()[:, begin:end]
            self.topo.masters.table(master.detach()).copy_(rows)

    def destroy(self) -> None:
        if self._watch:
            self._watch.close()
        self._beginning.remove()
        self._gathers.release()
        self.topo.settle()  # before anything is taken apart: an exception may have come with collectives under way
        super().destroy()
        self.topo.destroy()
        del (
            self._gathers,
            self._beginning,
            self.topo,
        )  # DeepSpeed's caches keep a destroyed optimizer alive: not our groups and shards


install()  # importing this module is enough, whichever import of DeepSpeed comes first
