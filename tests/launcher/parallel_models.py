# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tensor and expert parallelism for tests: an ``mpu`` as Megatron has, parallel layers, a mixture
of experts.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.launcher.training import Net

WIDTH, HIDDEN = 12, 24
EXPERTS, UNITS = 4, 10  # of a layer; of an expert


class Mpu:
    """Groups of ranks as a Megatron client gives DeepSpeed.

    Args:
        size: ranks that share a layer.
        far: whether these ranks are as far apart as possible; by default they are neighbours.
    """

    def __init__(self, size: int, far: bool = False) -> None:
        world = dist.get_world_size()
        near = [list(range(first, first + size)) for first in range(0, world, size)]
        strided = [list(range(first, world, world // size)) for first in range(world // size)]
        tensor = strided if far else near
        self.tensor = _own([dist.new_group(ranks) for ranks in tensor])
        data = [[ranks[index] for ranks in tensor] for index in range(size)]
        self.data = _own([dist.new_group(ranks) for ranks in data])

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tensor)

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_group(self) -> Any:
        return self.data


def _own(made: list[Any]) -> Any:
    return next(group for group in made if isinstance(group, dist.ProcessGroup))


def _sum(values: Tensor, group: Any) -> Tensor:
    """Over the tensor-parallel ranks."""
    total = values.detach().contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class Mlp(nn.Module):
    """A residual layer of which each tensor-parallel rank has a part of the hidden units."""

    def __init__(self, mpu: Mpu | None, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.mpu = mpu
        if mpu is None:
            return
        ranks = torch.arange(hidden).tensor_split(mpu.get_model_parallel_world_size())
        own = ranks[mpu.get_model_parallel_rank()]
        self.up.weight = _part(self.up.weight[own])
        self.up.bias = _part(self.up.bias[own])
        self.down.weight = _part(self.down.weight[:, own])

    def forward(self, x: Tensor) -> Tensor:
        if self.mpu is None:
            return x + self.down(torch.tanh(self.up(self.norm(x))))
        group = self.mpu.get_model_parallel_group()
        whole = self.norm(x)
        if whole.requires_grad:  # each rank has a part of the gradient
            whole.register_hook(partial(_sum, group=group))
        part = functional.linear(torch.tanh(self.up(whole)), self.down.weight)
        gradient = part - part.detach()  # 0: the sum has the same bits on all ranks
        return x + _sum(part, group) + gradient + self.down.bias


def _part(values: Tensor) -> nn.Parameter:
    param = nn.Parameter(values.detach().clone())
    param.tensor_model_parallel = True  # type: ignore[attr-defined]  # Megatron's mark, which DeepSpeed reads
    return param


class Layers(Net):
    """Two residual layers between two matrices, ``[batch, 11]`` to ``[batch, 5]``."""

    def __init__(self, mpu: Mpu | None = None, hidden: int = HIDDEN) -> None:
        super().__init__(WIDTH, depth=0)
        self.blocks.extend(Mlp(mpu, hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def autotp(size: int) -> dict[str, Any]:
    """Keys of a DeepSpeed config that let AutoTP split each :class:`Mlp`."""
    specs = [
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
    ]
    partition = {"use_default_specs": False, "layer_specs": specs}
    return {"tensor_parallel": {"autotp_size": size, "partition_config": partition}}


class Experts(nn.Module):
    """A token's two best of four experts, in the form that DeepSpeed's preset for Mixtral
    replaces.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * UNITS, WIDTH) / WIDTH**0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, UNITS) / UNITS**0.5)


class Moe(nn.Module):
    """A feed-forward of experts; only DeepSpeed's replacement of it has a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()


class Mixture(Net):
    """Two residual layers of experts, each with a dense one, between two matrices, ``[batch, 11]``
    to ``[batch, 5]``.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH, depth=0)
        self.config = SimpleNamespace(
            model_type="mixtral",
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            hidden_size=WIDTH,
        )
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.norm = nn.LayerNorm(WIDTH)
            layer.mlp = Moe()
            layer.dense = Mlp(None, HIDDEN)
            self.model.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)[None]
        for layer in self.model.layers:
            mixed = layer.mlp(layer.norm(x))
            x = layer.dense(x + (mixed[0] if isinstance(mixed, tuple) else mixed))
        return self.out(x)[0]


def autoep(size: int) -> dict[str, Any]:
    """Keys of a DeepSpeed config that spread the experts of :class:`Mixture` over some ranks."""
    block = {
        "enabled": True,
        "autoep_size": size,
        "preset_model": "mixtral",
        "use_grouped_mm": False,
    }
    return {"expert_parallel": block}
