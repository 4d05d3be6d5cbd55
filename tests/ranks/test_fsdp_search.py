# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls train on FSDP2 with ours as without."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from tests.harness import run_threads
from tests.marks import late
from tests.ranks.fsdp_scripts import (
    EXACT,
    INT4,
    NET_WIDTH,
    Net,
    loss_of,
    make,
    mean,
    weights_of,
    whole,
)
from zero_topo.fsdp import ShardedOptimizer

LENGTH = 14
"""Calls of a sequence."""
OPTIMIZERS: list[Any] = [
    partial(torch.optim.AdamW, eps=1e-2),  # a rounded sum must not become a step of its own
    torch.optim.SGD,
    partial(torch.optim.SGD, momentum=0.9),
]
CALLS = {
    "micro_batch": 8,
    "set_flag": 3,
    "failed": 1,
    "evaluate": 1,
    "reset": 1,
    "gather": 1,
    "read": 2,
    "clip": 2,
    "change": 2,
    "zero": 1,
    "step": 5,
    "rate": 1,
    "edit": 1,
    "look": 1,
    "save": 2,
    "load": 2,
    "move": 0,  # as often as the search says
}
"""Methods of :class:`Script`, and how often each is drawn."""
FLAGS = ["set_is_last_backward", "set_requires_all_reduce", "set_requires_gradient_sync"]
BLOCKS: dict[str, dict[str, Any]] = {
    "topo": EXACT,
    "replicated states": {**EXACT, "optimizer": "node"},
    "no overlap": {**EXACT, "overlap": False},
    "zero3": {"scheme": "zero3"},
    "one rank": {**EXACT, "weights": "rank", "gradients": "rank"},
    "all-reduce": {**EXACT, "scheme": "paper"},
    "hsdp": {"scheme": "hsdp"},
    "between": {"weights": "gpu", "gradients": "gpu", "optimizer": "node"},
}
"""Plans that must train as plain FSDP2."""
ROUNDED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, EXACT),
    "int4": (torch.float32, INT4),
    "bf16, int4": (torch.bfloat16, INT4),
    "bf16, replicated states": (torch.bfloat16, {**EXACT, "optimizer": "node"}),
}
"""Trainings whose masters are more exact than their weights."""


class Failure(Exception):
    """Ends a backward pass."""


def _fail(*args: Any) -> None:
    raise Failure


