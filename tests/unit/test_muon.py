# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What is counted of Muon: states and exchange, by hand; and that equal matrices are one batch.

Two layers of width 64 have eight matrices: 64 x 192, 64 x 64 and two of 64 x 256 each, 98,304
elements. All sizes are multiples of 16 ranks, so nothing is padded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.counting import Launches
from tests.commands import Run
from tests.plans import printed, resolve
from zero_topo.cost.job import Job
from zero_topo.cost.memory import predict_memory
from zero_topo.cost.transformer import SEQUENCE, VOCABULARY, Transformer, scaled
from zero_topo.cost.volume import step_bytes
from zero_topo.hook.muon import orthogonalized
from zero_topo.topology.presets import load_preset

TWO_LAYERS = Transformer("two layers", 2, 64, 1, VOCABULARY, SEQUENCE, 256)
LLAMA = Transformer("7b", 32, 4096, 32, 32000, 4096, 11008, gated=True, biases=False)
ELEMENTS = 98_304
SENT = 2 * 2 * ELEMENTS
"""Bytes of all gradients to the owners and of all updates back, in 16 bits."""


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """DeepSpeed compiles Muon's functions, which takes minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def config(optimizer: str, **block: Any) -> dict[str, Any]:
    """A DeepSpeed config on 16 ranks of Frontier."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "reduce_scatter": False},
        **({"zero_topo": {"topology": "frontier", **block}} if block else {}),
    }


def costs(muon: bool, **block: Any) -> tuple[dict[str, int], Any]:
    """Memory and bytes of a step on 16 ranks of Frontier."""
    job = Job(TWO_LAYERS, micro_batches=8, muon=muon)
    plan = resolve(load_preset("frontier", 16), **block)
    return predict_memory(plan, job.work, job), step_bytes(plan, job.work)


@pytest.mark.parametrize(("scheme", "owners"), [("zero3", 16), ("hsdp", 8)])
def test_memory_and_bytes_of_a_plan(scheme: str, owners: int) -> None:
    """A rank stores 4 bytes less of each element of its shard, and sends its part of the
    matrices.
    """
    muon, adam = costs(True, scheme=scheme), costs(False, scheme=scheme)
    assert adam[0]["optimizer"] - muon[0]["optimizer"] == 4 * ELEMENTS // owners
    key = ("matrices", "world" if owners == 16 else "node")
    assert muon[1] == {**adam[1], key: SENT // owners * (owners - 1) // owners}


def test_muon_has_the_matrices_of_layers() -> None:
    """Not those of the embedding and the head, nor vectors."""
    job = Job(LLAMA, muon=True)
    elements = sum(n for n, muon in zip(job.work.numels, job.work.whole, strict=True) if muon)
    assert elements == 32 * (4 * 4096**2 + 3 * 4096 * 11008)


PARAMS = ("--params", "20B", "--ranks", "16")
OF_PARAMS = Job(scaled(20 * 10**9), muon=True).work
MATRICES = sum(n for n, whole in zip(OF_PARAMS.numels, OF_PARAMS.whole, strict=True) if whole)


def test_check_counts_muon(run: Run, tmp_path: Path) -> None:
    """As the optimizer of the config that it reads."""
    found = []
    for optimizer in ("Muon", "AdamW"):
        file = tmp_path / f"{optimizer}.json"
        file.write_text(json.dumps(config(optimizer, scheme="hsdp")))
        found.append(printed(run, "check", str(file), *PARAMS)["cost"])
    muon, adam = found
    saved = adam["memory"]["optimizer"] - muon["memory"]["optimizer"]
    assert saved == pytest.approx(4 * MATRICES / 8, rel=1e-6)
    sent = muon["sent_by_domain"]["node"] - adam["sent_by_domain"]["node"]
    assert sent == pytest.approx(4 * MATRICES / 8 * 7 / 8, rel=1e-6)


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_equal_matrices_are_one_batch(method: str, heads: int | None) -> None:
    """Sixteen take no more launches than two, whole or head by head, and give what each gives by
    itself.
    """
    matrices, found = torch.randn(16, 32, 24), Launches()
    for count in (2, 16):
        with found.phase(str(count)):
            together = orthogonalized(matrices[:count].clone(), [heads] * count, method)
    alone = [orthogonalized(matrix[None].clone(), [heads], method)[0] for matrix in matrices]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-5)
    assert found.phases["2"].launches == found.phases["16"].launches
