# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Muon's momentum over steps of the hook's optimizer, without DeepSpeed's constructor."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.bare import bare_engine, matrices
from tests.ranks.test_hook_streams import attach
from tests.ranks.worlds import PLAIN, World, world
from zero_topo.hook import muon, optimizer
from zero_topo.hook.muon import equal_bits

SHAPES = ((8, 8), (4, 8), (7,))
"""Two matrices, and a vector that another optimizer updates."""

NUMELS = (64, 32, 7)


def whole_on_ranks(optimizer_domain: str) -> World:
    """A world whose ranks store all weights."""
    degrees = {"weights": "rank", "gradients": "rank", "optimizer": optimizer_domain}
    return world({**degrees, "quantize": PLAIN}, numels=NUMELS)


def hooked(w: World) -> Any:
    """An optimizer with one sub-group of matrices and one of vectors."""
    parameters = [
        replace(p, whole=len(shape) > 1) for p, shape in zip(matrices(NUMELS), SHAPES, strict=True)
    ]
    engine = bare_engine(w.config, parameters)
    own: Any = object.__new__(optimizer.TopoStage3)
    cut = sum(engine.layout.widths[:2])
    attach(own, engine, [(0, cut), (cut, engine.layout.columns)])
    params = [SimpleNamespace(ds_id=index, ds_shape=shape) for index, shape in enumerate(SHAPES)]
    settings = [{"use_muon": uses, "momentum": 0.9, "ns_method": "gram"} for uses in (True, False)]
    own.__dict__ |= {
        "fp16_groups": [params[:2], params[2:]],
        "optimizer": SimpleNamespace(state=defaultdict(dict), param_groups=settings),
        "sub_group_to_group_id": {0: 0, 1: 1},
        "use_muon": True,
        "sub_groups_lacking_loss_scale": set(),
    }
    return own


def stepped(w: World, rank: int, bad: tuple[int, int, float] | None) -> list[Tensor]:
    """Momentum and the gradient's own row after each of three steps.

    Args:
        w: the machine and the plan.
        rank: this one.
        bad: rank, parameter and value of the one gradient of the second step that is not finite;
            None for no second step.
    """
    own = hooked(w)
    rows = own.topo.gradients.optimizer_rows()
    found = []
    for step in range(3):
        if step == 1 and bad is None:
            continue
        rows.fill_(1.0 + step)
        if step == 1 and bad is not None and bad[0] == rank:
            own.topo.layout.parameter(rows, bad[1])[0, 0] = bad[2]
        own._apply_muon_to_accumulated_grads()
        found += [
            own._momentum(0).clone(),
            rows[:, : own.fp16_partitioned_groups_flat_numel[0]].clone(),
        ]
    return found


@pytest.mark.parametrize("optimizer_domain", ["node", "world"])
@pytest.mark.parametrize("bad", [(1, 0, torch.inf), (5, 1, torch.nan), (6, 2, -torch.inf)])
def test_a_skipped_step_keeps_the_momentum(
    optimizer_domain: str, bad: tuple[int, int, float]
) -> None:
    """Whichever rank's gradient is not finite, and be it of a vector: DeepSpeed skips the step on
    all ranks.

    Every rank's update shows it, since DeepSpeed sees it in the norm. The next step is that of a
    run without it.
    """
    w = whole_on_ranks(optimizer_domain)
    with patch.object(muon, "orthogonalized", lambda matrices, heads, method: 2 * matrices):
        skipped = w.on_ranks(lambda rank: stepped(w, rank, bad))
        plain = w.on_ranks(lambda rank: stepped(w, rank, None))
    for (_, _, momentum, update, *last), (kept, _, *expected) in zip(skipped, plain, strict=True):
        assert torch.equal(momentum, kept) and not update.isfinite().any()
        assert all(torch.equal(tensor, other) for tensor, other in zip(last, expected, strict=True))


@pytest.mark.parametrize("hip", [None, "6.4"])
@pytest.mark.parametrize("optimizer_domain", ["node", "world"])
def test_replicas_of_a_matrix_are_computed_without_atomics(
    hip: str | None, optimizer_domain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ROCm several nodes compute one matrix, whose sums may be in any order else; the user's
    setting is restored.
    """
    monkeypatch.setattr(torch.version, "hip", hip)
    modes = set()

    def orthogonalized(matrices: Tensor, heads: Any, method: str) -> Tensor:
        modes.add(torch.are_deterministic_algorithms_enabled())
        return matrices

    monkeypatch.setattr(muon, "orthogonalized", orthogonalized)
    w = whole_on_ranks(optimizer_domain)
    w.on_ranks(lambda rank: stepped(w, rank, None))
    assert modes == {hip is not None and optimizer_domain == "node"}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_users_deterministic_algorithms_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With warnings only, if that was the setting."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with equal_bits(replicated=True):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
