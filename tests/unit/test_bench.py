# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks start, take every scheme that they know, and compare losses by seed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quantizers
from benchmarks.__main__ import main
from benchmarks.choice import schemes_named
from benchmarks.cluster import ClusterBench
from benchmarks.convergence import Convergence, compare, run
from benchmarks.emulated_cluster.spec import SPECS
from benchmarks.schemes import KNOWN
from benchmarks.training_setup import TrainingSetup

SETUP = TrainingSetup(layers=1, width=64, context=8, batch=1, bf16=False)


def test_quantizers_writes_the_record_that_it_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch.compile takes a minute
    found = quantizers.peers
    monkeypatch.setattr(
        quantizers, "peers", lambda *a: (p for p in found(*a) if p.name != "torch.compile")
    )
    file = tmp_path / "record.json"
    words = "quantizers --size 65536 --repeats 1 --threads 1 --dtypes bf16 --blocks 64 --json"
    assert main([*words.split(), "--record", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def test_cluster_takes_every_scheme() -> None:
    setup = replace(SETUP, width=128, bf16=True)
    for spec in SPECS.values():
        ClusterBench(spec, tuple(KNOWN.values()), (1, 8), setup, warmup=60)


def test_convergence_trains_in_one_process() -> None:
    wanted = tuple(schemes_named(["oktopk"]))
    bench = Convergence(wanted, SETUP, 10, (0,), floors=0, shape=(2, 1, 1), one_process=True)
    *_, content = run(bench, lambda *_: None)
    assert {row["scheme"] for row in content["results"]} == {"stock", "oktopk"}


def curve(level: float, *last: float, evaluation: float) -> dict[str, Any]:
    losses = [level] * (20 - len(last)) + list(last)
    return {"losses": losses, "evaluation": evaluation, "crossing_bytes": None}


def test_differences_are_paired_by_seed() -> None:
    """Seeds far apart do not hide a scheme that is one percent worse with each of them."""
    plain = {0: curve(1.0, evaluation=1.0), 1: curve(3.0, evaluation=3.0)}
    worse = {0: curve(1.0, 1.01, 1.01, evaluation=0.99), 1: curve(3.0, 3.03, 3.03, evaluation=3.06)}
    stock, topo = compare({"stock": plain, "topo": worse})
    assert stock["last"]["difference"]["worst"] == 0 and stock["last"]["loss"] == 2.0
    assert topo["last"]["difference"]["by_seed"] == pytest.approx({"0": 0.01, "1": 0.01})
    assert topo["overall"]["difference"]["mean"] == pytest.approx(0.001)
    assert topo["evaluation"]["difference"]["worst"] == pytest.approx(0.02)
