# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The engines of one model: one for each set of ranks over which DeepSpeed partitions parameters.

DeepSpeed partitions parameters over the data-parallel group, and AutoEP's experts over the smaller
expert-data-parallel group. A sub-group and a bucket have parameters of one process group only, so
each belongs to one engine. Without experts there is one engine, and nothing here adds a collective
or a kernel to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from zero_topo.config import ResolvedConfig
from zero_topo.config.modes import SPARSE_MODES
from zero_topo.engine.agreement import checksum
from zero_topo.engine.masters import clean
from zero_topo.engine.residual_transfer import STATE_KEY
from zero_topo.engine.stage3 import Stage3
from zero_topo.engine.weights import Weights
from zero_topo.hook.parameters import ParameterGathers, by_plan
from zero_topo.quant.operands import counted
from zero_topo.sync import AgedAdamW

REPLICATED = "replicated"
"""Phase of the meter, and its domain: the gradients of parameters that tensor-parallel ranks all
have.
"""


@dataclass
class EnginePart:
    """Parameters that DeepSpeed partitions over one set of ranks, and their engine.

    Attributes:
        topo: the engine.
        gathers: serves the parameters' calls from it.
        sub_groups: DeepSpeed's sub-groups of these parameters, ascending.
        key: name of the engine's state in checkpoints.
    """

    topo: Stage3
    gathers: ParameterGathers
    sub_groups: tuple[int, ...]
    key: str


