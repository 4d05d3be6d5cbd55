# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The optimizer of a model on FSDP2: it syncs gradients, updates its part, sends the weights.

A step
    1. In each backward pass FSDP2 reduces a module's gradients to its shards, and calls a hook for
       each parameter. The hook moves the gradient to the gradient shard ``[N / W, F]`` of
       :class:`~zero_topo.engine.gradients.Gradients`, so FSDP2 stores none. In the last backward
       pass of a step sync starts as soon as a run of parameters is complete.
    2. ``param.grad`` is this rank's part of the gradient over the whole job, a
       :class:`~zero_topo.fsdp.part_tensor.PartTensor` of the parameter's shape. At the end of the
       last backward pass it is synced, on a GPU by its stream alone. After another pass it is
       synced when it is first read. Whatever reads or changes ``param.grad`` sees the gradient.
    3. :meth:`ShardedOptimizer.step` updates FP32 masters of the part, and sends them to all ranks
       that store the shard.

The last backward pass
    Every backward pass counts as the last of its step unless FSDP2's own
    ``set_is_last_backward(False)`` or ``set_requires_all_reduce(False)`` was called. Before FSDP2
    reduces another one, the values of ``param.grad`` are in the gradient shard, the user's
    included; sync then sends only what is new.

Checkpoints
    The state dict has DTensors of the parameters' shapes, which torch's checkpoints save, and load
    on other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import ismethod
from typing import Any

import torch
from torch import Tensor, optim
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from zero_topo.collectives.queue import Queues, on_gpu
from zero_topo.engine.agreement import check_replicas
from zero_topo.engine.gradients import Gradients
from zero_topo.engine.shards import Layout
from zero_topo.fsdp.host import PASS, Host, no_optimizer, own_parameters, sharded_modules
from zero_topo.fsdp.inner import MASTER, PUBLISHED, RESIDUAL, Link, copy_settings, masters_of
from zero_topo.fsdp.parts import WITHOUT_OPTIMIZER, Part, parts_of
from zero_topo.fsdp.publish import Publisher
from zero_topo.fsdp.residuals import summed_residuals
from zero_topo.fsdp.settings import PassFlags, follow
from zero_topo.quant.operands import DTYPES
from zero_topo.quant.ops import cast_to
from zero_topo.sync import AdamS, AgedAdamW, Moment, Parameter, SyncContext, build_mode

