# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Modules whose parameters have several types: each type is sent as the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_topo.fsdp as topo
from tests.harness import run_threads
from tests.marks import often
from tests.ranks.fsdp_scripts import both, make, train

IN, OUT = 34, 45  # over two ranks the bias ends where no FP32 value may begin
INT8: dict[str, Any] = {"scheme": "paper", "quantize": {"gradients": None}}


class Adapted(nn.Module):
    """A frozen layer with adapters of another type, and one with whole numbers."""

    width = IN

    def __init__(self, base: torch.dtype, codes: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(IN))
        self.base = nn.Linear(IN, OUT, dtype=base).requires_grad_(False)
        self.down, self.up = nn.Linear(IN, 3, bias=False), nn.Linear(3, OUT)
        self.codes = nn.Parameter(torch.arange(OUT, dtype=torch.uint8), False) if codes else None
        self.gathered: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.gathered = [param.detach().clone() for param in self.parameters()]
        x = (x * self.scale).to(self.up.weight.dtype)
        y = self.base(x.to(self.base.weight.dtype)) + self.up(self.down(x))
        y = y.float() + (0.0 if self.codes is None else self.codes / 8)
        return y[:, :IN].clone()


class Grouped(nn.Module):
    """A norm in FP32 and a head in BF16, which FSDP2 gathers together."""

    width = IN

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, IN)
        self.norm = nn.LayerNorm(IN)
        self.head = nn.Linear(IN, OUT, dtype=torch.bfloat16).requires_grad_(False)
        self.gathered: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        parts = [*self.norm.parameters(), *self.head.parameters()]
        self.gathered = [param.detach().clone() for param in parts]
        return self.head(x.bfloat16()).float()[:, :IN].clone()


Build = Callable[[], nn.Module]
CASES: dict[str, tuple[Build, torch.dtype | None]] = {
    "adapters on FP64": (lambda: Adapted(torch.float64, False), None),
    "whole numbers": (lambda: Adapted(torch.bfloat16, True), None),
    "whole numbers, computed in BF16": (lambda: Adapted(torch.bfloat16, True), torch.bfloat16),
    "several modules together": (Grouped, None),
}


def trained(block: Any, name: str) -> tuple[list[float], list[Tensor], Any]:
    """Losses of three steps, the weights with which the last computed, and statistics."""
    build, computed = CASES[name]
    options = {"mp_policy": MixedPrecisionPolicy(computed, torch.float32)} if computed else {}

    def modules(model: Any) -> Any:
        return [[model.norm, model.head]] if isinstance(model, Grouped) else []

    model, optimizer = make(block, torch.optim.SGD, 0.1, modules, options, model=build())
    losses = train(model, optimizer, range(3))
    return losses, model.gathered, topo.stats(optimizer) if block else None


@pytest.mark.parametrize(
    "name", often(("whole numbers, computed in BF16", "several modules together"), CASES)
)
def test_each_type_is_sent_as_the_plan_says(name: str) -> None:
    """Unquantized as plain FSDP2; else floats as INT8, near what they are, whole numbers as they
    are, bytes by the formula.
    """
    (losses, _, exact), (expected, weights, _) = both(trained, name)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-6)
    losses, rounded, stats = run_threads(4, lambda rank: trained(INT8, name))[0]
    assert losses == pytest.approx(expected, abs=0.05) and losses != expected
    assert stats.step_bytes == stats.formula and exact.step_bytes == exact.formula
    sent = []
    for found in (stats, exact):
        gathers = [found.step_bytes[key] for key in found.step_bytes if "gather" in key[0]]
        sent.append(sum(gathers))
    assert sent[0] < sent[1]
    for ours, theirs in zip(rounded, weights, strict=True):
        sent_whole = theirs.dtype in (torch.uint8, torch.float64)
        assert torch.equal(ours, theirs) == sent_whole
        assert (ours.double() - theirs.double()).abs().max() < 0.02