@dataclass
class Parts:
    """The engines of an optimizer.

    Attributes:
        parts: the first is that of the data-parallel group.
        columns: for each sub-group, its first and its end column in its engine.
    """

    parts: list[EnginePart] = field(default_factory=list)
    columns: list[tuple[int, int]] = field(default_factory=list)
    _replicated: Replicated | None = None

    def build(
        self,
        optimizer: Any,
        configs: Sequence[ResolvedConfig],
        moments: Callable[[Sequence[int]], Any],
        loss_scale: Callable[[], float],
    ) -> None:
        """Build the engines of a DeepSpeed optimizer, and copy its flat buffers into their rows.
        Collective.

        Args:
            optimizer: the stage-3 optimizer, which has built its flat buffers of weights.
            configs: the plans: of the data-parallel group, and with AutoEP of the experts.
            moments: returns the torch optimizer's momentum of some sub-groups.
            loss_scale: returns the current loss scale.
        """
        stock = list(optimizer.fp16_partitioned_groups_flat)
        names = optimizer.param_names
        dtype = optimizer.lp_param_buffer.dtype
        found = dict[int, tuple[int, int]]()
        for config, params in by_plan(optimizer.module, names, configs):
            ids = {param.ds_id for param in params}
            groups = enumerate(optimizer.fp16_groups)
            mine = tuple(index for index, group in groups if group[0].ds_id in ids)
            trained = [param for index in mine for param in optimizer.fp16_groups[index]]
            gathers = ParameterGathers(optimizer.module, trained, names, dtype, params)
            described = gathers.described()
            read_moments = partial(moments, mine)
            if not self.parts:
                topo = Stage3(
                    config,
                    *described,
                    # Not a view: the old buffer must be freed
                    like=optimizer.lp_param_buffer.new_empty(0),
                    scatter_dtype=optimizer.communication_data_type,
                    accumulation_dtype=optimizer.gradient_accumulation_dtype,
                    bucket_numel=optimizer.reduce_bucket_size,
                    loss_scale=loss_scale,
                    moments=read_moments,
                )
            else:
                # Experts share queues and meter with the dense engine, so that collectives begin in
                # one order.
                topo = self.parts[0].topo.alongside(config, *described, read_moments)
            key = f"{STATE_KEY}_{config.groups.name}" if self.parts and config.groups else STATE_KEY
            self.parts.append(EnginePart(topo, gathers, mine, key))
            ends = accumulate([stock[index].numel() for index in mine], initial=0)
            found |= zip(mine, pairwise(ends), strict=True)
        self.columns[:] = [found[index] for index in range(len(found))]
        for own, flat in zip(self.flats(), stock, strict=True):
            own.copy_(flat)
        self._replicated = replicated_of(self.parts[0], optimizer.model_parallel_group)

    def __iter__(self) -> Iterator[EnginePart]:
        return iter(self.parts)

    @property
    def param_indices(self) -> dict[int, int]:
        """``ds_id`` -> parameter index in its set of weights, trained or frozen."""
        return {
            ds_id: param_index
            for part in self.parts
            for ds_id, param_index in part.gathers.param_indices.items()
        }

    def _part_of(self, param: Any) -> EnginePart:
        # Experts are in another engine than dense parameters.
        for part in self.parts:
            if param.ds_id in part.gathers.param_indices:
                return part
        raise KeyError(param.ds_id)

    def of(self, param: Any) -> Stage3:
        """Return the engine of a parameter that follows a plan."""
        return self._part_of(param).topo

    def weights_of(self, param: Any) -> Weights:
        """Return the set of weights to which a parameter that follows a plan belongs."""
        return self._part_of(param).gathers.weights_of(param)

    def at(self, sub_group: int) -> Stage3:
        """Return the engine of a sub-group."""
        return next(part.topo for part in self.parts if sub_group in part.sub_groups)

    def flats(self) -> list[Tensor]:
        """Return for each sub-group the view of its weights in the own row of its engine."""
        rows = [self.at(index).weights.own_row for index in range(len(self.columns))]
        return [row[begin:end] for row, (begin, end) in zip(rows, self.columns, strict=True)]

    def own_param_index(self, param: Any) -> Tensor:
        """Return the view of a parameter's gradient in the own row of its engine."""
        part = self._part_of(param)
        gradients = part.topo.gradients
        param_index = part.gathers.param_indices[param.ds_id]
        return gradients.layout.parameter(gradients.own_row[None], param_index)[0]

    def own_gradient(self, sub_group: int) -> Tensor:
        """Return a sub-group's gradients in the own row of its engine, ``[columns]``."""
        begin, end = self.columns[sub_group]
        return self.at(sub_group).gradients.own_row[begin:end]

    def own_offset(self, sub_group: int) -> int:
        """Return the elements before the row of DeepSpeed's layout in a sub-group's masters."""
        begin, end = self.columns[sub_group]
        return self.at(sub_group).masters.own_row * (end - begin)

    def gradient_rows(self, sub_group: int) -> Tensor:
        """Return a sub-group's columns of the synced gradient of the optimizer shard,
        ``[N / O, columns]``.
        """
        begin, end = self.columns[sub_group]
        return self.at(sub_group).gradients.optimizer_rows()[:, begin:end]

    def trained(self) -> list[Any]:
        """Return the parameters that the optimizer updates."""
        return [param for part in self.parts for param in part.gathers.trained]

    # -- a step ------------------------------------------------------------------------------------

    def finish_scatter(self) -> None:
        """Finish the scatter of the last bucket, in one order of engines on all ranks."""
        for part in self.parts:
            part.topo.gradients.finish_scatter()

    def sync(self) -> None:
        """Reduce gradients across nodes, in one order of engines on all ranks."""
        for part in self.parts:
            part.topo.gradients.sync()
        if self._replicated is not None:
            self._replicated.average()

    def track_overflow(self, tracker: Tensor) -> None:
        """Set DeepSpeed's flag if a gradient is not finite; DeepSpeed itself checks the first
        engine's alone.

        Args:
            tracker: a boolean on the accelerator, which DeepSpeed reduces over all ranks and clears
                in the step.
        """
        # Its own flat buffer is the row of the first engine.
        for part in self.parts[1:]:
            tracker.logical_or_(~part.topo.gradients.own_row.isfinite().all())

    def end_step(self, skipped: bool, masters: Sequence[Tensor]) -> None:
        """End an optimizer step; the first engine comes last, because it ends the step of the
        meter.

        Args:
            skipped: whether the step was skipped.
            masters: the FP32 masters, one for each sub-group.
        """
        for part in reversed(self.parts):
            part.topo.end_step(skipped)
        topo = self.parts[0].topo
        if topo.config.debug_checks and self._replicated is not None:
            self._replicated.check([masters[index] for index in self.parts[0].sub_groups])

    def finish(self) -> None:
        """Finish publish, which reads the masters. Collective."""
        for part in self.parts:
            part.topo.weights.wait_for_publish()

    def settle(self) -> None:
        """Finish pending work. Collective."""
        for part in self.parts:
            part.topo.settle()

    # -- checkpoints -------------------------------------------------------------------------------

    @contextmanager
    def narrowed(
        self,
        masters: list[Tensor],
        optimizer: torch.optim.Optimizer,
        share: bool,
    ) -> Iterator[list[Tensor]]:
        """Present masters and optimizer states of all engines in DeepSpeed's layout; see
        :class:`Masters`.
        """
        found = dict[int, Tensor]()
        with ExitStack() as stack:
            for part in self.parts:
                own = [masters[index] for index in part.sub_groups]
                narrow = stack.enter_context(part.topo.masters.narrowed(own, optimizer, share))
                found |= zip(part.sub_groups, narrow, strict=True)
            yield [found[index] for index in range(len(masters))]

    def clean(self, masters: Sequence[Tensor], state: Any) -> None:
        """Zero the padding of masters and optimizer states in DeepSpeed's layout after a load."""
        for part in self.parts:
            clean(part.topo.layout, [masters[index] for index in part.sub_groups], state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all engines beyond DeepSpeed's own."""
        found = dict[str, Any]()
        for part in self.parts:
            for state in part.topo.state_dict().values():
                found[part.key] = state
        return found

    def load_state_dict(
        self,
        saved: Mapping[str, Any],
        folder: str | None,
        masters: Sequence[Tensor],
        optimizer: Any,
    ) -> None:
        """Restore the engines after DeepSpeed has restored masters and optimizer states.
        Collective.

        Args:
            saved: DeepSpeed's dictionary of this rank.
            folder: the checkpoint's folder.
            masters: the FP32 masters, one for each sub-group.
            optimizer: torch's optimizer.
        """
        for part in self.parts:
            topo = part.topo
            row = topo.weights.own_row
            entry = {STATE_KEY: saved[part.key]} if part.key in saved else {}
            ages = topo.load_state_dict(entry, folder)
            rows = []
            for index in part.sub_groups:
                begin, end = self.columns[index]
                if ages is not None and isinstance(optimizer, AgedAdamW):
                    age = ages[:, begin:end].reshape(-1)
                    optimizer.state[masters[index]]["age"] = age.to(masters[index].device)
                rows.append(topo.masters.table(masters[index].detach())[topo.masters.own_row])
            own_row = torch.cat(rows) if rows else row.new_empty(0)
            topo.restart(own_row.to(row.device, torch.float32))

    def destroy(self) -> None:
        """Destroy the engines, and drop all references to them. Collective."""
        for part in self.parts:
            part.topo.destroy()
        self.parts.clear()
        self._replicated = None


class Replicated:
    """Keeps parameters equal that tensor-parallel ranks all have: norms, biases, often embedding
    and head.

    What a sparse mode of sync sends of a parameter depends on the other elements of its run, which
    differ between tensor-parallel ranks. Replicas would therefore drift apart. After sync their
    gradients are averaged over these ranks: a mean keeps the sum that the ranks' residuals
    conserve, a broadcast would not. Other modes treat each parameter alone, so replicas stay equal
    without this.

    Args:
        topo: the engine.
        param_indices: the replicated parameters, in flat order.
        group: DeepSpeed's tensor-parallel group of this rank.
    """

    def __init__(
        self,
        topo: Stage3,
        param_indices: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self._topo = topo
        self._group = group
        self._shard_ranges = topo.layout.shard_ranges(param_indices)
        self._names = [topo.parameters[param_index].name for param_index in param_indices]
        self._sparse = isinstance(topo.config.sync, SPARSE_MODES)

    def average(self) -> None:
        """Average the synced gradients of the optimizer's rows over the tensor-parallel ranks, if
        sync is sparse.
        """
        if not self._sparse or not self._shard_ranges:
            return
        rows = self._topo.gradients.optimizer_rows()
        size = dist.get_world_size(self._group)
        views = [rows[:, begin:end] for begin, end in self._shard_ranges]
        meter = self._topo.meter
        with meter.timing(REPLICATED):
            flat = torch.cat([view.reshape(-1) for view in views]).float()
            dist.all_reduce(flat, group=self._group)  # the step's stream has waited for sync
            # An all-reduce sends each element twice, except this rank's own part.
            meter.record(REPLICATED, REPLICATED, 2 * (size - 1) * flat.nbytes // size)
            flat /= size
            for view, mean in zip(views, flat.split([view.numel() for view in views]), strict=True):
                view.copy_(mean.view_as(view))

    def check(self, masters: Sequence[Tensor]) -> None:
        """Compare the masters of replicated parameters over the tensor-parallel ranks. Collective.

        Args:
            masters: the FP32 masters of this engine's sub-groups.

        Raises:
            RuntimeError: on every rank, naming a parameter that differs.
        """
        if not self._shard_ranges:
            return
        device = self._topo.like.device
        tables = [self._topo.masters.table(master.detach()) for master in masters]
        table = torch.cat([rows.to(device) for rows in tables], 1)
        sums = torch.stack([checksum(table[:, begin:end]) for begin, end in self._shard_ranges])
        least = sums.clone()
        most = sums.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        count = len(self._names)
        places = counted(count, sums)
        # The number of the first that differs, or how many there are if none does.
        first = torch.where(least == most, count, places).min()
        dist.all_reduce(first, dist.ReduceOp.MIN)  # of all groups, so that every rank raises
        if int(first) < count:
            raise RuntimeError(
                f"{self._names[int(first)]} is replicated on tensor-parallel ranks but has "
                "different bits there after the step: the run is no longer valid; restart from the "
                "last checkpoint and report this with your configuration"
            )


def replicated_of(part: EnginePart, group: dist.ProcessGroup | None) -> Replicated | None:
    """Return what keeps a part's replicated parameters equal; None without tensor parallelism.

    Raises:
        ValueError: for a sparse mode if tensor-parallel ranks are placed in different orders: rows
            of several owners would not be those of the same elements.
    """
    if group is None or dist.get_world_size(group) == 1:
        return None
    config = part.topo.config
    # A row of the table then has other elements on each tensor-parallel rank.
    orders = {tree.order for tree in config.groups.trees} if config.groups else set()
    if len(orders) > 1 and isinstance(config.sync, SPARSE_MODES):
        raise ValueError(
            f'sync.mode = "{config.sync.MODE}": the data-parallel groups of tensor-parallel ranks '
            "are placed in "
            'different orders on the machine; place ranks node by node, or use sync.mode "dense" '
            'or "quantized"'
        )
    alike = []
    for param in part.gathers.trained:
        # Experts may be sharded over the data-parallel group, too; each tensor-parallel rank has
        # others.
        expert = getattr(param, "ds_zero_partition_group_name", None) is not None
        if not expert and not is_model_parallel_parameter(param):
            alike.append(part.gathers.param_indices[param.ds_id])
    return Replicated(part.topo, alike, group)
