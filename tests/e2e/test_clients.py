# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Trainers of other libraries on four ranks: unquantized as under stock ZeRO-3, by default near it.

Each builds its engine in its own way: from a path, with a reference model, with adapters, with
`generate` in training.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.test_trainers import outcome

CLOSE, NEAR = 1e-6, 0.05
CLIENTS = {
    **dict.fromkeys(("sft", "dpo", "dpo_lora", "kto", "reward", "grpo"), "trl"),
    "fabric": "lightning_fabric",
    "seq2seq": "transformers",
    "sentences": "sentence_transformers",
}
pytestmark = pytest.mark.long


@pytest.mark.parametrize("client", CLIENTS)
def test_it_trains_as_under_stock_zero3(client: str, tmp_path: Path) -> None:
    """Six steps from the same weights on the same data."""
    for name in {"datasets", CLIENTS[client]}:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'zero-topo[clients]'")
    found = outcome(
        ["fabric.py" if client == "fabric" else "clients.py", client], tmp_path, ranks=4
    )
    assert [found[name]["topo"] for name in ("plain", "topo", "default")] == [None, 6, 6]
    assert found["topo"]["losses"] == pytest.approx(found["plain"]["losses"], rel=0, abs=CLOSE)
    if client in ("dpo", "kto", "grpo"):  # the reference has the policy's bits
        assert found["default"]["losses"][0] == found["plain"]["losses"][0]
    assert found["default"]["losses"] == pytest.approx(found["plain"]["losses"], rel=0, abs=NEAR)
