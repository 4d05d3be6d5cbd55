# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every feature of ZeRO-3 under every scheme: trains as under stock ZeRO-3, or is refused with its
sentence.
"""

from __future__ import annotations

import json
import os
from itertools import product

import pytest
import torch.distributed as dist

from tests.launcher.features import FEATURES, SCHEMES, verdict
from tests.matrix import recorded
from tests.suite import CELLS_VARIABLE


@pytest.mark.parametrize(("name", "scheme"), [*product(FEATURES, SCHEMES)])
def test_feature_under_scheme(name: str, scheme: str) -> None:
    """Losses, weights and what the caller sees, unquantized; for the record also losses as the
    scheme comes.

    The record, and with it the documents, says so of this cell.
    """
    path = os.environ.get(CELLS_VARIABLE)
    said = verdict(name, SCHEMES[scheme] if path else SCHEMES[scheme][:1])
    if path is None:
        assert said == recorded()["cells"][name][scheme], "record it anew: python -m tests.matrix"
    elif dist.get_rank() == 0:
        with open(path, "a") as file:
            file.write(json.dumps([name, scheme, said]) + "\n")


@pytest.mark.core
def test_the_record_knows_every_cell() -> None:
    """And no other; `tests/unit/test_tables.py` holds the documents to it."""
    cells = recorded()["cells"]
    assert list(cells) == list(FEATURES)
    assert all(list(row) == list(SCHEMES) for row in cells.values())
