# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Optimizers under ``shard_optimizer``: those that are not known to update each element by itself
are refused; of the others closures, methods and states are as under plain FSDP2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.fsdp_scripts import both, loss_of, make, train, weights_of


class Extragradient(torch.optim.Optimizer):
    """Evaluates the gradient again after a first step, and takes the second from there back."""

    def __init__(self, params: Any, lr: Any = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for param, old in zip(params, before, strict=True):
                param.copy_(old - self.param_groups[0]["lr"] * param.grad)
        return loss


class ScheduleFree(torch.optim.Optimizer):
    """As schedule-free SGD: its counters are in the group, and evaluation has other weights, which
    are the mean over all steps.
    """

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": True})

    def _swap(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != trains:
                group["train_mode"] = trains
                for param in group["params"]:
                    other = self.state[param]["z"]
                    before = other.clone()
                    other.copy_(param)
                    param.data.copy_(before)

    @torch.no_grad()
    def train(self) -> None:
        self._swap(True)

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"])
                mean = self.state[param].setdefault("z", param.clone())
                mean.lerp_(param, 1 / group["k"])


Loop = Callable[[Any, Any], list[Any]]


def trained(block: Any, kind: Any, lr: float, loop: Loop) -> list[Any]:
    """What a loop returns, and the weights after it."""
    model, optimizer = make(block, kind, lr, elementwise=True)
    return [loop(model, optimizer), weights_of(model)]


def assert_as_fsdp2(kind: Any, lr: float, loop: Loop) -> None:
    """A loop returns the same, and leaves the same weights."""
    ours, expected = both(trained, kind, lr, loop)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=2e-6)


def by_closure(model: Any, optimizer: Any) -> list[Any]:
    """What steps with a closure return, and how often it was called."""
    found: list[Any] = []
    for step in range(3):
        calls: list[int] = []

        def closure(step: int = step, calls: list[int] = calls) -> Tensor:
            calls.append(step)
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss.detach()

        found += [float(optimizer.step(closure)), len(calls)]
    return found


@pytest.mark.parametrize("kind", [Extragradient, torch.optim.SGD])
def test_the_closure_reaches_the_optimizer(kind: Any) -> None:
    """One that evaluates twice with other weights, one that may have it."""
    assert_as_fsdp2(kind, 0.1, by_closure)


def between_evaluations(model: Any, optimizer: Any) -> list[Any]:
    """Losses in training and in evaluation, and the counter of the groups."""
    found: list[Any] = []
    for step in range(0, 4, 2):
        optimizer.train()
        model.train()
        found += train(model, optimizer, range(step, step + 2))
        optimizer.eval()
        model.eval()
        with torch.no_grad():
            found.append(float(loss_of(model, 9)))
        model.reshard()
        found += [optimizer.param_groups[0][key] for key in ("k", "train_mode")]
    return found


def test_a_schedule_free_optimizer_trains_and_evaluates() -> None:
    """Its methods change the weights of all ranks, and its counters count."""
    assert_as_fsdp2(ScheduleFree, 0.05, between_evaluations)


def attributes(model: Any, optimizer: Any) -> list[Any]:
    return [hasattr(optimizer, name) for name in ("train", "_swap", "nothing", "param_groups")]


def test_attributes_are_those_of_the_inner_optimizer() -> None:
    """Public ones."""
    ours, _ = both(trained, ScheduleFree, 0.1, attributes)
    assert ours[0] == [True, False, False, True]
    ours, _ = both(trained, torch.optim.SGD, 0.1, attributes)
    assert ours[0] == [False, False, False, True]


def whole(optimizer: Any, model: Any) -> list[Any]:
    """All states of elements, and one counter."""
    states = [optimizer.state[param] for param in model.parameters()]
    moments = [state[key].full_tensor().clone() for state in states for key in ("exp_avg",)]
    return [*moments, float(states[0]["step"])]


def in_place(optimizer: Any, weight: Any) -> None:
    """A state is changed."""
    optimizer.state[weight]["exp_avg"].mul_(0.5)


def new(optimizer: Any, weight: Any) -> None:
    """States are replaced."""
    optimizer.state[weight]["exp_avg"] = torch.zeros_like(optimizer.state[weight]["exp_avg"])
    optimizer.state[weight]["step"] = torch.tensor(7.0)


def one_parameter(optimizer: Any, weight: Any) -> None:
    """A parameter loses its states."""
    del optimizer.state[weight]


def cleared(optimizer: Any, weight: Any) -> None:
    """All parameters lose theirs."""
    optimizer.state.clear()


def another_dict(optimizer: Any, weight: Any) -> None:
    """A new dict without states."""
    optimizer.state = defaultdict(dict)


def changed(model: Any, optimizer: Any) -> list[Any]:
    """Losses and states of steps, between which the user changes states."""
    found: list[Any] = [train(model, optimizer, range(2))]
    for number, change in enumerate((in_place, new, one_parameter, cleared, another_dict)):
        change(optimizer, model.out.weight)
        step = 2 + number
        found += [train(model, optimizer, range(step, step + 1)), whole(optimizer, model)]
    return found


def test_states_are_those_of_fsdp2() -> None:
    """DTensors of the parameters' shapes, and a change of them by the user has its effect."""
    assert_as_fsdp2(torch.optim.Adam, 1e-2, changed)
