# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The base class of the modes of ``sync``, and the registry from config block to class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.config import ResolvedConfig
from zero_topo.config.modes import AGED_REFUSED
from zero_topo.mesh import Hierarchy, Mesh
from zero_topo.plan import Plan, packed_runs
from zero_topo.quant.operands import DTYPES, Range, View, merged, range_views
from zero_topo.sync.optimizers import AgedAdamW


@dataclass(frozen=True)
class Parameter:
    """Describes a parameter to the engine and its mode of sync.

    Attributes:
        name: its name in the model.
        numel: its number of elements.
        dims: its number of dimensions.
        shard_range: its columns in a gradient shard, set once the layout exists.
        persistent: whether it is a persistent parameter of DeepSpeed.
        place: its position in the order in which the model needs the parameters.
        whole: whether the optimizer's update is a function of the whole matrix (Muon).
        sent: the lower dtype in which unquantized weights and gradients are sent (DeepSpeed's
            ``torch_autocast``); None is the model's dtype for weights, and ``scatter_dtype`` for
            gradients.
    """

    name: str
    numel: int
    dims: int
    shard_range: Range = (0, 0)
    persistent: bool = False
    place: int = 0
    whole: bool = False
    sent: torch.dtype | None = None


class ResidualOwners(NamedTuple):
    """The layout of a residual ``[P, C]``: the owner of each row, and the columns of each
    parameter.

    Attributes:
        owners: by row, the rank whose world shard it belongs to.
        parameters: by name: number of elements, first column, and column past the end.
    """

    owners: list[int]
    parameters: dict[str, tuple[int, int, int]]


class Moment(NamedTuple):
    """The optimizer's momentum of some whole parameters.

    Attributes:
        begin: the first column of these parameters.
        mean: the momentum of this rank's optimizer rows, FP32 ``[N / O, width]``; a view, on any
            device.
        beta: its decay rate.
    """

    begin: int
    mean: Tensor
    beta: float


@dataclass(frozen=True)
class SyncContext:
    """The parts of the engine that a mode uses.

    Attributes:
        config: the plan and the mode.
        mesh: has the groups ``(gradients, world)`` and ``(optimizer, world)``.
        shard: the rank's gradient shard ``[N / G, F]``, initially zero.
        loss_scaled: whether a loss scaler multiplies the gradients, and skips steps in normal
            operation (FP16).
        parameters: all trained parameters, in the order of their columns.
        moments: returns the optimizer's momentum; empty before its first step.
        run_numel: parameter elements per run; None for all.
    """

    config: ResolvedConfig
    mesh: Mesh
    shard: Tensor
    loss_scaled: bool
    parameters: tuple[Parameter, ...]
    moments: Callable[[], Sequence[Moment]]
    run_numel: int | None
    # By what :meth:`views` is called with. The tensors of views share the shard's storage.
    _views: dict[Any, list[View]] = field(default_factory=dict, init=False, repr=False)

    def views(self, rows: Tensor, ranges: Sequence[Range], block: int = 1) -> list[View]:
        """Return :func:`range_views` of a run, made once: in each step that takes longer than a
        launch.

        Args:
            rows: rows of the shard, a view of it.
            ranges: ranges of columns; neighbours become one view.
            block: elements of a block.
        """
        key = rows.storage_offset(), rows.shape, rows.stride(), tuple(ranges), block
        if key not in self._views:
            self._views[key] = range_views(rows, merged(ranges, block), block)
        return self._views[key]

    @cached_property
    def plan(self) -> Plan:
        """The degrees."""
        return self.config.plan

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which dense values are sent."""
        name = getattr(self.config.sync, "dtype", None)
        return DTYPES[name] if name else self.shard.dtype

    @cached_property
    def runs(self) -> tuple[tuple[Range, ...], ...]:
        """The shard ranges of each run for which :meth:`SyncMode.start` is called."""
        ranges = tuple(p.shard_range for p in self.parameters)
        padded = [self.plan.world_size * (end - begin) for begin, end in ranges]
        runs = packed_runs(padded, self.run_numel)
        return tuple(ranges[run.start : run.stop] for run in runs)

    @property
    def columns(self) -> int:
        """``F``, columns of the gradient shard."""
        return self.shard.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the gradient shard."""
        return self.shard.device

    @property
    def own_row(self) -> int:
        """Index of the rank's own world shard among the rows of the gradient shard."""
        return self.plan.row(self.mesh.rank, self.plan.gradients)

    def across(self, degree: int) -> Hierarchy:
        """Return the process groups of a collective from shards of ``degree`` to world shards."""
        *inner, last = self.mesh.hierarchy(degree, self.plan.world_size).groups
        # Ok-Topk alone can take MPI between gradient domains.
        if getattr(self.config.sync, "transport", None) == "mpi":
            last = self.mesh.over_mpi(last)
        return Hierarchy((*inner, last)).metered("sync")


