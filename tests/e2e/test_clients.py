# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""TRL's trainers on four ranks: unquantized as under stock ZeRO-3, by default near it.

Each builds its engine in its own way: from a path, with a reference model, with adapters, with
`generate` in training.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_trainers import outcome

CLOSE, NEAR = 1e-6, 0.05
pytestmark = pytest.mark.long


@pytest.mark.parametrize("client", ["sft", "dpo", "dpo_lora", "grpo"])
def test_it_trains_as_under_stock_zero3(client: str, tmp_path: Path) -> None:
    """Six steps from the same weights on the same data."""
    pytest.importorskip("trl", reason="pip install 'zero-topo[clients]'")
    found = outcome(["clients.py", client], tmp_path)
    assert [found[name]["topo"] for name in ("plain", "topo", "default")] == [None, 6, 6]
    assert found["topo"]["losses"] == pytest.approx(found["plain"]["losses"], rel=0, abs=CLOSE)
    if client in ("dpo", "grpo"):  # the reference has the policy's bits
        assert found["default"]["losses"][0] == found["plain"]["losses"][0]
    assert found["default"]["losses"] == pytest.approx(found["plain"]["losses"], rel=0, abs=NEAR)
