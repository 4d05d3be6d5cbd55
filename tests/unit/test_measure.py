# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Measuring a machine: the device a rank takes, how often pairs are timed.
`tests/e2e/test_measure.py` measures one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_topo import measure


def test_a_rank_takes_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn, where there are fewer; the CPU, where there is none or ``DS_ACCELERATOR`` says
    so.
    """
    cpu, taken = torch.device("cpu"), list[int]()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert measure.choose_device({}) == cpu
    for name, found in (
        ("is_available", True),
        ("current_accelerator", torch.device("cuda")),
        ("device_count", 2),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda found=found: found)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    assert measure.choose_device({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "1"}) == cpu and not taken
    assert measure.choose_device({"LOCAL_RANK": "3"}) == torch.device("cuda", 1) and taken == [1]


@pytest.mark.parametrize("irregular", [0, 1, 2, 3])
def test_pairs_are_timed_again_while_their_tree_is_not_regular(
    irregular: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times at most, and all times so far count; then what is irregular is said."""
    seen: list[int] = []
    prober: Any = SimpleNamespace()

    def cluster(pairs: dict[tuple[int, int], int], hosts: list[str]) -> str:
        seen.append(pairs[0, 1])
        if len(seen) <= irregular:
            raise ValueError("no regular tree")
        return "tree"

    monkeypatch.setattr(measure, "_pairs", lambda *_: {(0, 1): [(1, 1.0)]})
    monkeypatch.setattr(measure, "fit", len)
    monkeypatch.setattr(measure, "cluster", cluster)
    if irregular == 3:
        with pytest.raises(ValueError, match="no regular tree"):
            measure._tree(prober, ["a", "a"], lambda *_: None)
    else:
        found: Any = measure._tree(prober, ["a", "a"], lambda *_: None)[0]
        assert found == "tree"
    assert seen == [1, 2, 3][: irregular + 1]
