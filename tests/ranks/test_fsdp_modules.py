# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which modules ``zero_topo.fsdp.fully_shard`` chooses: inner ones first, each once, and a training
equal to plain FSDP2 with modules that were chosen by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import zero_topo.fsdp as topo
from tests.harness import run_threads
from tests.marks import often
from tests.ranks import fsdp_scripts
from tests.ranks.fsdp_scripts import EXACT, Block, Net, machine, make, weights_of
from tests.ranks.fsdp_scripts import NET_WIDTH as WIDTH

STEPS = range(2)


def net(blocks: nn.Module) -> nn.Module:
    """The small model, with other blocks."""
    model = Net()
    model.blocks = blocks  # type: ignore[assignment]
    return model


class InTurn(nn.ModuleList):
    """A container with a forward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class Stage(nn.Module):
    """A stage of a pyramid: blocks, and a weight of its own."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or (Block(), Block()))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.proj(x)


class WithoutForward(nn.Module):
    """A module of the user's that is a container: the caller calls what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = Block(), nn.Parameter(torch.zeros(WIDTH))


class Caller(nn.Module):
    """Calls the modules of its containers, however deep they lie."""

    def __init__(self) -> None:
        super().__init__()
        deep = nn.ModuleDict({"a": nn.ModuleList([Block()])})
        self.containers = nn.ModuleList([deep, WithoutForward()])

    def forward(self, x: Tensor) -> Tensor:
        containers: Any = self.containers
        deep, own = containers
        return own.first(deep["a"][0](x) + own.scale)


class Experts(nn.Module):
    """A layer whose ranks call different experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Stage() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        own = dist.get_rank() % 2
        unused = sum((0 * param.sum() for param in self.experts.parameters()), torch.zeros(()))
        return self.experts[own](x) + self.experts[own + 2](x) + unused


def shared_part() -> nn.Module:
    """Two blocks with one matrix: each has norms of its own."""
    first, second = Block(), Block()
    second.up = first.up
    return nn.ModuleList([first, second])


def tied_head() -> nn.Module:
    """A list of heads, of which one has the first layer's weight."""
    model = net(nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH, bias=False)]))
    model.blocks[1].weight = model.inp.weight  # type: ignore
    return model


def repeated() -> nn.ModuleList:
    """One block, twice."""
    block = Block()
    return nn.ModuleList([block, block])


def shared_stage() -> nn.ModuleList:
    """Two stages, which share an inner block."""
    block = Block()
    return nn.ModuleList([Stage(block), Stage(Block(), block)])


def compiled() -> nn.ModuleList:
    """Blocks that torch compiles."""
    blocks = nn.ModuleList([Block(), Block()])
    for block in blocks:
        block.compile(backend="aot_eager")
    return blocks


Build = Callable[[], nn.Module]
Names = tuple[str, ...]
STAGES: Names = tuple(
    f"blocks.{stage}{inner}" for stage in "01" for inner in (".blocks.0", ".blocks.1", "")
)
MODELS: dict[str, tuple[Build, Names]] = {
    "pyramid": (lambda: net(nn.ModuleList([Stage(), Stage()])), STAGES),
    "repeated": (lambda: net(repeated()), ("blocks.0",)),
    "shared stage": (
        lambda: net(shared_stage()),
        ("blocks.0.blocks.0", "blocks.0", "blocks.1.blocks.0", "blocks.1"),
    ),
    "containers": (
        lambda: net(nn.ModuleList([Caller()])),
        ("blocks.0.containers.0.a.0", "blocks.0.containers.1.first", "blocks.0"),
    ),
    "a list with a forward": (
        lambda: net(nn.ModuleList([InTurn([Block(), Block()])])),
        ("blocks.0.0", "blocks.0.1", "blocks.0"),
    ),
    "compiled": (lambda: net(compiled()), ("blocks.0", "blocks.1")),
    "shared part": (lambda: net(shared_part()), ()),
    "tied head": (tied_head, ("blocks.0",)),
    "experts": (lambda: net(nn.ModuleList([Experts()])), ("blocks.0",)),
}


def train(rank: int, build: Build, by_hand: Names | None, given: Any = None) -> Any:
    """Train under plain FSDP2 with these modules, or as ours chooses; names of what was sharded."""

    def modules(model: Any) -> Any:
        if by_hand is not None:
            return [model.get_submodule(name) for name in by_hand]
        return given and given(model)

    raw = build()
    names = {module: name for name, module in reversed([*raw.named_modules()])}
    block = EXACT if by_hand is None else None
    model, optimizer = make(block, torch.optim.SGD, 0.1, modules, model=raw)
    chosen = {name for module, name in names.items() if isinstance(module, FSDPModule) and name}
    return chosen, trained(model, optimizer)


def trained(model: Any, optimizer: Any) -> list[Tensor]:
    """Losses of some steps, and the weights."""
    losses = fsdp_scripts.train(model, optimizer, STEPS)
    return [torch.tensor(losses), *weights_of(model)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Two trainings are equal."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", often(("pyramid", "shared part", "experts"), MODELS))
def test_a_training_equals_plain_fsdp2_with_modules_chosen_by_hand(name: str) -> None:
    """Lists in lists, elements twice, parts that elements share, containers, experts."""
    build, by_hand = MODELS[name]
    expected = run_threads(4, train, build, by_hand)[0][1]
    chosen, found = run_threads(4, train, build, None)[0]
    assert chosen == set(by_hand)
    assert_equal(found, expected)


GIVEN: dict[str, Callable[[Any], Any]] = {
    "outer ones first": lambda model: [model.blocks[1], *model.blocks[1].blocks],
    "twice, and the model": lambda model: [model.blocks[0], model, model.blocks[0]],
    "a list": lambda model: [model.blocks],
    "a group": lambda model: [*model.blocks, [model.inp, model.out]],
}


@pytest.mark.parametrize("name", often(("outer ones first",), GIVEN))
def test_modules_are_given_in_any_order(name: str) -> None:
    """Outer ones first, twice, a container, a group of several."""
    build = MODELS["pyramid"][0]
    expected = run_threads(4, train, build, ())[0][1]
    assert_equal(run_threads(4, train, build, None, GIVEN[name])[0][1], expected)


def sharded_before(rank: int) -> list[Tensor]:
    """A training if the user has sharded a block before, over our mesh."""
    model = fsdp_scripts.net()
    fully_shard(model.blocks[1], mesh=topo.shard_mesh(machine()), reshard_after_forward=False)
    topo.fully_shard(model, machine())
    return trained(model, topo.shard_optimizer(torch.optim.SGD, model, lr=0.1))


def test_a_block_that_is_sharded_stays_as_it_is() -> None:
    expected = run_threads(4, train, Net, ())[0][1]
    assert_equal(run_threads(4, sharded_before)[0], expected)
