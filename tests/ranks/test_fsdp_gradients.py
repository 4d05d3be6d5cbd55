# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``param.grad`` on FSDP2, as scripts use it: read, changed, with weights, around saves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zero_topo.fsdp as topo
from tests.harness import run_threads
from tests.marks import late
from tests.ranks.fsdp_scripts import (
    EXACT,
    LOSSY,
    Net,
    both,
    loss_of,
    machine,
    make,
    mean,
    net,
    train,
    whole,
)


def close(found: Any, expected: Any) -> None:
    """Equal to 1e-6."""
    assert torch.tensor(found).sub(torch.tensor(expected)).abs().max() < 1e-6, (found, expected)


def partly_used(rank: int, block: Mapping[str, Any] | None, left_out: str) -> list[float]:
    """Losses where the last pass of a step leaves out a block, before which gradients are scaled,
    or the norms of all blocks.
    """
    model, optimizer = make(block)

    def change_block() -> None:
        model.left_out ^= {1}
        for param in model.parameters():
            param.grad.mul_(0.1)

    def change_norms() -> None:
        for inner in model.blocks:
            inner.normalizes = not inner.normalizes

    if left_out == "a block":
        return train(model, optimizer, range(3), 2, after=change_block)
    return train(model, optimizer, range(3), 2, "set_is_last_backward", change_norms)


@pytest.mark.parametrize("left_out", ["a block", "norms"])
def test_what_a_pass_leaves_out_keeps_its_gradient(left_out: str) -> None:
    """Also where several ranks update the same part, and a read gradient is a copy."""
    replicated = {**EXACT, "optimizer": "node"}
    found, expected = (
        run_threads(4, partly_used, block, left_out)[0] for block in (replicated, None)
    )
    assert found == pytest.approx(expected, rel=1e-6)


def narrow(rank: int, block: Mapping[str, Any] | None) -> list[float]:
    """Losses of a model of which a rank stores one element of some parameters."""
    model, optimizer = make(block, model=Net(1, 4))
    return train(model, optimizer, range(2), 2)


def test_a_rank_may_store_one_element_of_each_row() -> None:
    """A second pass takes back what the first one synced."""
    replicated = {**EXACT, "optimizer": "node"}
    found, expected = (run_threads(4, narrow, block)[0] for block in (replicated, None))
    assert found == pytest.approx(expected, rel=1e-6)


# -- states are saved in the middle of a step ------------------------------------------------------


def lossy(rank: int, saves: bool, kind: str) -> list[float]:
    """Losses with quantized sync, quantized differences, and saves where they change nothing."""
    model, optimizer = make(LOSSY, getattr(torch.optim, kind))
    losses: list[float] = []

    def save() -> None:
        if saves and (losses or kind == "SGD"):
            get_model_state_dict(model)
            optimizer.state_dict()

    for step in range(3):
        losses += train(model, optimizer, range(step, step + 1), 2, "set_is_last_backward", save)
        if saves:
            copy.deepcopy(get_state_dict(model, optimizer))
    return losses


@pytest.mark.parametrize("kind", ["SGD", late("AdamW")])
def test_saving_changes_no_lossy_training(kind: str) -> None:
    """Neither residuals of sync nor differences that the post-step all-gather has to send."""
    assert run_threads(4, lossy, True, kind)[0] == run_threads(4, lossy, False, kind)[0]


