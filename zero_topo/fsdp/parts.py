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

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

from zero_topo.fsdp.host import Host
from zero_topo.fsdp.part_tensor import PartTensor, part_range
from zero_topo.quant.operands import FLOATS, View, way_to_floats

PLACEMENTS = (Shard(0), Shard(0), Replicate())

WITHOUT_OPTIMIZER = (
    "it requires a gradient and the optimizer does not have it, so its gradient would not be "
    "reduced between nodes; freeze it by requires_grad_(False) before shard_optimizer, or give it "
    "a group with lr=0"
)


class Part:
    """The elements of one parameter that this rank's optimizer updates.

    Args:
        name: the parameter's name in the model.
        param: the parameter, with a shard of FSDP2.
        host: the attached model.

    Attributes:
        copies: ranks that update the same part.
        width: columns of the parameter in a gradient shard; 0 if FSDP2 stores nothing of it on this
            rank.
        shard_range: elements of a full part.
        numel: elements of this rank's part.
        master: the FP32 weights of the part, flat and zero-padded to whole rows: what the optimizer
            updates.
        published: the stored weights after the last publish, laid out like ``master``, if they are
            not the rounded master (quantized differences); else None.
        param_index: parameter index in the gradient shard, if it has columns there.
        begin: first column in the gradient shard.
        grad: what ``param.grad`` is, unless the user changes it; None without a gradient.
        synced: this rank's part of the gradient over the whole job, flat, once it is synced.
    """

    param_index = 0
    begin = 0
    grad: PartTensor | None = None
    synced: Tensor | None = None

    def __init__(self, name: str, param: DTensor, host: Host) -> None:
        plan = host.config.plan
        mesh = host.states
        self.name = name
        self.param = param
        self._host = host
        self._parts = plan.optimizer // plan.weights
        self.copies = plan.world_size // plan.optimizer
        rows, *rest = self.local().shape
        row_numel = torch.Size(rest).numel()
        part_rows = -(-rows // self._parts)
        self.shard_range = part_rows * row_numel
        self.width = -(-self.shard_range // self.copies)
        first_row, own_rows = part_range(rows, mesh)
        self._offset = first_row * row_numel
        self._shape = (own_rows, *rest)
        self.numel = own_rows * row_numel
        padded = _padded(self.weights(), self.copies * self.width)
        self.master = nn.Parameter(padded.float().clone())
        self.published = padded.clone() if host.config.publish_spec is not None else None

    # -- weights -----------------------------------------------------------------------------------

    @torch.no_grad()
    def local(self) -> Tensor:
        """Return FSDP2's shard of the parameter on this rank."""
        return self.param.to_local()

    def weights(self) -> Tensor:
        """Return this rank's part of the stored weights, a flat view."""
        return self._own(self.local().view(-1))

    def _own(self, flat: Tensor) -> Tensor:
        return flat[self._offset : self._offset + self.numel]

    def as_published(self) -> Tensor:
        """Return the weights that all ranks store for the masters, unless the user edits them."""
        if self.published is not None:
            return self.published[: self.numel]
        return self.master.detach()[: self.numel].to(self.param.dtype)

    @torch.no_grad()
    def follow_edits(self) -> None:
        """Overwrite masters whose stored weight is not :meth:`as_published`: the user changed it.

        Weights and masters of one checkpoint belong together by their values. They may be loaded in
        any order.
        """
        weights = self.weights()
        masters = self.master[: self.numel]
        masters.copy_(torch.where(weights == self.as_published(), masters, weights))

    def remember(self) -> None:
        """Copy the stored weights after a publish, if :meth:`as_published` needs them."""
        if self.published is not None:
            self.published[: self.numel].copy_(self.weights())

    def stored(self, block: int) -> View:
        """Return the parts of all ranks in the stored weights, each padded to whole blocks."""
        return self._view(self.local().view(-1), block, self._parts)

    def message(self, block: int) -> View:
        """Return what the rank sends of the part, padded to whole blocks: masters, or their
        difference to the stored weights, FP32.
        """
        flat = self.master.detach()
        if self.published is not None:
            flat = flat[: self.numel] - self.weights()
        return self._view(flat, block, 1)

    def _view(self, flat: Tensor, block: int, members: int) -> View:
        numel = self.shard_range
        columns = -(-numel // block) * block
        return View(flat, 1, columns, columns, members, numel, present=numel)

    # -- gradients ---------------------------------------------------------------------------------

    def columns(self, shard: Tensor) -> Tensor:
        """Return a view of the parameter's columns of any shard, ``[rows, width]``."""
        return shard[:, self.begin : self.begin + self.width]

    def rows(self, flat: Tensor) -> Tensor:
        """Return a flat padded part as rows, as the gradient shard has them: ``[N / O, width]``."""
        return flat.view(self.copies, self.width)

    def add(self, shard: Tensor, grad: Tensor, factor: float) -> None:
        """Add a gradient of FSDP2's shard, times ``factor``, to the gradient shard."""
        rows = _padded(grad.reshape(-1), self._parts * self.shard_range)
        rows = _padded(rows.view(self._parts, self.shard_range), self.copies * self.width)
        table = rows.view(self._parts, self.copies, self.width)
        places = self.columns(shard).unflatten(0, (self.copies, self._parts))
        places.add_(table.transpose(0, 1), alpha=factor)

    def store(self, shard: Tensor, own_row: int, grad: Tensor | None) -> None:
        """Overwrite the gradient shard by a flat part of the whole gradient, or by zeros.

        Rows of other ranks keep what sync has not delivered, if it was synced.
        """
        columns = self.columns(shard)
        if self.synced is None:
            columns.zero_()
        own = columns[own_row]
        if grad is None:
            own.zero_()
            return
        own.copy_(self.rows(grad)[own_row // self._parts])

    def show(self, rows: Tensor, read: Callable[[], Tensor]) -> None:
        """Set ``param.grad``, which calls ``read`` whenever it is read.

        Args:
            rows: the optimizer's rows of the gradient shard.
            read: returns this rank's part of the gradient, flat.
        """
        if rows.dtype != self.param.dtype:
            self.param.grad_dtype = None  # torch then allows a gradient of another type
        self.grad = self.lazily(rows.dtype, read)
        self.param.grad = self.grad

    def keep_synced(self, rows: Tensor) -> None:
        """Take the part of the optimizer's rows of the synced gradient."""
        own = self.columns(rows)
        # Of several rows always a copy; `reshape` would return a view of columns one element wide.
        self.synced = (own.clone() if self.copies > 1 else own).view(-1)

    def forget(self) -> None:
        """Unset ``param.grad``."""
        self.param.grad = self.grad = self.synced = None

    def take_gradient(self) -> None:
        """Give the master the parameter's gradient, if it has one, in FP32, zero-padded."""
        grad = self.param.grad
        self.master.grad = None
        if grad is not None:
            self.master.grad = self.from_dtensor(grad).float()

    # -- checkpoints -------------------------------------------------------------------------------

    def as_dtensor(self, flat: Tensor) -> DTensor:
        """Return a flat part as a DTensor of the parameter's shape, which shares the memory."""
        local = flat[: self.numel].view(self._shape)
        size = self.param.size()
        stride = self.param.stride()
        return DTensor.from_local(
            local, self._host.states, PLACEMENTS, run_check=False, shape=size, stride=stride
        )

    def lazily(self, dtype: torch.dtype, read: Callable[[], Tensor]) -> PartTensor:
        """Return :meth:`as_dtensor` of what ``read`` returns when the tensor is read.

        Args:
            dtype: of what ``read`` returns.
            read: returns the flat part.
        """

        def local() -> Tensor:
            return read()[: self.numel].view(self._shape)

        # It sets shape, dtype and device, and is freed at once.
        like = torch.empty(self.numel, dtype=dtype, device=self.master.device)
        return PartTensor.of(self.as_dtensor(like), self._host.whole, local)

    def from_dtensor(self, value: Tensor) -> Tensor:
        """Return the flat zero-padded part of a DTensor of :meth:`as_dtensor`, or with FSDP2's own
        shards.

        Raises:
            ValueError: for another layout.
        """
        if not isinstance(value, DTensor):
            raise ValueError(
                f"{self.name}: the optimizer's state is a whole tensor; load it by "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
        flat = value.to_local().reshape(-1)
        if value.device_mesh != self._host.states or tuple(value.placements) != PLACEMENTS:
            if flat.numel() != self.local().numel():
                raise ValueError(
                    f"{self.name}: a tensor on {value.device_mesh} is not sharded as the states of "
                    "the optimizer are; load checkpoints with torch.distributed.checkpoint"
                )
            flat = self._own(flat)
        return _padded(flat, self.master.numel())


def parts_of(host: Host, chosen: set[Tensor]) -> dict[Tensor, Part]:
    """Return the part of each chosen parameter, in the model's order.

    Raises:
        ValueError: in one line, for parameters that cannot be trained here, or without the others.
    """
    parts: dict[Tensor, Part] = {}
    for name, param in host.model.named_parameters():
        if param in chosen:
            parts[param] = Part(name, _trainable(name, param), host)
    if unknown := chosen - parts.keys():
        raise ValueError(
            f"{len(unknown)} parameters of the optimizer are not the model's, such as one of "
            f"{tuple(next(iter(unknown)).shape)}; pass those of the model after fully_shard"
        )
    for name, param in host.model.named_parameters():
        if param.requires_grad and param not in chosen and isinstance(param, DTensor):
            raise ValueError(f"{name}: {WITHOUT_OPTIMIZER}")
    if len({param.dtype for param in parts}) > 1:
        raise ValueError(
            "trained parameters have several types; convert the model to one, and let "
            "mp_policy choose the type of the computation"
        )
    return parts


def _padded(rows: Tensor, width: int) -> Tensor:
    """Return rows of at least ``width`` elements, zero-padded where they are shorter."""
    missing = width - rows.shape[-1]
    return pad(rows, (0, missing)) if missing else rows


def _trainable(name: str, param: Tensor) -> DTensor:
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
