# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tokens and FLOPs of a step, from the shapes that a model's forward passes get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed  # noqa: F401 (the hook is installed into it, with all of its modules)
import pytest
import torch

from zero_topo.cost.transformer import scaled
from zero_topo.hook import pace as pace_of
from zero_topo.hook.pace import Pace

IDS, FLOATS = torch.zeros(4, 128, dtype=torch.int64), torch.zeros(4, 128)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The host's clock, in seconds."""
    now = [100.0]
    monkeypatch.setattr(pace_of.time, "perf_counter", lambda: now[0])
    return now


def test_a_step_is_all_of_its_micro_batches(clock: list[float]) -> None:
    """FLOPs are three forward passes of the planner's model of that size; MFU is their share of the peak."""
    pace = Pace(125_000_000, 1e12)
    for _ in range(2):
        pace.forward_begins([IDS])
    clock[0] += 0.5
    pace.end_step()
    flops = 2 * 3 * sum(replace(scaled(125_000_000), sequence=128).module_flops(512))
    assert pace.last["tokens_per_s"] == 2048 and pace.last["mfu"] == pytest.approx(flops / 0.5 / 1e12)
    assert pace.last["tflops"] == pytest.approx(flops / 0.5 / 1e12)
    assert 5 * 125e6 * 1024 < flops < 6.5 * 125e6 * 1024  # the embedding takes none


def test_frozen_weights_have_no_gradients(clock: list[float]) -> None:
    """Adapters of a frozen model: the backward pass computes gradients of activations alone."""
    found = []
    for trained in (1.0, 0.0):
        pace = Pace(125_000_000, 1e12, trained)
        pace.forward_begins([IDS])
        clock[0] += 0.5
        pace.end_step()
        found.append(pace.last["mfu"])
    assert found[1] == pytest.approx(found[0] * 2 / 3)


@pytest.mark.parametrize(
    "inputs", [[{"mask": FLOATS, "input_ids": IDS}], [(FLOATS, IDS)], [FLOATS, None, IDS, IDS[:2]]]
)
def test_token_ids_are_found_where_models_get_them(inputs: list[Any], clock: list[float]) -> None:
    """In a dict or a tuple too; one matrix is counted."""
    pace = Pace(1000, None)
    pace.forward_begins(inputs)
    clock[0] += 1
    pace.end_step()
    assert pace.last["tokens_per_s"] == 512 and "mfu" not in pace.last


def test_nothing_is_claimed_of_other_inputs_and_of_evaluations(clock: list[float]) -> None:
    pace = Pace(1000, 1e12)
    pace.forward_begins([FLOATS, torch.zeros(4, dtype=torch.int64)])
    with torch.no_grad():
        pace.forward_begins([IDS])
    clock[0] += 1
    pace.end_step()
    assert pace.last == {}