ELEMENTWISE = {
    AdamS,
    AgedAdamW,
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}
"""Optimizers that update each element by itself.

A rank updates its parts of tensors, flat. Optimizers that use a norm of a tensor (LAMB, LARS), its
rows and columns (Adafactor, Muon), or sums over all tensors (LBFGS) would train otherwise than with
whole tensors, without an error.
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
        elementwise: whether ``kind`` updates each element by itself, if it is none of
            :data:`ELEMENTWISE`.

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
        elementwise: bool = False,
    ) -> None:
        if host.before_reduction is not no_optimizer:
            raise ValueError(
                "the model has a sharded optimizer already; give one all parameter groups"
            )
        super().__init__(params, {})
        self.host = host
        self.parts = parts_of(
            host, {param for group in self.param_groups for param in group["params"]}
        )
        device = next(iter(self.parts.values())).master.device
        self.inner = kind(masters_of(self.param_groups, self.parts), **settings)
        if not elementwise and type(self.inner) not in ELEMENTWISE:
            raise ValueError(
                f"{type(self.inner).__name__} is not known to update each element by itself, and "
                "ranks update parts of tensors; if it does, pass elementwise=True, else take "
                "another, such as torch.optim.AdamW"
            )
        self.defaults = self.inner.defaults
        self._link = Link(self, self.inner, self.parts, self._own_entries)
        self._build(device)
        self._link.take()
        # Parts whose gradient has arrived since the last step.
        self._arrived: dict[Part, None] = {}
        # Whether sync has delivered all that has arrived.
        self._synced = False
        self._flags = PassFlags(host.model)
        self._in_backward = False
        # FSDP2's stream for reductions, which adds gradients; `_sync` waits for it.
        self._reducing: torch.Stream | None = None
        self._factor = 1.0  # of gradients that the current reduction adds
        self._ended = 0  # steps, and gradients dropped
        self._counted = 0  # backward passes since the last step
        self.passes = 0
        self.formula: dict[tuple[str, str], int] = {}
        for part in self.parts.values():
            collect = partial(self._collect, part)
            handle = part.param.register_post_accumulate_grad_hook(collect)
            # Hooks of the user then see our gradient, not FSDP2's of one node.
            hooks: Any = part.param._post_accumulate_grad_hooks
            hooks.move_to_end(handle.id, last=False)
        follow(host.model, "reset_iter_state", self._end_pass)
        host.before_reduction = self._before_reduction

    def _build(self, device: torch.device) -> None:
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
            part.begin = layout.edges[index]
            numel = layout.numels[index]
            shard_range = (part.begin, part.begin + part.width)
            dims = part.param.dim()
            parameters.append(Parameter(part.name, numel, dims, shard_range, place=index))
        weights = next(iter(self.parts)).dtype
        accumulated = DTYPES.get(config.accumulation_dtype or "", weights)
        modules = map(own_parameters, sharded_modules(host.model))
        bucket = max(sum(param.numel() for param in params) for params in modules)
        run_numel = config.sync.run_numel(bucket, sum(layout.numels))
        context = SyncContext(
            config=config,
            mesh=mesh,
            shard=torch.zeros(layout.shape(plan.gradients), dtype=accumulated, device=device),
            loss_scaled=weights == torch.float16,
            parameters=tuple(parameters),
            moments=self._moments,
            run_numel=run_numel,
        )
        mode = build_mode(config.sync, context)
        mode.check_optimizer(self.inner)
        queues = Queues(device, config.overlap)
        wire = cast_to(weights)  # unused: FSDP2's modules reduce their gradients themselves
        self.gradients = Gradients(layout, mode, wire, (False,), lambda: 1.0, queues)
        self.publisher = Publisher(stored, weights, config, mesh, bucket, queues.updates)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built; later ones have no gradient shard."""
        if hasattr(self, "gradients"):
            raise ValueError(
                "parameters cannot be added to a sharded optimizer; build it anew with all groups"
            )
        super().add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        """Return what only the inner optimizer has, such as ``train`` of a schedule-free one.

        Private names are left out: by one of them a fused optimizer asks torch's ``GradScaler`` for
        gradients that are still scaled.
        """
        inner = self.__dict__.get("inner")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(inner, name)
        return partial(self._call, name, value) if ismethod(value) else value

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method of the inner optimizer. Collective, if it changes weights."""
        parts = self.parts.values()
        self._link.give()
        versions = [part.master._version for part in parts]
        result = method(*args, **options)
        self._link.take()
        # Schedule-free optimizers change weights here, some without a new version.
        changes = name in ("train", "eval")
        if changes or versions != [part.master._version for part in parts]:
            self._publish()
        return result

    # -- backward pass -----------------------------------------------------------------------------

    def _before_reduction(self, params: Sequence[Tensor], divisor: float) -> None:
        """Prepare for FSDP2's reduction of a module: it adds to its parameters' ``param.grad``.

        Args:
            params: of the module.
            divisor: what their sums are divided by.
        """
        # FSDP2 reduces nothing, and divides nothing, if one rank stores all weights.
        self._factor = 1 / divisor if self.host.config.plan.weights == 1 else 1.0
        if not self._in_backward:
            self._in_backward = True
            self._counted += 1
            self.gradients.reopen()
            # Of all modules: sync repeats what users changed in one that this pass does not use.
            for part in self.parts.values():
                self._take_back(part)
        self._synced = False
        for param in params:
            if param in self.parts:
                self._take_back(self.parts[param])
            elif param.requires_grad:
                raise RuntimeError(f"a parameter of {tuple(param.shape)}: {WITHOUT_OPTIMIZER}")
        # No public call reports the end of a backward pass; FSDP2 and DDP queue their own ends so.
        # It is queued for every module: if a pass fails, the next one still has an end.
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if torch._C._current_autograd_node() is not None:
            return  # of a reentrant checkpoint: the pass around it goes on
        self._end_pass()
        if self._flags.last:
            self._sync()

    def _end_pass(self) -> None:
        """Set ``param.grad`` of earlier passes where this one has added nothing; FSDP2 reports a
        failed pass too.
        """
        if not self._in_backward:
            return
        self._in_backward = False
        for part in self._arrived:
            if part.grad is None:  # taken back for a reduction that it took no part in
                self._show(part)

    @torch.no_grad()
    def _take_back(self, part: Part) -> None:
        """Unset ``param.grad``, and bring its values to the gradient shard if the user changed them
        otherwise than in place.
        """
        grad = part.param.grad
        if grad is not part.grad:
            self._overwrite(part, None if grad is None else part.from_dtensor(grad))
        elif part.synced is not None and part.copies > 1:
            self._overwrite(part, part.synced)  # a copy of several rows
        part.forget()

    def _overwrite(self, part: Part, grad: Tensor | None) -> None:
        """Replace what has arrived of a gradient."""
        self._arrived.pop(part, None)
        if grad is not None:
            self._arrived[part] = None
        if not part.width:
            return
        self.gradients.reopen([part.param_index])
        part.store(self.gradients.buffer, self.gradients.mode.context.own_row, grad)
        self.gradients.mark_added([part.param_index], False)

    @torch.no_grad()
    def _collect(self, part: Part, param: Tensor) -> None:
        """Move a gradient of FSDP2's shard to the gradient shard; start sync of complete runs."""
        grad = param.grad
        assert isinstance(grad, DTensor)
        self._arrived[part] = None
        self._show(part)
        if not part.width:
            return
        # FSDP2's stream for reductions is current: it adds here, the queue of sync waits for it.
        local = grad.to_local()
        if on_gpu(local.device):
            self._reducing = torch.accelerator.current_stream(local.device)
        self.gradients.reopen([part.param_index])
        part.add(self.gradients.buffer, local, self._factor)
        self.gradients.mark_added([part.param_index], self._flags.last)

    def _show(self, part: Part) -> None:
        part.show(self.gradients.optimizer_rows(), partial(self._read, part, self._ended))

    def _read(self, part: Part, ended: int) -> Tensor:
        """Return what a user reads of ``param.grad``. Collective, if it is not synced yet."""
        if ended != self._ended:
            raise RuntimeError(
                f"{part.name}: its gradient was dropped by step() or zero_grad(); read param.grad "
                "before, or copy it by param.grad.clone()"
            )
        if not self._synced and PASS.is_bw:
            raise RuntimeError(
                f"{part.name}: its gradient is read in a backward pass, before it is reduced "
                "between nodes; read param.grad after the pass"
            )
        self._sync()
        assert part.synced is not None
        return part.synced

    @torch.no_grad()
    def _sync(self) -> None:
        """Finish sync of what has arrived and the user has not dropped. Collective."""
        if self._synced:
            return
        self._end_pass()  # one that failed
        dropped = {part for part in self._arrived if part.param.grad is None}
        for part in dropped:
            self._overwrite(part, None)
        if not self._arrived:
            self.gradients.zero()
            return
        if self._reducing is not None:
            torch.accelerator.current_stream(self._reducing.device).wait_stream(self._reducing)
        self._synced = True
        self.gradients.sync()
        if self.gradients.mode.residual_owners() is not None:
            # Sync delivers residuals of all parameters, those without a new gradient included.
            for part in self.parts.values():
                if part.param.requires_grad and part.param.grad is None and part not in dropped:
                    self._show(part)
                    self._arrived[part] = None
        rows = self.gradients.optimizer_rows()
        for part in self._arrived:
            part.keep_synced(rows)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step, and residuals to which some were added.

        Args:
            set_to_none: whether they are dropped; else they are synced, and set to zero.
        """
        if not set_to_none:
            return super().zero_grad(set_to_none=False)
        self.gradients.zero()
        self._forget()

    def _forget(self) -> None:
        self._ended += 1
        self._synced = False
        self._in_backward = False
        self._arrived = {}
        for part in self.parts.values():
            part.forget()

    # -- step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient over the whole job, and return its norm. Collective.

        ``torch.nn.utils.clip_grad_norm_`` does the same after the last backward pass of a step.
        """
        self._sync()
        norm = torch.nn.utils.clip_grad_norm_(list(self.parts), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Sync what is not synced yet, update this rank's part, send new weights. Collective."""
        given = () if closure is None else (self._evaluate(closure),)
        self._take_gradients()
        self._link.give()
        if self._only_makes_states():
            result: Any = self.inner.step(*given)
            self._end_update()
            return result
        with self._watched():
            result = self.inner.step(*given)
        self._publish()
        self.gradients.end_step(skipped=False)
        self._end_update()
        if self.host.config.debug_checks:
            stored = [part.local().view(-1) for part in self.parts.values()]
            check_replicas(self.host.mesh.plans, [torch.cat(stored)])
        self._end_meter()
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Call a closure, and return one for the inner optimizer: its first call returns the loss,
        and others evaluate the model with the weights as they then are.
        """
        with torch.enable_grad():
            losses = [closure()]

        @torch.no_grad()
        def evaluate() -> Any:
            if losses:
                return losses.pop()
            self._publish()
            with torch.enable_grad():
                loss = closure()
            self._take_gradients()
            return loss

        return evaluate

    @torch.no_grad()
    def _publish(self) -> None:
        """Send the masters to all ranks that store the shard."""
        self.publisher.publish()
        self.host.book("publish", self.publisher.moves())

    def _take_gradients(self) -> None:
        self._sync()
        for part in self.parts.values():
            part.take_gradient()

    def _only_makes_states(self) -> bool:
        """Return whether a step has no gradient of a backward pass and no learning rate.

        So does a step of ``get_state_dict``, by which torch makes states. It must change nothing
        else: another publish of differences would change weights that were saved already.
        """
        if self._arrived:  # a rate on a GPU is read only without gradients: the host waits for it
            return False
        rates = [float(group.get("lr", 1)) for group in self.param_groups]
        return not any(rates)

    def _end_update(self) -> None:
        """Drop the gradients, and show the states of the updated parts."""
        self._forget()
        for part in self.parts.values():
            part.master.grad = None
        self._link.take(stepped=True)

    def _end_meter(self) -> None:
        """End the meter's step, and that of the formulas, which follow what FSDP2 asked for."""
        host = self.host
        sync = host.config.sync
        context = self.gradients.mode.context
        for ranges in context.runs:
            widths = [end - begin for begin, end in ranges]
            host.book("sync", sync.volume(context.plan, widths, context.dtype.itemsize))
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

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return states as DTensors of the parameters' shapes, as under FSDP2, whose memory they
        share. Only who reads a residual needs the other ranks.
        """
        residuals = cache(self._residuals)
        packed = super().state_dict()
        state = packed["state"]
        for index, part in enumerate(self._parts_in_order()):
            state[index] = state.get(index, {}) | self._own_entries(part, residuals)
        return packed

    def _residuals(self) -> dict[Part, Tensor]:
        return summed_residuals(self.gradients, self.parts.values(), self.host.mesh)

    def _own_entries(
        self, part: Part, residuals: Callable[[], Mapping[Part, Tensor]] | None = None
    ) -> dict[str, Any]:
        """Return what a state has beyond the inner optimizer's, which shares memory with it.

        Args:
            part: the part.
            residuals: returns those of all parts; None sums them whenever one is read.
        """
        entries: dict[str, Any] = {}
        if self.publisher.wire != cast_to(torch.float32):  # masters are more exact than weights
            entries[MASTER] = part.as_dtensor(part.master.detach())
        if part.published is not None:
            entries[PUBLISHED] = part.as_dtensor(part.published)
        if self.host.config.sync.keeps_residual:
            read = partial(_of_part, residuals or self._residuals, part)
            entries[RESIDUAL] = part.lazily(torch.float32, read)
        return entries

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load :meth:`state_dict`, resharded by torch's checkpoints from that of other ranks; see
        Note [Residuals of a checkpoint].
        """
        groups = state_dict["param_groups"]
        counts = [len(group["params"]) for group in groups]
        own_counts = [len(group["params"]) for group in self.param_groups]
        if counts != own_counts:
            raise ValueError(
                f"the state dict has groups of {counts} parameters and the optimizer of "
                f"{own_counts}; build the optimizer with the groups that were saved"
            )
        keys = [key for group in groups for key in group["params"]]
        own_row = self.gradients.own_row
        kept = self._settled().clone()
        mode = self.gradients.mode
        mode.drain()  # the state that is replaced owns what its collectives send
        mode.load_state_dict({})
        own_row.copy_(kept)
        layout = self.gradients.layout
        for key, part in zip(keys, self._parts_in_order(), strict=True):
            entry = dict(state_dict["state"].get(key, {}))
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    entry[name] = part.from_dtensor(value).clone()
            residual = entry.pop(RESIDUAL, None)
            master = entry.pop(MASTER, None)
            published = entry.pop(PUBLISHED, None)
            # torch gives an empty dict for what a flattened checkpoint does not have.
            if isinstance(residual, Tensor):
                row = part.rows(residual)[layout.row(layout.plan.optimizer)]
                part.columns(own_row[None])[0].add_(row)
            if isinstance(master, Tensor):
                part.master.copy_(master)
            if isinstance(published, Tensor) and part.published is not None:
                part.published.copy_(published)
            if entry:
                self.inner.state[part.master] = entry
            else:
                self.inner.state.pop(part.master, None)
        copy_settings(groups, self.inner.param_groups)
        self._link.take()

    @torch.no_grad()
    def _settled(self) -> Tensor:
        """Return the own row with all gradients since the last step, and none of them elsewhere."""
        self._sync()
        self.gradients.reopen()
        self._synced = False
        for part in self.parts.values():
            self._take_back(part)
        for part in self._arrived:
            self._show(part)
        return self.gradients.own_row if self._arrived else torch.zeros_like(self.gradients.own_row)

    def _parts_in_order(self) -> list[Part]:
        """Return the parts in the order of the groups, in which state dicts count them."""
        return [self.parts[param] for group in self.param_groups for param in group["params"]]


def _of_part(tensors: Callable[[], Mapping[Part, Tensor]], part: Part) -> Tensor:
    return tensors()[part]
