# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls train on FSDP2 with ours as without."""

from __future__ import annotations

import pytest

from tests.harness import run_threads
from tests.marks import late
from tests.ranks.fsdp_search import against_no_move, against_plain

LENGTH = 14
SEARCHES = {"plain FSDP2": against_plain, "no move": against_no_move}


def searched(rank: int, search: str, seeds: range) -> list[str]:
    """Sequences that end elsewhere."""
    apart = []
    for seed in seeds:
        difference, sequence = SEARCHES[search](seed, LENGTH)
        if difference > 1e-6:
            apart.append(f"{difference:.1e} apart, {sequence}")
    return apart


@pytest.mark.parametrize(
    ("ranks", "search", "seeds"),
    [
        (4, "plain FSDP2", range(4)),
        (2, "no move", range(3)),
        *(late(4, "plain FSDP2", range(first, first + 50)) for first in range(0, 200, 50)),
        *(late(2, "plain FSDP2", range(first, first + 50)) for first in range(200, 400, 50)),
        late(8, "plain FSDP2", range(400, 420)),
        *(late(4, "no move", range(first, first + 50)) for first in range(0, 100, 50)),
    ],
)
def test_a_sequence_of_calls_is_as_without_us(ranks: int, search: str, seeds: range) -> None:
    """Losses, norms, gradients and weights, to 1e-6."""
    apart = run_threads(ranks, searched, search, seeds, timeout=600)[0]
    assert not apart, "\n".join(apart)
