# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a mode of ``sync`` is, and how the config's block finds its class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from zero_topo.collectives.meter import Counted, Meter
from zero_topo.collectives.queue import Handle
from zero_topo.config import AGED_REFUSED
from zero_topo.mesh import Mesh, Route
from zero_topo.plan import Plan
from zero_topo.quant.operands import Range, merged
from zero_topo.sync.optimizers import AgedAdamW


@dataclass(frozen=True)
class Parameter:
    """A parameter as the engine and its mode of sync see it.

    Attributes:
        name: in the model.
        numel: its elements.
        dims: of its shape.
        span: its columns of a gradient shard, once there is one.
        persistent: whether DeepSpeed keeps it whole.
        place: in the order in which the model needs the parameters.
    """

    name: str
    numel: int
    dims: int
    span: Range = (0, 0)
    persistent: bool = False
    place: int = 0


class ResidualOwners(NamedTuple):
    """Whose elements a residual ``[P, C]`` holds.

    Attributes:
        owners: of each row, the rank whose world shard it is of.
        parameters: by name: elements, and the range of columns.
    """

    owners: list[int]
    parameters: dict[str, tuple[int, int, int]]


class Moment(NamedTuple):
    """What the optimizer remembers of the gradients of some whole parameters.

    Attributes:
        begin: the first of their columns.
        mean: FP32 ``[N / O, width]``, the decaying mean of this rank's optimizer rows; a view, on any device.
        beta: its decay rate.
    """

    begin: int
    mean: Tensor
    beta: float


@dataclass(frozen=True)
class SyncContext:
    """What a mode needs to know of the engine.

    Attributes:
        plan: the degrees.
        mesh: holds the routes ``(gradients, world)`` and ``(optimizer, world)``.
        meter: counts the bytes sent under phase "sync".
        dtype: type in which dense values travel.
        shard: ``[N / G, F]``, the rank's gradient shard, zero at first.
        loss_scaled: whether a loss scaler multiplies the gradients, and skips steps as a matter of course (FP16).
        parameters: all of them, in the order of their columns.
        moments: what the optimizer remembers now; empty before its first step.
        mpi: whether MPI carries what crosses gradient domains.
    """

    plan: Plan
    mesh: Mesh
    meter: Meter
    dtype: torch.dtype
    shard: Tensor
    loss_scaled: bool
    parameters: tuple[Parameter, ...]
    moments: Callable[[], Sequence[Moment]]
    mpi: bool

    @property
    def columns(self) -> int:
        """``F``, columns of the gradient shard."""
        return self.shard.shape[1]

    @property
    def device(self) -> torch.device:
        """Of the gradient shard."""
        return self.shard.device

    @property
    def own_row(self) -> int:
        """Of the gradient shard: that of the rank's own world shard."""
        return self.plan.row(self.mesh.rank, self.plan.gradients)

    def across(self, degree: int) -> Route:
        """The way from shards of so high a degree to those of the world."""
        *inner, last = self.mesh.route(degree, self.plan.world_size).hops
        return Route((*inner, self.mesh.over_mpi(last) if self.mpi else last))

    @property
    def counted(self) -> Counted:
        """How a mode's exchanges are counted."""
        return Counted(self.meter, "sync")


