# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The part of each FSDP2 shard that a rank's optimizer updates.

Parts of a shard
    FSDP2 stores rows of dimension 0 of a parameter on each of the ``W`` ranks of a mesh. The ``N /
    W`` ranks that store the same rows divide them among their optimizers: ``O / W`` parts of as
    many rows each, the last ones smaller or empty, and each part on ``N / O`` ranks. That is how
    DTensor divides rows, so optimizer states are DTensors with the shape of the parameter on the
    mesh of ``state_mesh``, and a checkpoint's reader needs to know nothing of ours.

    In the gradient shard ``[N / W, F]`` of ``zero_topo.sync`` a parameter has ``width`` columns.
    Row ``a * O / W + b`` has the ``a``-th stretch of part ``b``: a row is summed by one rank, and
    all rows of a part go to its optimizers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

from zero_topo.plan import Plan
from zero_topo.quant.operands import View

PLACEMENTS = (Shard(0), Shard(0), Replicate())


class Part:
    """The elements of one parameter that this rank's optimizer updates.

    Args:
        name: the parameter's name in the model.
        param: the parameter, a DTensor with a shard of FSDP2.
        plan: the degrees.
        mesh: of the optimizer's states.

    Attributes:
        degree: ranks that share the optimizer states.
        width: columns of the parameter in a gradient shard.
        part_numel: elements of a full part.
        numel: elements of this rank's part.
        master: the FP32 weights of the part, flat and zero-padded to whole rows: what the optimizer
            updates.
        param_index: parameter index in the gradient shard; None if FSDP2 stores nothing of the
            parameter on this rank.
    """

    param_index: int | None = None

    def __init__(self, name: str, param: nn.Parameter, plan: Plan, mesh: DeviceMesh) -> None:
        self.name = name
        self.param = param
        self.degree = plan.optimizer
        self._mesh = mesh
        self._parts = plan.optimizer // plan.weights
        self._copies = plan.world_size // plan.optimizer
        rows, *rest = self.local().shape
        row_numel = torch.Size(rest).numel()
        part_rows = -(-rows // self._parts)
        self.shard_range = part_rows * row_numel
        self.width = -(-self.shard_range // self._copies)
        self._begin = mesh.get_local_rank("part") * self.shard_range
        own_rows = min(max(rows - mesh.get_local_rank("part") * part_rows, 0), part_rows)
        self.shape = (own_rows, *rest)
        self.numel = own_rows * row_numel
        padded = self.local().new_zeros(self._copies * self.width, dtype=torch.float32)
        padded[: self.numel] = self.own(self.local().view(-1))
        self.master = nn.Parameter(padded)
        self.remember()

    @torch.no_grad()
    def local(self) -> Tensor:
        """Return FSDP2's shard of the parameter on this rank."""
        assert isinstance(self.param, DTensor)
        return self.param.to_local()

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a flat shard, a view."""
        return flat[self._begin : self._begin + self.numel]

    @torch.no_grad()
    def follow_edits(self) -> None:
        """Overwrite masters whose stored weight the user has changed since :meth:`remember`."""
        weights = self.own(self.local().view(-1))
        masters = self.master[: self.numel]
        edited = weights != self._published
        masters.copy_(torch.where(edited, weights.to(masters.dtype), masters))

    def remember(self) -> None:
        """Copy the part of the stored weights, by which :meth:`follow_edits` finds edits."""
        self._published = self.own(self.local().view(-1)).clone()

    def add(self, columns: Tensor, shard: Tensor, factor: float) -> None:
        """Add a shard's gradient, times ``factor``, to its columns of the gradient shard."""
        flat = shard.reshape(-1)
        rows = _padded(flat, self._parts * self.shard_range).view(self._parts, self.shard_range)
        rows = _padded(rows, self._copies * self.width)
        table = rows.view(self._parts, self._copies, self.width)
        places = columns.unflatten(0, (self._copies, self._parts))
        places.add_(table.transpose(0, 1), alpha=factor)

    def show(self, flat: Tensor) -> None:
        """Set ``param.grad`` to a flat part of the synced gradient, of which it is a view."""
        if flat.dtype != self.param.dtype:
            self.param.grad_dtype = None  # torch then allows a gradient of another type
        self.param.grad = self.as_dtensor(flat)

    def take_gradient(self) -> None:
        """Give the master the parameter's gradient, if it has one, in FP32, zero-padded."""
        grad = self.param.grad
        self.master.grad = None
        if grad is not None:
            assert isinstance(grad, DTensor)
            own = self.from_dtensor(grad).float()
            self.master.grad = _padded(own, self.master.numel())

    def difference(self) -> Tensor:
        """Return masters minus stored weights, FP32."""
        return self.master.detach()[: self.numel] - self.own(self.local().view(-1))

    def row(self, index: int) -> Tensor:
        """Return a row ``[width]`` of the masters, as the gradient shard has it."""
        return self.master.detach().view(self._copies, self.width)[index]

    def stored(self, block: int) -> View:
        """Return the parts of all ranks in the stored weights, each padded to whole blocks."""
        local = self.local().view(-1)
        columns = -(-self.shard_range // block) * block
        return View(
            local, 1, columns, columns, self._parts, self.shard_range, present=self.shard_range
        )

    def view(self, flat: Tensor, block: int) -> View:
        """Return a flat part, padded to whole blocks."""
        columns = -(-self.shard_range // block) * block
        return View(flat, 1, columns, columns, present=self.shard_range)

    def as_dtensor(self, flat: Tensor) -> DTensor:
        """Return a flat part as a DTensor of the parameter's shape, which shares the memory."""
        local = flat[: self.numel].view(self.shape)
        size = self.param.size()
        stride = self.param.stride()
        return DTensor.from_local(
            local, self._mesh, PLACEMENTS, run_check=False, shape=size, stride=stride
        )

    def from_dtensor(self, value: DTensor) -> Tensor:
        """Return the flat part of a DTensor of :meth:`as_dtensor`, or with FSDP2's own shards.

        Raises:
            ValueError: for another layout.
        """
        flat = value.to_local().reshape(-1)
        if value.device_mesh == self._mesh and tuple(value.placements) == PLACEMENTS:
            return flat
        if flat.shape == self.local().view(-1).shape:
            return self.own(flat)
        raise ValueError(
            f"{self.name}: a tensor on {value.device_mesh} is not sharded as the states of the "
            "optimizer are; load checkpoints with torch.distributed.checkpoint"
        )


def _padded(rows: Tensor, width: int) -> Tensor:
    """Return rows of at least ``width`` elements, zero-padded where they are shorter."""
    missing = width - rows.shape[-1]
    return pad(rows, (0, missing)) if missing else rows
