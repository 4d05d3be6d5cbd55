# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""AgedAdamW by itself: AdamW where all arrives, its formula where not, its ages, and what it never
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.counting import Launches
from zero_topo import AgedAdamW
from zero_topo.quant import reference_sparse

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def sparse_sums(steps: int, numel: int, seed: int = 0) -> Iterator[Tensor]:
    """Gradients that come as error feedback brings them: sums since they came before, a fifth of
    the elements.
    """
    generator = torch.Generator().manual_seed(seed)
    residual = torch.zeros(numel)
    for _ in range(steps):
        residual += torch.randn(numel, generator=generator)
        came = torch.rand(numel, generator=generator) < 0.2
        yield torch.where(came, residual, 0.0)
        residual[came] = 0


@pytest.mark.parametrize(
    ("chunk", "dtype", "betas", "decay"),
    [
        (1 << 22, torch.float32, (0.9, 0.95), 0.0),
        (64, torch.float32, (0.9, 0.999), 0.1),
        (1000, torch.float64, (0.0, 0.5), 0.2),
        (7, torch.float32, (0.8, 0.0), 0.3),
    ],
)
def test_where_all_arrives_it_is_adamw_to_the_bit(
    chunk: int,
    dtype: torch.dtype,
    betas: tuple[float, float],
    decay: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of any size, in any dtype of the weights, cut into chunks or not.

    By the reference, which takes the square root by torch, as AdamW does. Kernels round it
    correctly, torch does not.
    """
    monkeypatch.setattr(reference_sparse, "UPDATED", chunk)
    generator = torch.Generator().manual_seed(chunk)
    settings = {**SETTINGS, "betas": betas, "weight_decay": decay}
    ours = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_(True)
        for shape in ((1,), (333,), (41, 29))
    ]
    theirs = [p.detach().clone().requires_grad_(True) for p in ours]
    optimizers = AgedAdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)
    for _ in range(20):
        for mine, other in zip(ours, theirs, strict=True):
            size = 10 ** torch.randn(mine.shape, generator=generator)
            mine.grad = (torch.randn(mine.shape, generator=generator) * size).to(dtype)
            mine.grad[mine.grad == 0] = 1.0
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        states = optimizers[0].state[mine], optimizers[1].state[other]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[0][key], states[1][key])


def test_it_is_its_formula() -> None:
    """In FP64 arithmetic, element by element, written down once more."""
    w, (b1, b2) = torch.ones(100, requires_grad=True), SETTINGS["betas"]
    optimizer = AgedAdamW([w], **SETTINGS)
    expected, mean, square = [1.0] * 100, [0.0] * 100, [0.0] * 100
    waited = [0] * 100
    for t, sums in enumerate(sparse_sums(40, 100), start=1):
        w.grad = sums
        optimizer.step()
        for i, g in enumerate(sums.tolist()):
            expected[i] *= 1 - SETTINGS["lr"] * SETTINGS["weight_decay"]
            waited[i] += 1
            if g == 0:
                continue
            a, waited[i] = waited[i], 0
            square[i] = b2**a * square[i] + (1 - b2**a) * g**2 / a
            norm = (square[i] / (1 - b2**t)) ** 0.5 + SETTINGS["eps"]
            mean[i] = b1 * mean[i] + (1 - b1) * g
            expected[i] -= SETTINGS["lr"] * mean[i] / (1 - b1 ** (t if a == 1 else 1)) / norm
            mean[i] *= a == 1
    assert max(waited) > 5
    torch.testing.assert_close(w.detach(), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_a_byte_says_the_longest_wait() -> None:
    """What waited longer counts for 256 steps: it does not begin again at 0."""
    moved = []
    for wait in (255, 256, 257, 300):
        w = torch.zeros(3, requires_grad=True)
        # Without memory the wait alone decides
        optimizer = AgedAdamW([w], lr=1e-3, betas=(0.0, 0.0))
        for step in range(1, wait + 1):
            w.grad = torch.full((3,), float(step == wait))
            optimizer.step()
        moved.append(-w.detach()[0].item() / 1e-3)
    assert moved == pytest.approx([255**0.5, 256**0.5, 256**0.5, 256**0.5], rel=1e-3)


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    """Ages included, which stay bytes though torch casts state to the weights' type; AdamW's own
    state serves too.
    """
    w = torch.randn(200, requires_grad=True)
    optimizer = AgedAdamW([w], **SETTINGS)
    sums = list(sparse_sums(12, 200))
    for g in sums[:6]:
        w.grad = g
        optimizer.step()
    twin = w.detach().clone().requires_grad_(True)
    resumed = AgedAdamW([twin], **SETTINGS)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    assert resumed.state[twin]["age"].dtype == torch.uint8 and resumed.state[twin]["age"].any()
    for g in sums[6:]:
        w.grad, twin.grad = g, g.clone()
        optimizer.step()
        resumed.step()
        assert torch.equal(w, twin)
    saved = deepcopy(optimizer.state_dict())
    del saved["state"][0]["age"]
    saved["state"][0]["step"] = torch.tensor(12.0)
    resumed.load_state_dict(saved)
    resumed.step()
    assert resumed.state[twin]["step"] == 13 and not resumed.state[twin]["age"][sums[-1] != 0].any()


def test_a_step_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each FP32 parameter, of any size."""
    monkeypatch.setattr(reference_sparse, "UPDATED", 1000)
    weights = [torch.randn(n, requires_grad=True) for n in (7, reference_sparse.UPDATED + 1)]
    optimizer, launches = AgedAdamW(weights, **SETTINGS), Launches()
    for phase in ("nothing", "first", "second"):
        with launches.phase(phase):
            optimizer.step()
        for w in weights:
            w.grad = torch.ones_like(w)
    nothing, second = launches.phases["nothing"], launches.phases["second"]
    assert (second.launches - nothing.launches, second.kernels, second.syncs) == (2, 2, 0)
