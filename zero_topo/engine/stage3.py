# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The engine behind one DeepSpeed stage-3 optimizer: groups, shards, sync mode, meter. It does not
import DeepSpeed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.collectives.queue import Queues
from zero_topo.config import ResolvedConfig
from zero_topo.cost.volume import Workload
from zero_topo.engine.agreement import all_can, check_replicas
from zero_topo.engine.gradients import Gradients
from zero_topo.engine.masters import Masters
from zero_topo.engine.matrices import Matrices
from zero_topo.engine.residual_transfer import (
    STATE_KEY,
    age_rows,
    carried,
    first_line,
)
from zero_topo.engine.shards import Layout
from zero_topo.engine.weights import Weights
from zero_topo.mesh import Mesh
from zero_topo.quant.operands import DTYPES
from zero_topo.quant.operators import select
from zero_topo.quant.ops import cast_to
from zero_topo.sync import Moment, Parameter, SyncContext, build_mode

logger = logging.getLogger(__name__)


class Stage3:
    """Owns the nested shards of one optimizer.

    Args:
        config: the plan and the formats.
        trained: the parameters that the optimizer updates, in DeepSpeed's flat order.
        frozen: the parameters that no optimizer updates.
        like: a tensor of the model's dtype on the accelerator.
        scatter_dtype: DeepSpeed's ``communication_data_type``, used if gradients are not quantized.
        accumulation_dtype: DeepSpeed's own choice, used if the block names none.
        bucket_numel: DeepSpeed's ``reduce_bucket_size``; also the elements per collective of sync
            and publish.
        loss_scale: returns the current loss scale.
        moments: returns the optimizer's momentum; empty before its first step.

    Attributes:
        parameters: the trained parameters.
        layout: of the trained parameters.
        weights: the shards of the trained parameters.
        sets: these, and if there are any, the shards of the frozen parameters.
        gradients: the gradient shard and the mode of sync.
        masters: the layout of FP32 optimizer shards, ours or DeepSpeed's
            (:attr:`separate_masters`).
        matrices: applies functions of whole matrices; exists if a parameter needs it.
        meter: bytes sent, by this engine and those :meth:`alongside` it.
        queues: of gathers, and of sync and publish, which these engines share too.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        trained: Sequence[Parameter],
        frozen: Sequence[Parameter],
        like: Tensor,
        scatter_dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        bucket_numel: int,
        loss_scale: Callable[[], float] = lambda: 1.0,
        moments: Callable[[], Sequence[Moment]] = list,
    ) -> None:
        self.like = like
        self.scatter_dtype = scatter_dtype
        self.bucket_numel = bucket_numel
        self.accumulation_dtype = DTYPES.get(config.accumulation_dtype or "", accumulation_dtype)
        self.meter = Meter()
        self._counts_steps = True
        self.queues = Queues(like.device, config.overlap)
        self._loss_scale = loss_scale
        self._averaged = config.plan.world_size
        select(like.device, config.kinds)
        self._build(config, trained, frozen, moments)

    def alongside(
        self,
        config: ResolvedConfig,
        trained: Sequence[Parameter],
        frozen: Sequence[Parameter],
        moments: Callable[[], Sequence[Moment]],
    ) -> Stage3:
        """Build an engine of other parameters of the same model, on other groups of ranks: of
        experts. Collective.

        It shares the queues, so that all ranks begin the collectives of both engines in one order,
        and the meter, whose steps this engine ends. Gradients are averaged over as many ranks as
        here, as under stock.

        Args:
            config: the plan of these groups.
            trained: the parameters that the optimizer updates, in DeepSpeed's flat order.
            frozen: the parameters that no optimizer updates.
            moments: returns the optimizer's momentum of these parameters.
        """
        other = copy(self)
        # A copy: what `_build` does not set, both engines share.
        other._counts_steps = False
        other._build(config, trained, frozen, moments)
        return other

    def _build(
        self,
        config: ResolvedConfig,
        trained: Sequence[Parameter],
        frozen: Sequence[Parameter],
        moments: Callable[[], Sequence[Moment]],
    ) -> None:
        self.config = config
        like = self.like
        groups = config.groups
        rank = dist.get_rank()
        if groups is not None:
            rank = groups.ranks(rank).index(rank)
        self.layout = Layout(config.plan, rank, tuple(p.numel for p in trained))
        shard_ranges = self.layout.shard_ranges(range(len(trained)))
        self.parameters = tuple(
            replace(p, shard_range=shard_range)
            for p, shard_range in zip(trained, shard_ranges, strict=True)
        )
        self._frozen = tuple(frozen)
        # A rank owns no more of a frozen parameter than its world shard.
        still = config.of_frozen()
        plans = [config.plan, still.plan] if frozen else [config.plan]
        # Exact rows of INT8 parameters lie with the ranks of one optimizer shard.
        exact = [] if config.resident_spec is None else [(1, plan.optimizer) for plan in plans]
        pairs = [pair for plan in plans for pair in plan.pairs()]
        whole = (1, config.plan.optimizer)
        has_whole = any(p.whole for p in trained)
        whole_pairs = [whole] if has_whole else []
        self.mesh = Mesh(
            config.plan, config.topology, self.meter, [*pairs, *exact], whole_pairs, groups
        )
        self._run_numel = config.sync.run_numel(self.bucket_numel, sum(p.numel for p in trained))
        shared = like, self.bucket_numel, self.mesh, self.queues
        self.weights = Weights(config, trained, *shared)
        self.sets = [self.weights]
        if frozen:
            self.sets.append(Weights(still, frozen, *shared, frozen=True))
        self.gradients = self._build_gradients(moments)
        self.masters = Masters(self.layout, self.mesh, like.device)
        if has_whole:
            group = self.mesh.group(*whole).metered("matrices")
            self.matrices = Matrices(self.layout, group, self.bucket_numel, self.scatter_dtype)

    @property
    def separate_masters(self) -> bool:
        """Whether zero_topo stores FP32 masters, because a rank has several rows of them.

        Otherwise DeepSpeed's masters are used, with its own code for them.
        """
        plan = self.config.plan
        return plan.optimizer < plan.world_size

    def _build_gradients(self, moments: Callable[[], Sequence[Moment]]) -> Gradients:
        config = self.config
        shape = self.layout.shape(config.plan.gradients)
        context = SyncContext(
            config=config,
            mesh=self.mesh,
            shard=self.like.new_zeros(shape, dtype=self.accumulation_dtype),
            loss_scaled=self._loss_scaled,
            moments=moments,
            parameters=self.parameters,
            run_numel=self._run_numel,
        )
        return Gradients(
            self.layout,
            build_mode(config.sync, context),
            config.gradients_spec or cast_to(self.scatter_dtype),
            config.backend_adds,
            self._loss_scale,
            self.queues,
            self._averaged,
        )

    @property
    def _loss_scaled(self) -> bool:
        return torch.float16 in (self.like.dtype, *(p.sent for p in self.parameters))

    def notes(self) -> list[str | None]:
        """Return log lines that depend on the model: INT8 weights, process groups, sums of the
        backend, the residual of FP16.
        """
        int8 = None
        if self.config.resident_spec is not None:
            whole = sum(sum(each.layout.numels) for each in self.sets)
            coded = sum(sum(compress(each.layout.numels, each.coded)) for each in self.sets)
            int8 = f"stored as INT8: {coded} of {whole} elements"
        added = None
        if any(self.gradients.backend):
            dtype = str(self.scatter_dtype).removeprefix("torch.")
            added = (
                f"gradients are added by the backend's own reduce-scatter, in {dtype}: "
                '"communication_data_type": "fp32" adds them in FP32, in twice the bytes'
            )
        return [int8, added, self.gradients.mode.note()]

    def restart(self, masters: Tensor | None = None) -> None:
        """Rebuild all shards from each rank's own world shard, at start-up and after a load.
        Collective.

        Args:
            masters: the masters of the rank's own row, FP32 ``[F]``; None before they exist.
        """
        # Before anything is sent: the padding of a file may be anything.
        self.layout.clear_padding(self.weights.own_row)
        self.weights.publish_world(masters=masters)
        self.gradients.zero()
        self.meter.reset_step()

    def restart_frozen(self) -> None:
        """Rebuild the shards of frozen parameters from each rank's own world shard. Collective."""
        for frozen in self.sets[1:]:
            frozen.layout.clear_padding(frozen.own_row)
            frozen.publish_world()
            self.meter.reset_step()

    @contextmanager
    def watched(self, master: Tensor, begin: int, rate: float | Tensor) -> Iterator[None]:
        """Call the mode of sync before and, if it wants updates, after the optimizer's update of
        some masters.

        Args:
            master: FP32, flat: this rank's optimizer shard of some whole parameters.
            begin: the first column of these parameters.
            rate: their learning rate; some optimizers store it in a tensor.
        """
        mode = self.gradients.mode
        rows = self.masters.table(master.detach())
        mode.before_update(begin, rows.shape[1])
        if not mode.wants_updates:
            yield
            return
        row = rows[self.masters.own_row]
        old = row.clone()  # the optimizer updates in place
        yield
        mode.after_update(begin, old, row, float(rate))

    def end_step(self, skipped: bool) -> None:
        """End an optimizer step, skipped or not: begin publish, commit sync, zero the gradients,
        end the meter's step.

        Raises:
            RuntimeError: with ``debug_checks``, on every rank, if replicas of a shard are not
                bit-identical.
        """
        # Begun first: it sends while sync is committed and the gradients are zeroed.
        self.weights.start_publish()
        self.queues.updates.flush()
        self.gradients.end_step(skipped)
        if self.config.debug_checks:
            # Else some runs would be compared before they have arrived
            self.weights.wait_for_publish()
            for each in self.sets:
                check_replicas(self.mesh.plans, each.replicas())
        if self._counts_steps:
            self.meter.end_step()

    def settle(self) -> None:
        """Finish pending work: scatters and sync begun by a backward pass, publishes, the mode's
        own collectives. Collective.
        """
        self.gradients.finish_scatter()
        self.queues.updates.finish()
        self.weights.wait_for_publish()
        self.gradients.mode.drain()

    def destroy(self) -> None:
        """Finish pending work and destroy the groups. Collective."""
        self.settle()
        self.mesh.destroy()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state beyond DeepSpeed's own that a bit-exact resume needs.

        This is the state of sync, and the state of weights that masters do not determine. The
        result is one entry for DeepSpeed's dictionary, or empty if there is neither.
        """
        self.weights.wait_for_publish()
        kept = self.weights.state_dict()
        sync = self.gradients.state_dict()
        residuals = self.gradients.mode.residual_owners()
        state = {"degrees": self.config.plan.degrees(), "sync": sync, **kept}
        if residuals is not None:
            columns = zip(self.layout.numels, self.layout.edges, self.layout.widths, strict=False)
            state["residual_owners"] = residuals._asdict()
            # Of optimizer states
            state["columns"] = dict(zip((p.name for p in self.parameters), columns, strict=True))
        return {STATE_KEY: state} if sync or kept else {}

    def load_state_dict(self, saved: Mapping[str, Any], folder: str | None = None) -> Tensor | None:
        """Restore :meth:`state_dict` before :meth:`restart`; without saved state, start fresh.
        Collective.

        State of another plan is dropped, which the log says. If ranks cannot all restore the same,
        all start fresh: their replicas would diverge.

        Args:
            saved: DeepSpeed's dictionary of this rank, of any plan or of stock ZeRO-3.
            folder: the checkpoint's folder; see Note [Residuals of another run] in
                ``residual_transfer.py``.

        Returns:
            Saved ages for AgedAdamW, uint8 ``[N / O, F]``, of the optimizer's shard; or None.
        """
        entry = saved.get(STATE_KEY, {})
        mode = self.gradients.mode
        self.settle()  # the state that is replaced owns what its collectives send
        self.gradients.zero()
        mode.load_state_dict({})
        problem = lost = degrees = scales = None
        now = self.config.plan.degrees()
        owners = mode.residual_owners()
        try:
            degrees = entry.get("degrees")
            if degrees == now and entry.get("residual_owners") == (owners and owners._asdict()):
                scales = entry.get("scales")
                mode.load_state_dict(entry.get("sync", {}))
            elif entry.get("sync"):
                # A residual depends on the set of peers and on the parameters that take part.
                lost = (
                    f"the checkpoint was saved under the degrees {degrees}, this run has {now}, or "
                    "ranks lie elsewhere, or other parameters take part: sync starts without each "
                    'rank\'s residual; a universal checkpoint and "zero-topo carry" keep all'
                )
        except Exception as error:  # a damaged entry has any content
            problem = first_line(error)
        residuals, ages = carried(folder, self.parameters)
        moved = [sorted(residuals), sorted(ages)]
        facts = {"degrees": degrees, "problem": problem, "new": scales is None, "carried": moved}
        # All ranks or none: with a part of them restored, replicas would diverge.
        way_out = "look at their files of this checkpoint"
        if differ := all_can(None, facts, self.like.device, way_out):
            problem = differ
            scales = None
            residuals = {}
            ages = {}
        self.weights.load_scales(scales)
        if problem is not None:
            mode.load_state_dict({})
            lost = f"sync starts without the checkpoint's state on all ranks: {problem}"
        if lost is not None and dist.get_rank() == 0:
            logger.warning("zero_topo: %s", lost)
        if residuals:
            mode.inherit(residuals)
        if not ages:
            return None
        return age_rows(ages, self.layout, [p.name for p in self.parameters])

    def workload(self, micro_batches: int) -> Workload:
        """Describe the model for the cost formulas, with all gradients in one bucket."""
        work = Workload(
            **_of(self.parameters),
            itemsize=self.like.dtype.itemsize,
            micro_batches=micro_batches,
            scatter_itemsize=self.scatter_dtype.itemsize,
            sync_itemsize=self.gradients.mode.context.dtype.itemsize,
            run_numel=self.bucket_numel,
            published=self.weights.published(),
            loss_scaled=self._loss_scaled,
            trains=bool(self.parameters),
            whole=tuple(p.whole for p in self.parameters),
        )
        if not self._frozen:
            return work
        # Frozen parameters have no gradients: only gathers read them.
        frozen = replace(work, **_of(self._frozen), published=(), whole=())
        return replace(work, frozen=frozen)

    def weight_tensors(self) -> list[Tensor]:
        """Return the tensors that store weights, trained and frozen, without views of them."""
        return [tensor for each in self.sets for tensor in each.tensors()]

    def memory(self) -> dict[str, int]:
        """Return the bytes of the shards on this rank, without the optimizer's."""
        shards = self.weights.memory()
        for frozen in self.sets[1:]:
            shards["frozen"] = sum(frozen.memory().values())
        shards["gradients"] = self.gradients.buffer.nbytes
        residual = self.gradients.mode.state_bytes()
        if residual:
            shards["residual"] = residual
        return shards


def _of(parameters: Sequence[Parameter]) -> dict[str, Any]:
    """Return the fields of a ``Workload`` that list parameters."""
    return {
        "numels": tuple(p.numel for p in parameters),
        "dims": tuple(p.dims for p in parameters),
        "persistent": tuple(p.persistent for p in parameters),
        "lowered": tuple(p.sent is not None for p in parameters),
    }
