# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The rows of FSDP2 in the benchmark of the emulated cluster train, and their formulas say what
crosses nodes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.emulated_cluster.spec import LinkRates, Spec
from benchmarks.fsdp_training import FsdpEngine
from benchmarks.schemes import KNOWN
from benchmarks.training_setup import TrainingSetup
from tests.harness import run_threads
from tests.ranks.fsdp_scripts import net
from zero_topo.examples.gpt import GPT

SPEC = Spec("tiny", 2, 1, 2, LinkRates(80, 60, 40))
SETUP = TrainingSetup(layers=1, width=64, context=8, batch=1, lr=1e-3)


def row(rank: int, name: str) -> tuple[list[float], float]:
    """Losses of three steps of two micro-batches on rank 0's data, and the bytes that leave a node
    by the formula.
    """
    job: dict[str, Any] = {
        **KNOWN[name].job_on(SPEC.topology_block()),
        "ring": False,
        "micro_batches": 2,
    }
    model = net(model=GPT(SETUP.layers, SETUP.width, SETUP.heads, SETUP.context))
    engine = FsdpEngine(model, SETUP, job)
    tokens = torch.arange(9)[None]
    losses = []
    for _ in range(6):
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    expected, stats = engine.expected(SPEC)
    if stats is not None:
        sent = sum(nbytes for (_, domain), nbytes in stats.step_bytes.items() if domain == "world")
        assert sent * SPEC.ranks_per_node == expected
    return losses, expected


@pytest.mark.long
def test_rows_of_fsdp2_train_and_say_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain FSDP2 over all ranks and with replicas, and ours: alike losses; INT4 sends least across
    nodes.
    """
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(SPEC.ranks_per_node))
    names = ("fsdp", "fsdp-paper", "hsdp-fsdp", "fsdp-nf4")
    found = {name: run_threads(SPEC.world_size, row, name)[0] for name in names}
    for losses, _ in found.values():
        assert losses[-1] < losses[0] - 0.05
        assert losses == pytest.approx(found["fsdp"][0], abs=0.1)
    sent = [nbytes for _, nbytes in found.values()]
    assert sent == sorted(sent, reverse=True) and sent[-1] < sent[2] / 2
