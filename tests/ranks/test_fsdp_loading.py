# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints on FSDP2: FP32 masters are those that were saved. Loads in other orders are in
``fsdp_search.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.harness import run_threads
from tests.marks import late
from tests.ranks.fsdp_scripts import EXACT, make, train

WHOLE = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
INT4: dict[str, Any] = {**EXACT, "quantize": {**EXACT["quantize"], "publish": "int4"}}
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, EXACT),
    "fp16": (torch.float16, EXACT),
    "int4": (torch.float32, INT4),
    "bf16 and int4": (torch.bfloat16, INT4),
}


def set_both(model: Any, optimizer: Any, weights: Any, states: Any, **how: Any) -> None:
    """torch's own order: the optimizer, then the model."""
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, **how)


def load_methods(model: Any, optimizer: Any, weights: Any, states: Any) -> None:
    """The methods of both, the optimizer's first."""
    optimizer.load_state_dict(states)
    model.load_state_dict(weights)


def twice(model: Any, optimizer: Any, weights: Any, states: Any, **how: Any) -> None:
    """Other weights in between, as for an evaluation of averaged ones."""
    set_both(model, optimizer, weights, states, **how)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value + 1 for name, value in own.items()})
    model.load_state_dict(own)


def saved_whole(model: Any, optimizer: Any) -> Any:
    """Whole tensors, equal on all ranks."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    objects = [copy.deepcopy(get_state_dict(model, optimizer, options=options))]
    dist.broadcast_object_list(objects, 0)
    return objects[0]


def saved_shards(model: Any, optimizer: Any) -> Any:
    """Copies of this rank's shards."""
    return copy.deepcopy(get_state_dict(model, optimizer))


def saved_flat(model: Any, optimizer: Any) -> Any:
    """Copies of this rank's shards under names of parameter and entry, as torchtitan saves them."""
    return copy.deepcopy(get_state_dict(model, optimizer, options=FLAT))


def saved_methods(model: Any, optimizer: Any) -> Any:
    """What the methods of both return, copied."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


LOADS: dict[str, tuple[Callable[..., Any], Callable[..., None], dict[str, Any]]] = {
    "whole": (saved_whole, set_both, {"options": WHOLE}),
    "whole, twice": (saved_whole, twice, {"options": WHOLE}),
    "shards": (saved_shards, set_both, {}),
    "flat": (saved_flat, set_both, {"options": FLAT}),
    "methods": (saved_methods, load_methods, {}),
}


def resumed(rank: int, kind: str, load: str, optimizer_kind: Any) -> tuple[Any, Any]:
    """Losses of the run that saved, and of one that starts elsewhere and loads."""
    dtype, block = KINDS[kind]
    save, set_states, how = LOADS[load]
    model, optimizer = make(block, optimizer_kind, dtype=dtype)
    train(model, optimizer, range(3))
    weights, states = save(model, optimizer)
    masters = {part.name: part.master.detach().clone() for part in optimizer.parts.values()}
    went_on = train(model, optimizer, range(3, 6))
    model, optimizer = make(block, optimizer_kind, dtype=dtype, seed=7)
    if load == "methods":
        train(model, optimizer, range(1))
    set_states(model, optimizer, weights, states, **how)
    for part in optimizer.parts.values():
        part.follow_edits()
        assert torch.equal(part.master, masters[part.name])
    return went_on, train(model, optimizer, range(3, 6))


def cases() -> list[Any]:
    """Every type with every way; ``make test`` tries two."""
    found = []
    for kind in KINDS:
        for load in LOADS:
            case = (kind, load)
            often = case in (("bf16", "flat"), ("int4", "whole"))
            found.append(case if often else late(*case))
    return found


@pytest.mark.parametrize(("kind", "load"), cases())
def test_masters_are_those_of_the_checkpoint(kind: str, load: str) -> None:
    """From any source: the loaded run has the losses of the one that saved."""
    for went_on, found in run_threads(4, resumed, kind, load, torch.optim.AdamW):
        assert found == went_on


@pytest.mark.parametrize(
    ("kind", "load"), [("bf16", "whole"), late("bf16", "flat"), late("int4", "whole")]
)
def test_masters_of_an_optimizer_without_states(kind: str, load: str) -> None:
    """Plain SGD has no states, and masters nevertheless."""
    for went_on, found in run_threads(4, resumed, kind, load, torch.optim.SGD):
        assert found == went_on


def moved(rank: int, folder: Path, kind: str, save: bool) -> Mapping[str, Tensor]:
    """Whole masters that are saved by DCP, or loaded."""
    dtype, block = KINDS[kind]
    model, optimizer = make(block, dtype=dtype, seed=1 if save else 7)
    if save:
        train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    if save:
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    else:
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_both(model, optimizer, weights, states)
    found = {}
    for part in optimizer.parts.values():
        part.follow_edits()
        found[part.name] = part.as_dtensor(part.master.detach()).full_tensor()
    return found


@pytest.mark.parametrize("kind", ["int4", late("bf16")])
def test_masters_on_another_number_of_ranks(kind: str, tmp_path: Path) -> None:
    """DCP cuts them anew."""
    saved = run_threads(4, moved, tmp_path, kind, True)[0]
    for found in run_threads(2, moved, tmp_path, kind, False):
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def edited(rank: int, kind: str) -> bool:
    """Edits before and after a load, of weights that are loaded and of ones that are not."""
    dtype, block = KINDS[kind]
    model, optimizer = make(block, dtype=dtype)
    train(model, optimizer, range(2))
    _, states = saved_whole(model, optimizer)
    with torch.no_grad():
        model.out.weight.add_(1)
    set_optimizer_state_dict(model, optimizer, states, options=WHOLE)
    with torch.no_grad():
        model.inp.weight.mul_(0)
    for part in optimizer.parts.values():
        part.follow_edits()
        kept = part.master[: part.numel].to(dtype)
        if part.name in ("out.weight", "inp.weight"):
            assert torch.equal(kept, part.weights())
    return True


@pytest.mark.parametrize("kind", ["int4", late("bf16")])
def test_edits_around_a_load_reach_the_masters(kind: str) -> None:
    """A load of the optimizer alone leaves the weights, as under FSDP2, and masters follow them."""
    assert all(run_threads(4, edited, kind))


def residuals(rank: int, load: str) -> list[Tensor]:
    """The gradient shard after a load, which has all residuals of sync."""
    block = {**EXACT, "sync": {"mode": "ternary"}}
    model, optimizer = make(block)
    train(model, optimizer, range(3))
    save, set_states, how = LOADS[load]
    weights, states = save(model, optimizer)
    model, optimizer = make(block, seed=7)
    set_states(model, optimizer, weights, states, **how)
    return [optimizer.gradients.own_row.clone()]


def test_a_flat_checkpoint_has_the_residuals() -> None:
    """Under whatever names it is saved."""
    expected = run_threads(4, residuals, "shards")
    assert any(bool(row.any()) for (row,) in expected)
    for (found,), (right,) in zip(run_threads(4, residuals, "flat"), expected, strict=True):
        assert torch.equal(found, right)