class SyncMode:
    """One way to reduce gradient shards across gradient domains.

    In each optimizer step the engine calls :meth:`start` once per run of parameters, in one order
    on all ranks. It waits for all handles before the optimizer reads the gradients, and calls
    :meth:`commit` at the end. If :attr:`wants_updates` is true after that wait, the engine calls
    :meth:`after_update` before :meth:`commit`.

    Attributes:
        residual_in_shard: whether the mode's residual stays in the gradient shard from one step to
            the next.
        steps: number of steps synced and not skipped, in modes whose first steps differ from later
            ones.
        waits: whether elements that are not sent wait for a later step; a sum of exactly zero then
            means that nothing arrived.
    """

    residual_in_shard = False
    steps = 0
    waits = False

    def __init__(self, context: SyncContext) -> None:
        self.context = context

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Begin to reduce some parameters, in place.

        Args:
            shard: the context's shard: this gradient domain's sum, divided by N, times the loss
                scale. After a wait for the handle, the rows of the rank's optimizer shard are the
                sum over all gradient domains.
            ranges: shard ranges (columns), one for each parameter.
            scale: the loss scale. State is stored unscaled.
        """
        raise NotImplementedError

    def reopen(self, shard: Tensor, ranges: Sequence[Range]) -> None:
        """Prepare a finished run for another :meth:`start` in this step, with more gradients.

        The delivered sum stays in the rank's own row; the other rows keep only undelivered values.
        """
        own = self.context.own_row
        for begin, end in merged(ranges):
            # The own row has the delivered sum, to which further gradients are added.
            shard[:own, begin:end].zero_()
            shard[own + 1 :, begin:end].zero_()

    def commit(self, skipped: bool) -> None:
        """End a step: empty the gradient shard after an optimizer step, a skipped step, or dropped
        gradients.

        Args:
            skipped: whether the gradients were not used: state then stays unchanged, but a residual
                in the gradient shard is lost.
        """
        self.context.shard.zero_()

    # -- around the optimizer's step; most modes do nothing here -----------------------------------

    @property
    def wants_updates(self) -> bool:
        """Whether the engine calls :meth:`after_update` in this step; equal on all ranks of a group
        across domains.
        """
        return False

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for an optimizer that the mode does not support."""
        if isinstance(optimizer, AgedAdamW) and not self.waits:
            raise ValueError(f"optimizer AgedAdamW: {AGED_REFUSED}")

    def before_update(self, begin: int, width: int) -> None:
        """Hook before the optimizer updates the masters of some whole parameters; not called in a
        skipped step.

        Args:
            begin: the first column of these parameters.
            width: their number of columns.
        """

    def after_update(self, begin: int, old: Tensor, new: Tensor, rate: float) -> None:
        """Hook after the optimizer has updated the masters of some whole parameters; not called in
        a skipped step.

        Args:
            begin: the first column of these parameters.
            old: the rank's own row of the masters before the update, FP32 ``[width]`` on the
                optimizer's device.
            new: the row after the update; the hook must neither change nor keep ``old`` and
                ``new``.
            rate: the learning rate, equal on all ranks.
        """

    def drain(self) -> None:
        """Wait for collectives that :meth:`commit` has begun; collective."""

    # -- state -------------------------------------------------------------------------------------

    def note(self) -> str | None:
        """Return a log line about a choice made for the user, or None."""
        return None

    def residual_owners(self) -> ResidualOwners | None:
        """Return the layout of the entry "residual" of :meth:`state_dict`; None if unknown or
        without a residual.
        """
        return None

    def inherit(self, sums: Mapping[str, Tensor]) -> None:
        """Set the residual to a share of the summed residuals of another run's peers.

        Args:
            sums: name of a parameter -> FP32 ``[numel]``, the sum over those peers; equal on all
                ranks.

        Raises:
            ValueError: if this mode has no residual.
        """
        raise ValueError(
            "the checkpoint has residuals of sync, but this sync mode keeps none; set the same "
            "mode, or delete zero_topo_residuals.pt from the checkpoint to drop them"
        )

    def report(self) -> dict[str, float]:
        """Return this rank's numbers of the last step: densities, norms, counts."""
        return {}

    def state_bytes(self) -> int:
        """Return the bytes of this rank's state (residuals, masks)."""
        return 0

    def tensors(self) -> list[Tensor]:
        """Return the tensors that persist between steps; call :meth:`drain` first."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict`; an empty one resets the state.

        Raises:
            ValueError: for state of another mode or of other shapes.
        """
        if state:
            raise ValueError(
                f"this sync mode keeps no state, but the checkpoint carries {sorted(state)}"
            )


@singledispatch
def build_mode(config: object, context: SyncContext) -> SyncMode:
    """Build the mode of a config block; each mode registers itself by the type of its block.

    Raises:
        ValueError: if no mode is registered for the block.
    """
    raise ValueError(f"no sync mode is registered for {type(config).__name__}")
