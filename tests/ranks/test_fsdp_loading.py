# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints on FSDP2: FP32 masters are those that were saved. Loads in other orders are in
``test_fsdp_search.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.ranks.fsdp_scripts import LOSSY, make, train, whole
from tests.ranks.test_fsdp_search import ROUNDED

WHOLE = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


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


def saved_flat(model: Any, optimizer: Any) -> Any:
    """Copies of this rank's shards under names of parameter and entry, as torchtitan saves them."""
    return copy.deepcopy(get_state_dict(model, optimizer, options=FLAT))


def saved_methods(model: Any, optimizer: Any) -> Any:
    """What the methods of both return, copied."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


LOADS: dict[str, tuple[Callable[..., Any], Callable[..., None], dict[str, Any]]] = {
    "whole": (saved_whole, set_both, {"options": WHOLE}),
    "twice": (saved_whole, twice, {"options": WHOLE}),
    "flat": (saved_flat, set_both, {"options": FLAT}),
    "methods": (saved_methods, load_methods, {}),
}


def resumed(rank: int, kind: str, load: str, optimizer_kind: Any) -> tuple[Any, Any]:
    """Losses of the run that saved, and of one that starts elsewhere and loads."""
    dtype, block = ROUNDED[kind]
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


@pytest.mark.parametrize(
    ("kind", "load", "optimizer"),
    [
        ("bf16", "flat", torch.optim.AdamW),
        late("bf16", "methods", torch.optim.AdamW),
        late("int4", "twice", torch.optim.AdamW),
        ("bf16", "whole", torch.optim.SGD),
    ],
)
def test_masters_are_those_of_the_checkpoint(kind: str, load: str, optimizer: Any) -> None:
    """Loaded by other ways than in ``test_fsdp_search.py``, of an optimizer without states too: the
    loaded run has the losses of the one that saved.
    """
    for went_on, found in run_threads(4, resumed, kind, load, optimizer):
        assert found == went_on


class Moved(NamedTuple):
    """After a save or a load: whole moments and masters, and the sum of a parameter's residuals."""

    moments: list[Tensor]
    masters: list[Tensor]
    residual: float


def moved(rank: int, folder: Path, block: Any, how: Any, saves: bool) -> Moved:
    """A training that is saved by DCP, or loaded."""
    model, optimizer = make(block, seed=1 if saves else 7)
    if saves:
        train(model, optimizer, range(2))
    weights, states = get_state_dict(model, optimizer, options=how)
    state = {"model": weights, "optimizer": states}
    residual = torch.zeros(())
    if saves:
        dcp.save(state, checkpoint_id=folder)
        entries: Any = states
        if not how:
            entries = entries["state"]["out.weight"]
        prefix = "state.out.weight." if how else ""
        residual = whole(entries[f"{prefix}zero_topo_residual"]).abs().sum()
    else:
        dcp.load(state, checkpoint_id=folder)
        set_both(model, optimizer, weights, states, options=how)
    moments = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    masters = []
    for part in getattr(optimizer, "parts", {}).values():
        part.follow_edits()
        masters.append(part.as_dtensor(part.master.detach()).full_tensor())
        if part.name == "out.weight" and not saves:
            own_row = optimizer.gradients.own_row[None]
            layout = optimizer.gradients.layout
            residual = layout.parameter(own_row, part.param_index).abs().sum()
            dist.all_reduce(residual)
    return Moved([whole(moment).clone() for moment in moments], masters, float(residual))


@pytest.mark.parametrize("how", [None, FLAT], ids=["shards", "flat"])
def test_checkpoints_load_on_half_the_ranks(how: Any, tmp_path: Path) -> None:
    """DCP cuts states and masters anew, and residuals become gradients of the first step; plain
    FSDP2 reads the same checkpoint.
    """
    saved = run_threads(4, moved, tmp_path, LOSSY, how, True)[0]
    found = run_threads(2, moved, tmp_path, LOSSY, how, False)[0]
    plain = run_threads(4, moved, tmp_path, None, how, False)[0]
    assert all(map(torch.equal, found.masters, saved.masters))
    for moments in (found.moments, plain.moments):
        assert all(map(torch.equal, moments, saved.moments))
    assert saved.residual > 0 and found.residual == pytest.approx(saved.residual, rel=1e-5)


def edited(rank: int, kind: str) -> None:
    """Edits before and after a load, of weights that are loaded and of ones that are not."""
    dtype, block = ROUNDED[kind]
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


@pytest.mark.parametrize("kind", ["int4", late("bf16")])
def test_edits_around_a_load_reach_the_masters(kind: str) -> None:
    """A load of the optimizer alone leaves the weights, as under FSDP2, and masters follow them."""
    run_threads(4, edited, kind)
