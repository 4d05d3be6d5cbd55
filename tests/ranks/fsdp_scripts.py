# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What scripts on FSDP2 share: a small model, sharded by plain FSDP2 over all ranks or by ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zero_topo.fsdp as topo
from tests.harness import run_threads

EXACT: dict[str, Any] = {"scheme": "topo", "quantize": {"weights": None, "gradients": None}}
INT4: dict[str, Any] = {**EXACT, "quantize": {**EXACT["quantize"], "publish": "int4"}}
LOSSY: dict[str, Any] = {**INT4, "sync": {"mode": "quantized"}}
NET_WIDTH = 16


class Block(nn.Module):
    """A normalized two-layer perceptron.

    Attributes:
        normalizes: whether passes use the norm.
    """

    def __init__(self, width: int = NET_WIDTH) -> None:
        super().__init__()
        self.normalizes = True
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normalized = self.norm(x) if self.normalizes else x
        return x + self.down(torch.relu(self.up(normalized)))


class Net(nn.Module):
    """Blocks between two linear layers.

    Attributes:
        left_out: blocks that passes leave out.
    """

    def __init__(self, depth: int = 2, width: int = NET_WIDTH) -> None:
        super().__init__()
        self.width = width
        self.left_out: set[int] = set()
        self.inp = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def run(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run a block."""
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            if index not in self.left_out:
                x = self.run(index, block, x)
        return self.out(x)


def net(seed: int = 1, dtype: torch.dtype | None = None, model: nn.Module | None = None) -> Any:
    """A model with the same weights on all ranks."""
    model = (model or Net()).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.copy_(0.3 * torch.randn(param.shape, generator=generator))
    return model


def machine(block: Mapping[str, Any] = EXACT) -> dict[str, Any]:
    """A block on two emulated nodes, with two ranks per GPU if the ranks suffice."""
    half = dist.get_world_size() // 2
    nodes = {"nodes": 2, "gpus_per_node": -(-half // 2), "gcds_per_gpu": min(half, 2)}
    return {"topology": {"emulated": nodes}, **block}


def shard_plainly(model: Any, modules: Any = None, **options: Any) -> Any:
    """Shard a model, and some of its modules, by plain FSDP2 over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.blocks if modules is None else modules:
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def make(
    block: Mapping[str, Any] | None,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    lr: float = 1e-2,
    modules: Callable[[Any], Any] = lambda model: None,
    options: dict[str, Any] | None = None,
    elementwise: bool = False,
    **how: Any,
) -> tuple[Any, Any]:
    """A sharded model and its optimizer: plain FSDP2 without a block.

    Args:
        block: ours.
        kind: of the optimizer.
        lr: learning rate.
        modules: which modules of a model are sharded; None leaves the choice to ours.
        options: of ``fully_shard``.
        elementwise: of ``shard_optimizer``.
        how: the model's weights are made.
    """
    model = net(**how)
    options = options or {}
    if block is not None:
        topo.fully_shard(model, machine(block), modules=modules(model), **options)
        return model, topo.shard_optimizer(kind, model, elementwise=elementwise, lr=lr)
    shard_plainly(model, modules(model), **options)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, kind(trained, lr=lr)


def loss_of(model: Any, step: int, micro_batch: int = 0) -> Tensor:
    """The loss of a rank's own batch."""
    seed = 1000 * step + 100 * micro_batch + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    width = getattr(model, "width", NET_WIDTH)
    x = torch.randn(4, width, generator=generator).to(dtype)
    y = torch.randn(4, width, generator=generator).to(dtype)
    return (model(x) - y).float().pow(2).mean()


def mean(loss: Tensor) -> float:
    """The mean of all ranks' losses."""
    total = loss.detach().clone().reshape(1)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    model: Any,
    optimizer: Any,
    steps: range,
    micro_batches: int = 1,
    flag: str = "",
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """Losses of some steps, whose last pass the flag names; ``after`` follows each pass."""
    losses = []
    for step in steps:
        for micro_batch in range(micro_batches):
            if flag:
                getattr(model, flag)(micro_batch == micro_batches - 1)
            loss = loss_of(model, step, micro_batch)
            loss.backward()
            losses.append(mean(loss))
            after()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model: Any) -> list[Tensor]:
    """Copies of all weights, whole."""
    return [whole(param.detach()).clone() for param in model.parameters()]


def both(script: Callable[..., Any], *args: Any, ranks: int = 4) -> tuple[Any, Any]:
    """What a script returns on rank 0 under ours and under plain FSDP2."""

    def run(rank: int, block: Mapping[str, Any] | None) -> Any:
        return script(block, *args)

    return run_threads(ranks, run, EXACT)[0], run_threads(ranks, run, None)[0]
