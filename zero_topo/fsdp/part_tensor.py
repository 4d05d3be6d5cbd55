# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A tensor with the shape of a parameter, of which a rank stores the part that it updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


class PartTensor(DTensor):
    """A DTensor on the mesh of optimizer states.

    The local tensor is made when it is first read: reading a gradient may need the other nodes.
    A parameter is a DTensor on another mesh, FSDP2's. An operation on both uses this rank's part of
    the parameter. It writes no part to the parameter, of which the other ranks store copies.
    """

    _read: Callable[[], Tensor]
    _together: DeviceMesh

    @classmethod
    def of(
        cls, value: DTensor, together: DeviceMesh, read: Callable[[], Tensor] | None = None
    ) -> PartTensor:
        """Return a tensor that shares the memory, or reads another local tensor each time.

        Args:
            value: a DTensor on the mesh of optimizer states.
            together: the ranks whose parts are a whole tensor, in one dimension.
            read: returns the local tensor.
        """
        tensor = cls(value._local_tensor, value._spec, requires_grad=False)
        tensor._together = together
        if read is not None:
            tensor._read = read
        return tensor

    @property
    def _local_tensor(self) -> Tensor:
        return self._read()

    @_local_tensor.setter
    def _local_tensor(self, local: Tensor) -> None:
        self._read = lambda: local

    def plain(self) -> DTensor:
        """Return a DTensor that shares the memory."""
        return DTensor(self._local_tensor, self._spec, requires_grad=False)

    def reduced(self) -> DTensor:
        """Return a DTensor without pending sums, which one collective adds over all dimensions."""
        pending = [placement for placement in self.placements if placement.is_partial()]
        if not pending:
            return self.plain()
        local = DTensor.from_local(self._local_tensor, self._together, pending[:1], run_check=False)
        total = local.redistribute(placements=[Replicate()]).to_local()
        everywhere = [Replicate()] * self.device_mesh.ndim
        return DTensor.from_local(total, self.device_mesh, everywhere, run_check=False)

    def redistribute(self, *args: Any, **how: Any) -> DTensor:
        """Redistribute as DTensor does, after :meth:`reduced`."""
        return self.reduced().redistribute(*args, **how)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        # torch's own copies a storage from its beginning, and wants a clone of this very class.
        return DTensor(self._local_tensor.clone(), self._spec, requires_grad=False)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        ours = next(leaf for leaf in tree_leaves(given) if isinstance(leaf, cls))
        written = list(_written(func, args, kwargs or {}))
        for leaf in tree_leaves(written):
            if isinstance(leaf, DTensor) and leaf.device_mesh != ours.device_mesh:
                args, kwargs = tree_map(partial(_on_written, leaf.device_mesh), given)
                return func(*args, **kwargs)
        # Norms of many gradients are stacked before one collective reduces them.
        pending = func is torch.ops.aten.stack.default
        args, kwargs = tree_map(partial(_on_states, ours.device_mesh, pending), given)
        result = func(*args, **kwargs)
        if written and isinstance(result, Tensor):
            return written[0]
        return tree_map_only(DTensor, partial(cls.of, together=ours._together), result)


def part_range(rows: int, states: DeviceMesh) -> tuple[int, int]:
    """Return the first row of this rank's part of an FSDP2 shard, and the number of its rows.

    Rows are divided as DTensor divides them; the last part may be empty.
    """
    part_rows = -(-rows // states.size(1))
    first_row = min(states.get_local_rank("part") * part_rows, rows)
    return first_row, min(rows - first_row, part_rows)


def part_of(value: DTensor, states: DeviceMesh) -> DTensor:
    """Return this rank's part of a DTensor on FSDP2's mesh, as a view if it is sharded."""
    (placement,) = value.placements
    if not isinstance(placement, Shard):
        local = value.redistribute(placements=[Replicate()]).to_local()
        placements: list[Any] = [Replicate()] * states.ndim
    else:
        local = value._local_tensor
        first_row, own_rows = part_range(local.shape[placement.dim], states)
        local = local.narrow(placement.dim, first_row, own_rows)
        placements = [placement, placement, Replicate()]
    return DTensor.from_local(
        local, states, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def _on_states(states: DeviceMesh, pending: bool, value: Any) -> Any:
    """Return a plain DTensor on the mesh of states in place of one of ours, or of FSDP2's."""
    if isinstance(value, PartTensor):
        return value.plain() if pending else value.reduced()
    if not isinstance(value, DTensor):
        return value
    same_ranks = torch.equal(value.device_mesh.mesh, states["shard"].mesh)
    return part_of(value, states) if same_ranks else value


def _on_written(mesh: DeviceMesh, value: Any) -> Any:
    """Return one of our tensors on the mesh of a parameter to which an operation writes."""
    if not isinstance(value, PartTensor):
        return value
    whole = value.reduced()
    if any(placement != Replicate() for placement in whole.placements):
        raise RuntimeError(
            "an operation would write this rank's part of a gradient to a parameter of which other "
            "ranks store copies; let the optimizer of shard_optimizer update it"
        )
    replicated = [Replicate()] * mesh.ndim
    return DTensor.from_local(whole._local_tensor, mesh, replicated, run_check=False)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments to which an operation writes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name in kwargs:
            yield kwargs[argument.name]
        elif index < len(args):
            yield args[index]