class SyncMode:
    """One way to reduce gradient shards across gradient domains.

    Per optimizer step the engine calls :meth:`start` once for every run of parameters, in any order but the same on
    every rank, waits for all handles before the optimizer reads the gradients, and calls :meth:`commit` at the end.
    A mode that says :attr:`wants_updates` after that wait is shown the optimizer's updates before :meth:`commit`.

    Attributes:
        owes_in_shard: whether what this mode owes stays in the gradient shard from one step to the next.
        steps: how many were synced and not skipped, in modes that begin otherwise than they go on.
        waits: whether what is not sent waits for a later step, and a sum of exactly zero means that nothing came.
    """

    residual_in_shard = False
    steps = 0
    waits = False

    def __init__(self, context: SyncContext) -> None:
        self.context = context

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Begin to reduce some parameters, in place.

        Args:
            shard: that of the context: this gradient domain's sum, divided by N, times the loss scale. Once the handle
                has been waited for, the rows of the rank's optimizer shard hold the sum over all gradient domains.
            ranges: shard ranges (columns), one for each parameter.
            scale: the loss scale. State is kept without it.
        """
        raise NotImplementedError

    def reopen(self, shard: Tensor, ranges: Sequence[Range]) -> None:
        """A run that has been started and waited for will be started again in this step, with more gradients.

        What has been delivered stays in the rank's own row; the other rows keep only what has not.
        """
        own = self.context.own_row
        for begin, end in merged(ranges):
            shard[:own, begin:end].zero_()
            shard[own + 1 :, begin:end].zero_()

    def commit(self, skipped: bool) -> None:
        """The optimizer has stepped, or skipped the step, or the gradients are dropped: empty the gradient shard.

        Args:
            skipped: as if the gradients had never been: state stays as it was, but for what lay among them.
        """
        self.context.shard.zero_()

    # -- around the optimizer's step; most modes do nothing here -----------------------------------------------------

    @property
    def wants_updates(self) -> bool:
        """Whether :meth:`after_update` shall be called in this step; alike on all ranks of a hop across domains."""
        return False

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that the mode cannot work with.

        Raises:
            ValueError: if it cannot.
        """
        if isinstance(optimizer, AgedAdamW) and not self.waits:
            raise ValueError(f"optimizer AgedAdamW: {AGED_REFUSED}")

    def before_update(self, begin: int, width: int) -> None:
        """The optimizer will update the masters of some whole parameters now; the step is not skipped.

        Args:
            begin: the first of their columns.
            width: how many there are.
        """

    def after_update(self, begin: int, old: Tensor, new: Tensor, rate: float) -> None:
        """The optimizer has updated the masters of some whole parameters; the step is not skipped.

        Args:
            begin: the first of their columns.
            old: FP32 ``[width]`` on the optimizer's device: the rank's own row of the masters as it was.
            new: the same row as it is now; neither may be changed or kept.
            rate: the learning rate, alike on all ranks.
        """

    def drain(self) -> None:
        """Wait for what :meth:`commit` has begun; collective."""

    # -- state -------------------------------------------------------------------------------------------------------

    def note(self) -> str | None:
        """What was chosen for the user, if anything was."""
        return None

    def residual_owners(self) -> ResidualOwners | None:
        """Whose elements the entry "residual" of :meth:`state_dict` holds; None if it is not known or there is none."""
        return None

    def inherit(self, sums: Mapping[str, Tensor]) -> None:
        """Take a share of the residuals of another run's peers.

        Args:
            sums: name of a parameter -> FP32 ``[numel]``, the sum over those peers; alike on all ranks.

        Raises:
            ValueError: if this mode keeps no residual.
        """
        raise ValueError(
            "the checkpoint carries residuals of sync, but this sync mode keeps none; set the same mode, or "
            "delete zero_topo_owed.pt from the checkpoint to lose what they hold"
        )

    def take_over(self, residual: Tensor, saved: ResidualOwners) -> int:
        """Take over this rank's residual of another plan of the same ranks, as far as it has a place here.

        Args:
            residual: the entry "residual" of that plan's :meth:`state_dict`.
            saved: whose rows they are.

        Returns:
            How many rows have none, of those that are not zero.
        """
        return int(residual.view(len(saved.owners), -1).any(1).sum())

    def report(self) -> dict[str, float]:
        """What a user may want to know of the last step: densities, norms, counts; this rank's own."""
        return {}

    def state_bytes(self) -> int:
        """Bytes of state (residuals, masks) this rank keeps."""
        return 0

    def tensors(self) -> list[Tensor]:
        """What is kept from step to step; settled first (:meth:`drain`)."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """State to save with a checkpoint, this rank's own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned; an empty one means a fresh start.

        Raises:
            ValueError: for state of another mode or of other shapes.
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
