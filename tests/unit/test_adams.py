# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""AdamS by itself: its formula, its state, and what it refuses."""

from __future__ import annotations

from copy import deepcopy

import torch

from zero_topo import AdamS


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    """Through ``state_dict``, step counts included; ``foreach`` changes the calls, not the
    result.
    """
    generator = torch.Generator().manual_seed(1)
    params = [torch.ones(n, requires_grad=True) for n in (1, 5, 300)]
    optimizer = AdamS(params, weight_decay=0.1, foreach=True)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    twins = [p.detach().clone().requires_grad_(True) for p in params]
    resumed = AdamS(twins)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    resumed.param_groups[0]["foreach"] = False
    for p, twin in zip(params, twins, strict=True):
        p.grad, twin.grad = torch.ones_like(p), torch.ones_like(p)
    optimizer.step()
    resumed.step()
    assert all(torch.equal(p, twin) for p, twin in zip(params, twins, strict=True))


def test_a_weight_moves_by_a_bounded_number_of_learning_rates() -> None:
    """As docs/sparse.md says: by 0.45 if it had no momentum, whatever the size of its sum, and by
    at most 1.03 ever.
    """
    param = torch.zeros(1000, requires_grad=True)
    optimizer = AdamS([param], lr=1.0)
    generator, largest = torch.Generator().manual_seed(1), 0.0
    for step in range(400):
        before = param.detach().clone()
        param.grad = (
            torch.randn(1000, generator=generator)
            * torch.rand(1000, generator=generator).mul(9).exp()
        )
        if step < 300:
            param.grad[:500] = 0
        optimizer.step()
        moved = (param.detach() - before).abs()
        if step == 300:
            torch.testing.assert_close(moved[:500], torch.full((500,), 0.4472), atol=1e-3, rtol=0)
        largest = max(largest, float(moved.max()) if step >= 100 else 0.0)
    assert 0.99 < largest < 1.03
