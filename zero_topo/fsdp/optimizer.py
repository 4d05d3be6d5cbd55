# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The optimizer of a model on FSDP2: it syncs gradients, updates its part, sends the weights.

A step
    1. In each backward pass FSDP2 reduces a module's gradients to its shards, and calls a hook for
       each parameter. The hook moves the gradient to the gradient shard ``[N / W, F]`` of
       :class:`~zero_topo.engine.gradients.Gradients`, so FSDP2 stores none. In the last backward
       pass of a step sync starts as soon as a run of parameters is complete.
    2. At the end of that pass the runs are waited for, on a GPU by its stream alone. ``param.grad``
       is then this rank's part of the gradient over the whole job, a DTensor of the parameter's
       shape, on the mesh of optimizer states. Clipping by torch, or anything else that reads or
       changes ``param.grad`` in place, therefore just works.
    3. :meth:`ShardedOptimizer.step` updates FP32 masters of the part, and sends them to all ranks
       that store the shard.

The last backward pass
    Every backward pass counts as the last of its step unless FSDP2's own
    ``set_is_last_backward(False)`` or ``set_requires_all_reduce(False)`` was called on the root
    module. Another backward pass before the step takes ``param.grad`` back and adds to it; its sync
    then sends only what is new.

Checkpoints
    The state dict has DTensors of the parameters' shapes, which torch's checkpoints save, and load
    on other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from zero_topo.collectives.queue import OrderedQueue
from zero_topo.config.sparse_config import OkTopkSync
from zero_topo.engine.agreement import check_replicas
from zero_topo.engine.gradients import Gradients
from zero_topo.engine.shards import Layout
from zero_topo.fsdp.host import Host, no_optimizer, own_parameters, sharded_modules
from zero_topo.fsdp.parts import Part
from zero_topo.fsdp.publish import Publisher
from zero_topo.fsdp.residuals import summed_residuals
from zero_topo.plan import packed_runs
from zero_topo.quant.operands import DTYPES, FLOATS, way_to_floats
from zero_topo.quant.ops import cast_to
from zero_topo.sync import Moment, Parameter, SyncContext, build_mode