class Script:
    """One sequence of calls.

    Args:
        seed: of the sequence, the same on all ranks.
        block: ours; None is plain FSDP2.
        dtype: of the weights.
        reloads: whether a move to a new model and optimizer happens, or is left out.

    Attributes:
        trace: what a script may see: losses, norms, which gradients exist.
        calls: names of the calls.
    """

    def __init__(
        self,
        seed: int,
        block: Mapping[str, Any] | None,
        dtype: torch.dtype,
        reloads: bool = True,
    ) -> None:
        self.random = Random(seed)
        self.kind = self.random.choice(OPTIMIZERS)
        self.width = self.random.choice([NET_WIDTH, NET_WIDTH, 13])  # rows that no rank has evenly
        self.frozen = self.random.random() < 0.2
        self.make = partial(make, block, self.kind, dtype=dtype)
        self.reloads = reloads
        self.model, self.optimizer = self.new(1)
        self.trace: list[float] = []
        self.calls: list[str] = []
        self.saved: list[Any] = []
        self.batch = 0
        self.called = False
        self.reduces = True
        self.unreduced = False  # whether FSDP2 keeps gradients that no call drops
        self.has_states = False  # of all parameters

    def run(self, moves: int) -> Script:
        """Take a step, make some calls, then train, and read the weights.

        Args:
            moves: how often a move is drawn.
        """
        often = {**CALLS, "move": moves}
        if self.random.random() < 0.7:
            self.micro_batch()
            self.step()
        for _ in range(LENGTH):
            name = self.random.choices(list(often), list(often.values()))[0]
            self.calls.append(name)
            getattr(self, name)()
        self.micro_batch()
        self.read()
        self.step()
        self.micro_batch()
        for weight in weights_of(self.model):
            self.trace += weight.float().reshape(-1).tolist()
        return self

    def new(self, seed: int) -> tuple[Any, Any]:
        """A model, with a frozen layer or without, and its optimizer."""
        model = Net(width=self.width)
        model.blocks[0].up.requires_grad_(not self.frozen)
        return self.make(seed=seed, model=model)

    def trained(self) -> list[Any]:
        """The parameters that are trained."""
        return [param for param in self.model.parameters() if param.requires_grad]

    def choose(self) -> Any:
        """A parameter that is trained."""
        return self.random.choice(self.trained())

    # -- passes ------------------------------------------------------------------------------------

    def micro_batch(self) -> None:
        """A pass, or one over the sum of two forward passes."""
        self.unreduced = not self.reduces
        twice = self.random.random() < 0.2
        loss = self.loss() + (self.loss() if twice else 0.0)
        loss.backward()
        self.trace.append(mean(loss))

    def loss(self, uses_all: bool = False) -> torch.Tensor:
        """The loss of the next batch; some passes leave out a block, or norms."""
        part = 7 if uses_all else self.random.randrange(8)
        self.model.left_out = {part} if part < 2 else set()
        for index, block in enumerate(self.model.blocks):
            block.normalizes = part not in (2 + index, 4)
        self.batch += 1
        self.called = True
        return loss_of(self.model, self.batch)

    def set_flag(self) -> None:
        """Say whether the next passes are last ones, or are reduced."""
        name = self.random.choice(FLAGS)
        flag = self.random.random() < 0.5
        getattr(self.model, name)(flag)
        if name == "set_requires_gradient_sync":
            self.reduces = flag

    def failed(self) -> None:
        """A pass that ends in the middle."""
        module = self.random.choice([self.model.inp, self.model.blocks[1].up, self.model.out])
        handle = module.register_full_backward_pre_hook(_fail)
        with pytest.raises(Failure):
            self.loss(uses_all=True).backward()
        handle.remove()
        self.unreduced = True
        self.model.reset_iter_state()
        if self.random.random() < 0.7:
            self.model.zero_grad()

    def evaluate(self) -> None:
        """A forward pass without gradients."""
        self.model.eval()
        with torch.no_grad():
            self.trace.append(mean(self.loss()))
        self.model.train()
        # A root that is gathered has other parameters, without gradients
        if self.random.random() < 0.5:
            self.model.reshard()
        else:
            self.micro_batch()

    def reset(self) -> None:
        """A reset without need; torch's own fails before the first forward pass."""
        if self.called:
            self.model.reset_iter_state()

    def gather(self) -> None:
        """Weights are gathered or freed by hand."""
        modules = [one for one in self.model.modules() if isinstance(one, FSDPModule)]
        module = self.random.choice(modules)
        module.unshard()
        module.reshard()

    # -- gradients ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Which gradients exist, and the norm of one."""
        params = list(self.model.parameters())
        self.trace += [float(param.grad is not None) for param in params]
        param = self.choose()
        if param.grad is not None:
            self.trace.append(float(whole(param.grad.norm())))

    def clip(self) -> None:
        """torch's clipping, or the optimizer's own."""
        largest = self.random.choice([0.05, 0.5])
        own = self.random.random() < 0.3
        if own and isinstance(self.optimizer, ShardedOptimizer):
            norm = self.optimizer.clip_grad_norm_(largest)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        self.trace.append(float(whole(norm)))

    @torch.no_grad()
    def change(self) -> None:
        """One gradient is changed, replaced, set or dropped."""
        param = self.choose()
        how = self.random.randrange(5)
        if how == 4:
            param.grad = torch.full_like(param, 0.01)
        elif param.grad is None:
            return
        elif how == 0:
            param.grad.mul_(0.5)
        elif how == 1:
            param.grad.add_(param, alpha=0.1)
        elif how == 2:
            param.grad = 0.5 * param.grad + 0.01 * param
        else:
            param.grad = None

    def zero(self) -> None:
        """Drop gradients, or set them to zero."""
        owner = self.random.choice([self.model, self.optimizer])
        owner.zero_grad(set_to_none=self.random.random() < 0.7)

    def step(self) -> None:
        """A step; ours drops the gradients by itself."""
        self.has_states |= all(param.grad is not None for param in self.trained())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rate(self) -> None:
        """Another learning rate."""
        rate = self.random.choice([0.0, 1e-3, 1e-2])
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    # -- weights and states ------------------------------------------------------------------------

    @torch.no_grad()
    def edit(self) -> None:
        """A weight is set by hand."""
        param = self.choose()
        how = self.random.randrange(3)
        if how == 0:
            param.mul_(0.9)
        elif how == 1:
            param.fill_(0.1)
        else:
            param.copy_(torch.sin(param))

    def look(self) -> None:
        """States are read for nothing."""
        get_state_dict(self.model, self.optimizer, options=self.options())

    def options(self) -> StateDictOptions:
        """Whole tensors or shards; torch does not load whole ones where there are no states."""
        whole_ones = self.random.random() < 0.5 and self.kind is not torch.optim.SGD
        return StateDictOptions(full_state_dict=whole_ones)

    def save(self) -> None:
        """Keep a copy of both states; torch does not load states that did not exist."""
        options = self.options()
        if self.has_states:
            saved = get_state_dict(self.model, self.optimizer, options=options)
            self.saved.append((*copy.deepcopy(saved), options))

    def load(self) -> None:
        """Go back to a copy, wholly or in part, in any order."""
        if not self.saved:
            return
        weights, states, options = copy.deepcopy(self.random.choice(self.saved))
        self._load(weights, states, options, self.random.randrange(5))

    def _load(self, weights: Any, states: Any, options: Any, how: int) -> None:
        both = {"model_state_dict": weights, "optim_state_dict": states}
        if how == 0:
            set_state_dict(self.model, self.optimizer, **both, options=options)
            return
        if how in (1, 3):
            set_model_state_dict(self.model, weights, options=options)
        if how in (1, 2, 4):
            set_optimizer_state_dict(self.model, self.optimizer, states, options=options)
        if how == 2:
            set_model_state_dict(self.model, weights, options=options)

    def move(self) -> None:
        """Go on with a new model and optimizer that load the states of the old ones."""
        options = self.options()
        how = self.random.randrange(3)
        self.optimizer.zero_grad()
        if self.unreduced or not self.has_states:
            return
        self.reduces = True
        for flag in FLAGS:
            getattr(self.model, flag)(True)
        if not self.reloads:
            return
        saved = get_state_dict(self.model, self.optimizer, options=options)
        weights, states = copy.deepcopy(saved)
        self.model, self.optimizer = self.new(7)
        self.called = False
        self._load(weights, states, options, how)


