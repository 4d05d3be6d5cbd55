# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every feature of ZeRO-3 under every scheme: trains as under stock ZeRO-3, or is refused with its sentence."""

from __future__ import annotations

import json
import os

import pytest
import torch.distributed as dist

from tests.launcher.features import FEATURES, SCHEMES, expected, verdict
from tests.launcher.training import largest_difference
from tests.matrix import recorded
from tests.suite import CELLS_VARIABLE

OTHERS = [scheme for scheme in SCHEMES if scheme != "topo"]


def cells() -> list[object]:
    """Feature by feature; in ``make test`` each under ``topo``, every third under another scheme too, these in turn."""
    found: list[object] = []
    for index, name in enumerate(FEATURES):
        for scheme in SCHEMES:
            often = scheme == "topo" or (index % 3 == 0 and scheme == OTHERS[index // 3 % len(OTHERS)])
            found.append(pytest.param(name, scheme, marks=() if often else pytest.mark.long))
    return found


@pytest.mark.parametrize(("name", "scheme"), cells())
def test_feature_under_scheme(name: str, scheme: str) -> None:
    """Losses, weights and what the caller sees, unquantized; losses within the scheme's tolerance as it comes.

    The record, and with it the documents, says so of this cell.
    """
    said, path = verdict(name, scheme), os.environ.get(CELLS_VARIABLE)
    if path is None:
        assert said == recorded()["cells"][name][scheme], "record it anew: python -m tests.matrix"
    elif dist.get_rank() == 0:
        with open(path, "a") as file:
            file.write(json.dumps([name, scheme, said]) + "\n")


def test_the_record_knows_every_cell() -> None:
    """And no other; `tests/unit/test_tables.py` holds the documents to it."""
    cells = recorded()["cells"]
    assert list(cells) == list(FEATURES)
    assert all(list(row) == list(SCHEMES) for row in cells.values())


@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if feature.unlike])
def test_a_feature_that_acts_changes_the_losses(name: str) -> None:
    """By a hundred times what parity allows, else that would say nothing."""
    assert largest_difference(expected(name).losses, expected(FEATURES[name].unlike).losses) > 1e-3
