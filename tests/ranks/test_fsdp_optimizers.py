# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Optimizers under ``shard_optimizer``: those that are not known to update each element by itself
are refused; of the others closures, methods and states are as under plain FSDP2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_topo.fsdp as topo
from tests.harness import run_threads
from tests.ranks.fsdp_scripts import loss_of, machine, net, weights_of


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
    """Schedule-free SGD: its counters are in the group, and evaluation has other weights."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "train_mode": False})

    def _swap(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != trains:
                weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.data.lerp_(end=self.state[param]["z"], weight=weight)
                group["train_mode"] = trains

    @torch.no_grad()
    def train(self) -> None:
        self._swap(True)

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call optimizer.train() first")
            weight = 1 / (group["k"] + 1)
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(end=z, weight=weight)
                rate = group["lr"] * (group["beta"] * (1 - weight) - 1)
                param.add_(param.grad, alpha=rate)
                z.sub_(param.grad, alpha=group["lr"])
            group["k"] += 1


Loop = Callable[[Any, Any, Callable[[int], Tensor]], list[Any]]


def trained(rank: int, kind: Any, settings: Any, loop: Loop, ours: bool) -> list[Any]:
    """What a loop returns, and the weights after it, under plain FSDP2 or ours."""
    model = net()
    optimizer: Any
    if ours:
        topo.fully_shard(model, machine())
        optimizer = topo.shard_optimizer(kind, model, elementwise=True, **settings)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = kind(model.parameters(), **settings)
    found = loop(model, optimizer, partial(loss_of, model))
    return [found, weights_of(model)]


def assert_as_fsdp2(kind: Any, settings: dict[str, Any], loop: Loop) -> None:
    """A loop returns the same, and leaves the same weights."""
    expected, ours = (run_threads(4, trained, kind, settings, loop, on)[0] for on in (False, True))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=2e-6)


def steps(model: Any, optimizer: Any, loss_of: Any, numbers: range = range(3)) -> list[Any]:
    """Losses of some steps."""
    losses = []
    for step in numbers:
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_closure(model: Any, optimizer: Any, loss_of: Any) -> list[Any]:
    """What steps with a closure return, and how often it was called."""
    found: list[Any] = []
    for step in range(3):
        calls: list[int] = []

        def closure(step: int = step, calls: list[int] = calls) -> Tensor:
            calls.append(step)
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            return loss.detach()

        found += [float(optimizer.step(closure)), len(calls)]
    return found


@pytest.mark.parametrize("kind", [Extragradient, torch.optim.SGD])
def test_the_closure_reaches_the_optimizer(kind: Any) -> None:
    """One that evaluates twice with other weights, one that may have it."""
    assert_as_fsdp2(kind, {"lr": 0.1}, by_closure)


def between_evaluations(model: Any, optimizer: Any, loss_of: Any) -> list[Any]:
    """Losses in training and in evaluation, and the counter of the groups."""
    found: list[Any] = []
    for step in range(0, 4, 2):
        optimizer.train()
        model.train()
        found += steps(model, optimizer, loss_of, range(step, step + 2))
        optimizer.eval()
        model.eval()
        with torch.no_grad():
            found.append(float(loss_of(9)))
        model.reshard()
        found += [optimizer.param_groups[0][key] for key in ("k", "train_mode")]
    return found


def test_a_schedule_free_optimizer_trains_and_evaluates() -> None:
    """Its methods change the weights of all ranks, and its counters count."""
    assert_as_fsdp2(ScheduleFree, {"lr": 0.5}, between_evaluations)


def no_such_attribute(model: Any, optimizer: Any, loss_of: Any) -> list[Any]:
    return [hasattr(optimizer, name) for name in ("train", "_swap", "nothing", "param_groups")]


def test_attributes_are_those_of_the_inner_optimizer() -> None:
    """Public ones."""
    loop = no_such_attribute
    assert run_threads(4, trained, ScheduleFree, {}, loop, True)[0][0] == [True, False, False, True]
    assert run_threads(4, trained, torch.optim.SGD, {}, loop, True)[0][0][0] is False


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


def changed(model: Any, optimizer: Any, loss_of: Any) -> list[Any]:
    """Losses and states of steps, between which the user changes states."""
    found: list[Any] = [steps(model, optimizer, loss_of, range(2))]
    for number, change in enumerate((in_place, new, one_parameter, cleared, another_dict)):
        change(optimizer, model.out.weight)
        step = 2 + number
        found += [steps(model, optimizer, loss_of, range(step, step + 1)), whole(optimizer, model)]
    return found


def test_states_are_those_of_fsdp2() -> None:
    """DTensors of the parameters' shapes, and a change of them by the user has its effect."""
    assert_as_fsdp2(torch.optim.Adam, {"lr": 1e-2}, changed)