def furthest(found: Script, expected: Script) -> float:
    """The largest difference of two traces; infinite if they have not the same entries."""
    assert found.calls == expected.calls
    if len(found.trace) != len(expected.trace):
        return float("inf")
    ours = torch.tensor(found.trace, dtype=torch.float64)
    theirs = torch.tensor(expected.trace, dtype=torch.float64)
    difference = (ours - theirs).abs() / theirs.abs().clamp(min=1.0)
    return float(difference.nan_to_num(float("inf")).max())


SEARCHES: dict[str, tuple[dict[str, tuple[torch.dtype, dict[str, Any]]], int]] = {
    "plain FSDP2": ({name: (torch.float32, block) for name, block in BLOCKS.items()}, 1),
    "no move": (ROUNDED, 10),
}
"""What a sequence is compared with: trainings, and how often a move is drawn. The first compares
with plain FSDP2, the second with ours that never moves to a loaded model and optimizer.
"""


def searched(rank: int, search: str, seeds: range) -> list[str]:
    """Sequences that end elsewhere."""
    trainings, moves = SEARCHES[search]
    is_plain = search == "plain FSDP2"
    apart = []
    for seed in seeds:
        name = Random(seed).choice(list(trainings))
        dtype, block = trainings[name]
        expected = Script(seed, None if is_plain else block, dtype, reloads=is_plain).run(moves)
        found = Script(seed, block, dtype).run(moves)
        difference = furthest(found, expected)
        if difference > 1e-6:
            apart.append(f"{difference:.1e} apart, seed {seed}, {name}: {found.calls}")
    return apart


@pytest.mark.parametrize(
    ("ranks", "search", "seeds"),
    [
        (2, "plain FSDP2", range(2, 5)),
        (2, "no move", range(3)),
        late(4, "plain FSDP2", range(50)),
        *(late(2, "plain FSDP2", range(first, first + 50)) for first in range(200, 400, 50)),
        late(8, "plain FSDP2", range(400, 411)),
        late(4, "no move", range(50)),
    ],
)
def test_a_sequence_of_calls_is_as_without_us(ranks: int, search: str, seeds: range) -> None:
    """Losses, norms, gradients and weights, to 1e-6."""
    apart = run_threads(ranks, searched, search, seeds, timeout=600)[0]
    assert not apart, "\n".join(apart)
