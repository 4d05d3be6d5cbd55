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
    Net,
    both,
    loss_of,
    machine,
    make,
    mean,
    net,
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
    losses = []
    for step in range(3):
        for micro_batch in range(2):
            if left_out == "a block":
                model.left_out = {1} if micro_batch else set()
            else:
                model.set_is_last_backward(micro_batch == 1)
                for inner in model.blocks:
                    inner.normalizes = micro_batch == 0
            loss = loss_of(model, step, micro_batch)
            loss.backward()
            losses.append(mean(loss))
            if left_out == "a block":
                for param in model.parameters():
                    param.grad.mul_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("left_out", ["a block", "norms"])
def test_what_a_pass_leaves_out_keeps_its_gradient(left_out: str) -> None:
    """Also where several ranks update the same part, and a read gradient is a copy."""
    replicated = {**EXACT, "optimizer": "node"}
    found, expected = (
        run_threads(4, partly_used, block, left_out)[0] for block in (replicated, None)
    )
    assert found == pytest.approx(expected, rel=1e-6)


# -- states are saved in the middle of a step ------------------------------------------------------

KINDS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
LOSSY: dict[str, Any] = {
    **EXACT,
    "sync": {"mode": "quantized"},
    "quantize": {**EXACT["quantize"], "publish": "int4"},
}


def lossy(rank: int, saves: bool, kind: str) -> list[float]:
    """Losses with quantized sync, quantized differences, and saves where they change nothing."""
    model, optimizer = make(LOSSY, KINDS[kind])
    losses = []
    for step in range(3):
        for micro_batch in range(2):
            model.set_is_last_backward(micro_batch == 1)
            loss = loss_of(model, step, micro_batch)
            loss.backward()
            losses.append(mean(loss))
            if saves and (step or kind == "SGD"):
                get_model_state_dict(model)
                optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()
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
    """Some blocks in activation checkpoints."""

    def __init__(self, which: str, reentrant: bool) -> None:
        super().__init__(depth=4)
        self.which = which
        self.reentrant = reentrant

    def run(self, index: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run a block."""
        if self.which == "all" or (self.which == "some" and index % 2):
            return checkpoint(block, x, use_reentrant=self.reentrant)
        return super().run(index, block, x)


class Inside(nn.Module):
    """A model whose root has no parameters of its own, and whose parts are all in checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = Net(depth=4).blocks
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def recomputed(rank: int, which: str, reentrant: bool, sync: dict[str, Any]) -> Any:
    """Losses, bytes of sync and passes of steps of two micro-batches."""
    model = Inside(reentrant) if which == "root" else Checkpointed(which, reentrant)
    model, optimizer = make({**EXACT, "sync": sync}, model=model)
    losses = []
    for step in range(2):
        for micro_batch in range(2):
            model.set_is_last_backward(micro_batch == 1)
            loss = loss_of(model, step, micro_batch)
            loss.backward()
            losses.append(mean(loss))
        optimizer.step()
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


def decayed(param: Any) -> None:
    """Another tensor, computed from both in either order."""
    param.grad = 0.1 * param + param.grad * (param.detach().abs() < 0.2)


def clipped(param: Any) -> None:
    """By the norm of the weight."""
    most = 0.01 * param.norm()
    norm = param.grad.norm()
    param.grad.mul_(torch.where(norm > most, most / norm, 1.0))


def scaled(param: Any) -> None:
    """By the norms of a weight's rows."""
    rows = param.detach().reshape(param.shape[0], -1).pow(2).sum(1)
    param.grad.mul_((rows / (1 + rows)).reshape(-1, *[1] * (param.dim() - 1)))


def masked(param: Any) -> None:
    """Masks and copies of both."""
    param.grad.masked_fill_((param.grad * param) > 0, 0.0)
    param.grad.copy_(torch.sign(param.grad) * param.abs().clamp(max=0.01))


CHANGES = (decayed, clipped, scaled, masked)


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
            for change, param in zip(CHANGES, params[::4], strict=True):
                change(param)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, mean(loss_of(model, 9))]


def test_gradients_are_computed_with_weights() -> None:
    """An operation on ``param.grad`` and ``param`` is that of plain FSDP2."""
    close(*both(with_weights))


def written_by_hand(rank: int) -> list[str]:
    """Updates of a weight by its gradient, without an optimizer."""
    model, _ = make(EXACT)
    loss_of(model, 0).backward()
    param = model.inp.weight
    lines = []
    with torch.no_grad():
        for write in (
            lambda: param.add_(param.grad, alpha=-0.1),
            lambda: param.copy_(param - param.grad),
            lambda: torch._foreach_add_([param], [param.grad], alpha=-0.1),
        ):
            before = param.to_local().clone()
            with pytest.raises(RuntimeError) as error:
                write()
            assert torch.equal(before, param.to_local())
            lines.append(str(error.value))
    return lines


def test_a_weight_is_not_written_by_a_part_of_its_gradient() -> None:
    """Other ranks store copies of the weight: one line says who updates it."""
    for lines in run_threads(4, written_by_hand):
        for line in lines:
            assert "let the optimizer of shard_optimizer update it" in line and "\n" not in line


def kept(rank: int) -> list[str]:
    """Gradients that are read too early, by the user's own hook, or too late."""
    model, optimizer = make(EXACT)
    lines = []

    def early(param: Tensor) -> None:
        with pytest.raises(RuntimeError) as error:
            param.grad.norm()  # type: ignore[union-attr]
        lines.append(str(error.value))

    model.inp.weight.register_post_accumulate_grad_hook(early)
    loss_of(model, 0).backward()
    grad = model.inp.weight.grad
    copied = grad.clone()
    optimizer.step()
    with pytest.raises(RuntimeError) as error:
        grad.norm()
    assert copied.norm() > 0
    return [*lines, str(error.value)]


def test_a_gradient_is_read_between_pass_and_step() -> None:
    """In a hook it is not reduced between nodes yet, after the step it is gone: a line each."""
    for early, after in run_threads(4, kept):
        assert "read param.grad after the pass" in early and "\n" not in early
        assert "copy it by param.grad.clone()" in after and "\n" not in after


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
    calls = []
    original = torch.distributed._functional_collectives.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    def clip(rank: int) -> float:
        model, _ = make(EXACT)
        loss_of(model, 0).backward()
        return float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))

    with patch.object(torch.distributed._functional_collectives, "all_reduce", counted):
        norms = run_threads(4, clip)
    assert len(set(norms)) == 1 and "sequential all_reduce" not in caplog.text
    assert len(calls) == 4
