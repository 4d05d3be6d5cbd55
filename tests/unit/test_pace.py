# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tokens and FLOPs of a step, from the shapes that a model's forward passes get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from zero_topo.cost.transformer import scaled
from zero_topo.observe import pace as pace_of
from zero_topo.observe.pace import Pace

IDS, FLOATS = torch.zeros(4, 128, dtype=torch.int64), torch.zeros(4, 128)


def last_step(pace: Pace, *passes: list[Any]) -> dict[str, float]:
    """What is known of a step of half a second with these forward passes."""
    with patch.object(pace_of.time, "perf_counter", lambda: pace._began + 0.5):
        for inputs in passes:
            pace.forward_begins(inputs)
        pace.end_step()
    return pace.last


def test_a_step_is_all_of_its_micro_batches() -> None:
    """FLOPs are three forward passes of the usual model of that size; MFU is their share of the
    peak.
    """
    last = last_step(Pace(125_000_000, 1e12), [IDS], [IDS])
    flops = 2 * 3 * sum(replace(scaled(125_000_000), sequence=128).module_flops(512))
    assert last["tokens_per_s"] == 2048 and last["mfu"] == pytest.approx(flops / 0.5 / 1e12)
    assert last["tflops"] == pytest.approx(flops / 0.5 / 1e12)
    assert 5 * 125e6 * 1024 < flops < 6.5 * 125e6 * 1024  # the embedding takes none


def test_frozen_weights_have_no_gradients() -> None:
    """Adapters of a frozen model: the backward pass computes gradients of activations alone."""
    trained, frozen = (
        last_step(Pace(125_000_000, 1e12, share), [IDS])["mfu"] for share in (1.0, 0.0)
    )
    assert frozen == pytest.approx(trained * 2 / 3)


@pytest.mark.parametrize(
    "inputs", [[{"mask": FLOATS, "input_ids": IDS}], [(FLOATS, IDS)], [FLOATS, None, IDS, IDS[:2]]]
)
def test_token_ids_are_found_where_models_get_them(inputs: list[Any]) -> None:
    """In a dict or a tuple too; one matrix is counted."""
    last = last_step(Pace(1000, None), inputs)
    assert last["tokens_per_s"] == 1024 and "mfu" not in last


def test_nothing_is_claimed_of_other_inputs_and_of_evaluations() -> None:
    pace = Pace(1000, 1e12)
    with torch.no_grad():
        pace.forward_begins([IDS])
    assert last_step(pace, [FLOATS, torch.zeros(4, dtype=torch.int64)]) == {}