def alone(rank: int) -> int:
    """The state dict of one rank, and a copy of all ranks'."""
    model, optimizer = make({**EXACT, "sync": {"mode": "quantized"}})
    if rank == 0:
        get_state_dict(model, optimizer)  # by a step that only makes states
    loss_of(model, 0).backward()
    if rank == 0:
        optimizer.state_dict()
    optimizer.step()
    found = len(optimizer.state_dict()["param_groups"]) if rank == 0 else 1
    copied = copy.deepcopy(optimizer.state_dict())
    for entry, own in zip(
        copied["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        for key, value in entry.items():
            assert torch.equal(_local(value), _local(own[key]))
    return found


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def test_a_state_dict_needs_no_other_rank_and_can_be_copied() -> None:
    """Also where sync keeps a residual."""
    assert run_threads(4, alone) == [1] * 4


# -- reentrant checkpoints -------------------------------------------------------------------------


class Checkpointed(Net):
    """Each first, second or so block in activation checkpoints."""

    def __init__(self, every: int, reentrant: bool) -> None:
        super().__init__(depth=4)
        self.every = every
        self.reentrant = reentrant

    def run(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run a block."""
        if index % self.every:
            return super().run(index, block, x)
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        return checkpoint(block, x, use_reentrant=self.reentrant)


def recomputed(rank: int, which: str, reentrant: bool, sync: dict[str, Any]) -> Any:
    """Losses, bytes of sync and passes of steps of two micro-batches; under a root without
    parameters of its own, or another.
    """
    model: Any = Checkpointed(2 if which == "some" else 1, reentrant)
    if which == "root":
        model.inp = model.out = nn.Identity()
    model, optimizer = make({**EXACT, "sync": sync}, model=model)
    losses = train(model, optimizer, range(2), 2, "set_is_last_backward")
    found = topo.stats(optimizer)
    sent = {key: nbytes for key, nbytes in found.step_bytes.items() if key[0] == "sync"}
    formula: Any = found.formula
    assert sent == {key: nbytes for key, nbytes in formula.items() if key[0] == "sync"}
    return losses, sent, found.micro_batches


@pytest.mark.parametrize(
    ("which", "mode"),
    [("all", "quantized"), late("some", "quantized"), late("all", "dense"), late("root", "dense")],
)
def test_reentrant_checkpoints_sync_once(which: str, mode: str) -> None:
    """Losses, bytes and passes as with checkpoints that are not reentrant, of a lossy sync too."""
    found = run_threads(4, recomputed, which, True, {"mode": mode})[0]
    expected = run_threads(4, recomputed, which, False, {"mode": mode})[0]
    assert found[:2] == expected[:2]
    if which != "root":
        assert found[2] == expected[2] == 2


# -- gradients together with weights ---------------------------------------------------------------


def clipped(param: Any) -> None:
    """By the norm of the weight."""
    most = 0.01 * param.norm()
    norm = param.grad.norm()
    param.grad.mul_(torch.where(norm > most, most / norm, 1.0))


def masked(param: Any) -> None:
    """Masks and copies of both."""
    param.grad.masked_fill_((param.grad * param) > 0, 0.0)
    param.grad.copy_(torch.sign(param.grad) * param.abs().clamp(max=0.01))


CHANGES = (clipped, masked)


def with_weights(block: Mapping[str, Any] | None) -> list[float]:
    """Losses of a training whose gradients are computed with weights before each step: decayed by
    hand at once, then some changed in other ways.
    """
    model, optimizer = make(block, torch.optim.SGD)
    params = list(model.parameters())
    losses = []
    for step in range(2):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(mean(loss))
        with torch.no_grad():
            torch._foreach_add_([param.grad for param in params], params, alpha=0.1)
            for change, param in zip(CHANGES, params[::8], strict=True):
                change(param)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, mean(loss_of(model, 9))]


def test_gradients_are_computed_with_weights() -> None:
    """An operation on ``param.grad`` and ``param`` is that of plain FSDP2."""
    close(*both(with_weights))


def hooked_before(rank: int) -> int:
    """A hook of the user that was registered before the optimizer was built."""
    model = net()
    topo.fully_shard(model, machine())
    seen = []
    model.inp.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    topo.shard_optimizer(torch.optim.AdamW, model)
    loss_of(model, 0).backward()
    assert torch.equal(seen[0].to_local(), model.inp.weight.grad.to_local())
    return len(seen)


def test_a_hook_sees_the_gradient_over_the_job() -> None:
    """Not FSDP2's, of one node: what it keeps is the whole one after the pass."""
    assert run_threads(4, hooked_before) == [1] * 4


def test_a_clip_is_one_reduction(caplog: pytest.LogCaptureFixture) -> None:
    """torch's clip_grad_norm_ reduces a norm once, and no rank is warned of two reductions."""

    def clip(rank: int) -> float:
        model, _ = make(EXACT)
        loss_of(model, 0).backward()
        return float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))

    collectives = torch.distributed._functional_collectives
    all_reduce = collectives.all_reduce
    with patch.object(collectives, "all_reduce", side_effect=all_reduce) as reduced:
        norms = run_threads(4, clip)
    assert len(set(norms)) == 1 and "sequential all_reduce" not in caplog.text
    assert reduced.call_count == 4
