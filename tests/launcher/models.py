# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Small models for the feature tests, each with one thing that sharded training can get wrong.

All take ``[batch, 11]`` inputs and give ``[batch, 5]`` outputs, as `tests.launcher.training.batch`
wants them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.launcher.training import Net

TOKENS = 13
WIDTH = 10
RANK = 4  # of adapters


class Tied(nn.Module):
    """Embedding and output head are one parameter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (3 * x + TOKENS // 2).long().clamp(0, TOKENS - 1)
        return self.head(torch.tanh(self.mix(self.embed(tokens).mean(1))))[:, :5]


class TwiceUsed(Net):
    """One layer runs outside a checkpointed region and again inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(WIDTH, depth=0)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(self.inp(x)))
        inner: Tensor = checkpoint(
            lambda h: torch.tanh(self.shared(h)), x, use_reentrant=self.reentrant
        )
        return self.out(inner)


class Checkpointed(Net):
    """Every block is recomputed in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(width=13)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.blocks:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.out(x)


class Branching(Net):
    """Runs `left`, `right` or both, as asked: a parameter of the other branch gets no gradient."""

    def __init__(self) -> None:
        super().__init__(WIDTH, depth=0)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, branch: str = "left right") -> Tensor:
        h = torch.tanh(self.inp(x))
        parts = [self.get_submodule(name)(h) for name in branch.split()]
        return self.out(h + torch.stack(parts).sum(0))


class Tiny(nn.Module):
    """Parameters of 1, 3, 5, 7 and 9 elements: some ranks of 4, and most of 8, hold nothing but
    padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.7))
        self.inp = nn.Linear(11, 3)
        self.square = nn.Parameter(torch.randn(3, 3) / 2)
        self.gain = nn.Parameter(torch.ones(3))
        self.mid = nn.Linear(3, 7)
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.scale * self.inp(x)) @ self.square * self.gain
        return self.out(torch.tanh(self.mid(x)))


class Adapter(nn.Module):
    """A frozen layer and what PEFT adds to it: two thin matrices, of which the second begins with
    zeros.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.base(x)
        return whole + self.up(self.down(x))


def adapted() -> Net:
    """A model frozen all but its adapters."""
    net = Net(64, depth=2)
    net.requires_grad_(False)
    for block in net.blocks:
        assert isinstance(block, nn.Sequential) and isinstance(block[1], nn.Linear)
        block[1] = Adapter(block[1])
    return net


def tied_and_adapted() -> Tied:
    """The embedding, which is the head too, is frozen; next to what lies between are adapters."""
    net = Tied(64)
    net.requires_grad_(False)
    net.mix = Adapter(net.mix)  # type: ignore[assignment]
    return net


class Scalar(Tiny):
    """A parameter of no dimension next to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


class Experts(nn.Module):
    """Each sample goes through one of three layers: on a rank, in a batch, some get none, and no
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            rows = chosen == index
            if rows.any():
                out = out.index_add(0, rows.nonzero()[:, 0], torch.tanh(layer(x[rows])))
        return out


class Routed(Net):
    """Experts, a leaf for ZeRO-3: gathered together, and reduced together whether they were used or
    not.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH, depth=0)
        self.experts = Experts()
        deepspeed.utils.set_z3_leaf_modules(self, [Experts])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        return self.out(h + self.experts(h, (2 * x[:, 0].abs()).long().clamp(0, 2)))


class External(Net):
    """Uses parameters of two of its modules itself: one registered with ZeRO-3, one that it finds
    out about.
    """

    def __init__(self) -> None:
        super().__init__(width=13, depth=2)
        self.first = nn.Linear(13, 13)
        deepspeed.zero.register_external_parameter(self, self.inp.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.linear(x, self.inp.weight, self.first.bias)
        return self.out(x + torch.tanh(self.blocks[1](torch.tanh(self.first(x)))))


class Nested(Net):
    """A part is built under a ``deepspeed.zero.Init`` of its own, inside that of the whole."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(width=13, depth=1)
        with deepspeed.zero.Init(config_dict_or_path=config):
            self.blocks.append(nn.Sequential(nn.LayerNorm(13), nn.Linear(13, 13)))
        self.out = nn.Linear(13, 5)


def hooked() -> Net:
    """Hooks of modules change inputs, outputs and gradients, those of a parameter its gradient."""

    def amplify(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(3.0 * grad for grad in inputs)

    net = SMALL()
    net.inp.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))
    net.blocks[0].register_forward_hook(lambda module, args, output: 1.5 * output)
    net.out.register_full_backward_hook(amplify)
    net.blocks.get_parameter("1.1.weight").register_hook(lambda grad: -2.0 * grad)
    return net


def with_leaves() -> Net:
    """Each block is gathered as a whole."""
    net = SMALL()
    deepspeed.utils.set_z3_leaf_modules(net, [nn.Sequential])
    return net


def partly_frozen() -> Net:
    """A whole module frozen, a bias only, a weight only: modules of one kind and mixed ones."""
    net = Net(width=13)
    frozen = (
        *net.inp.parameters(),
        net.out.weight,
        *(b for n, b in net.blocks.named_parameters() if "1.bias" in n),
    )
    for param in frozen:
        param.requires_grad_(False)
    return net


SMALL = partial(Net, width=13, depth=2)