MASTER = "zero_topo_master"
PUBLISHED = "zero_topo_published"
RESIDUAL = "zero_topo_residual"
"""Entries of a state dict that torch's own optimizers do not have: FP32 weights, the weights that
belong to them if these are not their rounded values, and the residual of sync.
"""


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer with the parameters of the model, whose states are sharded.

    Learning rates, schedulers, ``zero_grad``, and ``get_state_dict`` of torch's checkpoints work on
    it as on any other.

    Args:
        kind: the optimizer that updates the parts.
        host: the attached model.
        params: its parameters, or groups of them.
        settings: of ``kind``.

    Attributes:
        host: the attached model.
        inner: the optimizer of the parts, of ``kind``.
        parts: by parameter, this rank's part.
        gradients: the gradient shard and the mode of sync.
        publisher: the post-step all-gather.
        passes: backward passes of the last step.
        formula: bytes of the last step by the formulas.
    """

    def __init__(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        host: Host,
        params: Sequence[Any],
        settings: dict[str, Any],
    ) -> None:
        if host.before_reduction is not no_optimizer:
            raise ValueError(
                "the model has a sharded optimizer already; give one all parameter groups"
            )
        super().__init__(params, {})
        self.host = host
        self.parts = self._cut({param for group in self.param_groups for param in group["params"]})
        of_parts = []
        for group in self.param_groups:
            masters = [self.parts[param].master for param in group["params"]]
            of_parts.append({**group, "params": masters})
        self.inner = kind(of_parts, **settings)
        self.defaults = self.inner.defaults
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_without_params(inner))
        self._build()
        # Parts whose gradient has arrived since the last step; after `_show`, `param.grad` is
        # theirs.
        self._arrived: dict[Part, None] = {}
        self._shown = False
        self._last = True
        self._in_backward = False
        self._counted = 0  # backward passes since the last step
        self.passes = 0
        self.formula: dict[tuple[str, str], int] = {}
        for part in self.parts.values():
            part.param.register_post_accumulate_grad_hook(partial(self._collect, part))
        for name in ("set_is_last_backward", "set_requires_all_reduce"):
            self._follow(name)
        host.before_reduction = self._before_reduction

    def _cut(self, chosen: set[Tensor]) -> dict[Tensor, Part]:
        """Return the part of each chosen parameter, in the model's order."""
        host = self.host
        parts: dict[Tensor, Part] = {}
        for name, param in host.model.named_parameters():
            if param in chosen:
                parts[param] = Part(name, _checked(name, param), host.config, host.states)
        if unknown := chosen - parts.keys():
            raise ValueError(
                f"{len(unknown)} parameters of the optimizer are not the model's, such as one of "
                f"{tuple(next(iter(unknown)).shape)}; pass those of the model after fully_shard"
            )
        if len({param.dtype for param in parts}) > 1:
            raise ValueError(
                "trained parameters have several types; convert the model to one, and let "
                "mp_policy choose the type of the computation"
            )
        return parts

    def _build(self) -> None:
        """Build the gradient shard, the mode of sync, and the post-step all-gather."""
        host = self.host
        config = host.config
        plan = config.plan
        mesh = host.mesh
        stored = [part for part in self.parts.values() if part.width]
        layout = Layout(plan, mesh.rank, tuple(plan.world_size * part.width for part in stored))
        parameters = []
        for index, part in enumerate(stored):
            part.param_index = index
            part.begin = layout.begins[index]
            numel = layout.numels[index]
            shard_range = (part.begin, part.begin + part.width)
            dims = part.param.dim()
            parameters.append(Parameter(part.name, numel, dims, shard_range, place=index))
        weights = next(iter(self.parts)).dtype
        accumulated = DTYPES[config.accumulation_dtype] if config.accumulation_dtype else weights
        sync_dtype = getattr(config.sync, "dtype", None)
        modules = map(own_parameters, sharded_modules(host.model))
        bucket = max(sum(param.numel() for param in params) for params in modules)
        run_numel = config.sync.run_numel(bucket, sum(layout.numels))
        runs = packed_runs(layout.numels, run_numel)
        device = next(iter(self.parts.values())).master.device
        context = SyncContext(
            plan=plan,
            mesh=mesh,
            dtype=DTYPES[sync_dtype] if sync_dtype else accumulated,
            shard=torch.zeros(layout.shape(plan.gradients), dtype=accumulated, device=device),
            loss_scaled=weights == torch.float16,
            parameters=tuple(parameters),
            moments=self._moments,
            mpi=isinstance(config.sync, OkTopkSync) and config.sync.transport == "mpi",
            runs=tuple(tuple(layout.shard_ranges(run)) for run in runs),
        )
        mode = build_mode(config.sync, context)
        mode.check_optimizer(self.inner)
        queue = OrderedQueue(device, overlap=config.overlap, staged=True)
        wire = cast_to(weights)  # unused: FSDP2's modules reduce their gradients themselves
        self.gradients = Gradients(layout, mesh, mode, wire, run_numel, lambda: 1.0, queue)
        self.publisher = Publisher(stored, weights, config, mesh, bucket, queue)

    def _follow(self, name: str) -> None:
        """Follow a call of FSDP2 on the root module that says whether the next pass is the last."""
        model: Any = self.host.model
        call = getattr(model, name)

        @wraps(call)
        def followed(flag: bool, **options: Any) -> None:
            self._last = flag
            call(flag, **options)

        setattr(model, name, followed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later ones have no gradient shard."""
        if hasattr(self, "gradients"):
            raise ValueError(
                "parameters cannot be added to a sharded optimizer; build it anew with all groups"
            )
        super().add_param_group(param_group)

    # -- backward pass -----------------------------------------------------------------------------

    def _before_reduction(self) -> None:
        """Prepare for FSDP2's reduction of a module: it will read ``param.grad``, and add to it."""
        if not self._in_backward:
            self._in_backward = True
            self._counted += 1
        # No public call reports the end of a backward pass; FSDP2 and DDP queue their own ends so.
        # It is queued for every module: if a pass fails, the next one still has an end.
        Variable._execution_engine.queue_callback(self._end_backward)
        if self._shown:
            self._take_back()

    def _end_backward(self) -> None:
        self._in_backward = False
        if self._last:
            self._show()

    @torch.no_grad()
    def _collect(self, part: Part, param: Tensor) -> None:
        """Move a gradient of FSDP2's shard to the gradient shard; start sync of complete runs."""
        grad = param.grad
        assert isinstance(grad, DTensor)
        param.grad = None
        self._arrived[part] = None
        if not part.width:
            return
        host = self.host
        # FSDP2 reduces nothing, and divides nothing, if one rank stores all weights.
        factor = 1 / host.divisor if host.config.plan.weights == 1 else 1.0
        # FSDP2's stream for reductions is current: it adds here, and the queue of sync waits for
        # it.
        self.gradients.reopen([part.param_index])
        part.add(self.gradients.buffer, grad.to_local(), factor)
        self.gradients.mark_added([part.param_index], self._last)

    @torch.no_grad()
    def _show(self) -> None:
        """Finish sync, and set ``param.grad`` to the parts of the synced gradients. Collective."""
        if self._shown or not self._arrived:
            return
        self._shown = True
        self.gradients.sync()
        if self.gradients.mode.residual_owners() is not None:
            # Sync delivers residuals of all parameters, those without a new gradient included.
            trained = (part for part in self.parts.values() if part.param.requires_grad)
            self._arrived |= dict.fromkeys(trained)
        rows = self.gradients.optimizer_rows()
        for part in self._arrived:
            part.show(rows)

    def _take_back(self) -> None:
        """Unset ``param.grad`` so that gradients are added; drop those that the user has unset."""
        self._shown = False
        kept = [part for part in self._arrived if part.param.grad is not None]
        if not kept:
            self.zero_grad()
            return
        for part in self._arrived:
            if part.param.grad is None:
                part.columns(self.gradients.buffer).zero_()
            part.param.grad = None
        self._arrived = dict.fromkeys(kept)
        self.gradients.reopen()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step, and residuals to which some were added."""
        self.gradients.zero()
        self._forget()

    def _forget(self) -> None:
        self._shown = False
        self._arrived = {}
        for param in self.parts:
            param.grad = None

    # -- step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient over the whole job, and return its norm. Collective.

        ``torch.nn.utils.clip_grad_norm_`` does the same after the last backward pass of a step.
        """
        self._show()
        norm = torch.nn.utils.clip_grad_norm_(list(self.parts), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Sync what is not synced yet, update this rank's part, send new weights. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._show()
        for part in self.parts.values():
            part.follow_edits()
            part.take_gradient()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_without_params(group))
        if self._only_makes_states():
            self.inner.step()
            self._end_update()
            return loss
        with self._watched():
            self.inner.step()
        self.publisher.publish()
        self.gradients.end_step(skipped=False)
        self._end_update()
        if self.host.config.debug_checks:
            stored = [part.local().view(-1) for part in self.parts.values()]
            check_replicas(self.host.mesh.plans, [torch.cat(stored)])
        self._end_meter()
        return loss

    def _only_makes_states(self) -> bool:
        """Return whether a step has no gradient of a backward pass and no learning rate.

        So does a step of ``get_state_dict``, by which torch makes states. It must change nothing
        else: another publish of differences would change weights that were saved already.
        """
        rates = [float(group.get("lr", 1)) for group in self.param_groups]
        return not self._arrived and not any(rates)

    def _end_update(self) -> None:
        """Drop the gradients, and show the states of the updated parts."""
        self._forget()
        for param, part in self.parts.items():
            part.master.grad = None
            if part.master in self.inner.state:
                self.state[param] = self.inner.state[part.master]

    def _end_meter(self) -> None:
        """End the meter's step, and that of the formulas, which follow what FSDP2 asked for."""
        host = self.host
        sync = host.config.sync
        context = self.gradients.mode.context
        for ranges in context.runs:
            widths = [end - begin for begin, end in ranges]
            host.book("sync", sync.volume(context.plan, widths, context.dtype.itemsize))
        host.book("publish", self.publisher.moves())
        self.formula = {key: nbytes for key, nbytes in host.formula.items() if nbytes}
        host.formula.clear()
        host.mesh.meter.end_step()
        self.passes = self._counted
        self._counted = 0

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Call the mode of sync before and, if it wants updates, after the update."""
        mode = self.gradients.mode
        parts = self.parts.values()
        updated = [part for part in parts if part.width and part.master.grad is not None]
        for part in updated:
            mode.before_update(part.begin, part.width)
        if not mode.wants_updates:
            yield
            return
        layout = self.gradients.layout
        index = layout.row(layout.plan.optimizer)
        own = [part.rows(part.master.detach())[index] for part in updated]
        before = [row.clone() for row in own]
        rates = {p: float(group["lr"]) for group in self.param_groups for p in group["params"]}
        yield
        for part, old, new in zip(updated, before, own, strict=True):
            mode.after_update(part.begin, old, new, rates[part.param])

    def _moments(self) -> list[Moment]:
        """Return the momentum of an Adam-like optimizer for the mode of sync."""
        found = []
        for group in self.param_groups:
            for part in map(self.parts.__getitem__, group["params"]):
                mean = self.inner.state.get(part.master, {}).get("exp_avg")
                if mean is not None and part.width:
                    beta = float(group["betas"][0])
                    found.append(Moment(part.begin, part.rows(mean), beta))
        return found

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def _keeps_masters(self) -> bool:
        """Whether FP32 masters are more exact than the weights, so that a checkpoint needs both."""
        exact = self.publisher.wire == cast_to(torch.float32)
        return next(iter(self.parts)).dtype != torch.float32 or not exact

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return states as DTensors of the parameters' shapes, as under FSDP2, whose memory they
        share. Collective.
        """
        residuals: Mapping[Part, Tensor] = {}
        if getattr(self.host.config.sync, "error_feedback", False):
            residuals = summed_residuals(self.gradients, self.parts.values(), self.host.mesh)
        packed = super().state_dict()
        state = packed["state"]
        for index, part in enumerate(self._parts_in_order()):
            entry = dict(state.get(index, {}))
            if self._keeps_masters:
                entry[MASTER] = part.master.detach()
            if part.published is not None:
                entry[PUBLISHED] = part.published
            if part in residuals:
                entry[RESIDUAL] = residuals[part]
            for key, value in entry.items():
                if _is_flat(value, part):
                    entry[key] = part.as_dtensor(value)
            state[index] = entry
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load :meth:`state_dict`, resharded by torch's checkpoints from that of other ranks; see
        Note [Residuals of a checkpoint].
        """
        groups = state_dict["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        self.zero_grad()
        mode = self.gradients.mode
        mode.drain()  # the state that is replaced owns what its collectives send
        mode.load_state_dict({})
        layout = self.gradients.layout
        for key, part in zip(keys, self._parts_in_order(), strict=True):
            entry = dict(state_dict["state"].get(key, {}))
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    entry[name] = part.from_dtensor(value).clone()
            residual = entry.pop(RESIDUAL, None)
            if residual is not None:
                row = part.rows(residual)[layout.row(layout.plan.optimizer)]
                part.columns(self.gradients.own_row[None])[0].copy_(row)
            master = entry.pop(MASTER, None)
            if master is not None:
                part.master.copy_(master)
            published = entry.pop(PUBLISHED, None)
            if published is not None and part.published is not None:
                part.published.copy_(published)
            if entry:
                self.inner.state[part.master] = entry
                self.state[part.param] = entry
        for group, own_group in zip(groups, self.param_groups, strict=True):
            own_group.update(_without_params(group))

    def _parts_in_order(self) -> list[Part]:
        """Return the parts in the order of the groups, in which state dicts count them."""
        return [self.parts[param] for group in self.param_groups for param in group["params"]]


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_flat(value: Any, part: Part) -> bool:
    """Return whether an entry of a state has a value for each element of a part."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == part.master.numel()


def _checked(name: str, param: Tensor) -> DTensor:
    """Return a parameter that can be trained here; raise ValueError, in one line, for another."""
    if not isinstance(param, DTensor):
        raise ValueError(f"{name} is not sharded by FSDP2; give it an optimizer of its own")
    if param.dtype not in FLOATS:
        raise ValueError(
            f"{name} is {param.dtype}, and weights of FP32, BF16 or FP16 are trained; "
            f"{way_to_floats(param.dtype)}"
        )
    if param.is_meta:
        raise ValueError(f"{name} is on the meta device; call model.to_empty and set weights first")
    if param.to_local().device.type != param.device_mesh.device_type:
        raise ValueError(
            f"{name} is on {param.to_local().device}: offloaded shards are not supported; leave "
            "offload_policy out"
        )
    return param
