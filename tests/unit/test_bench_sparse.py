# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The benchmark of sparse modes: what it runs, refuses and shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zero_topo.bench import sparse_report
from zero_topo.bench.sparse import MODES, SparseBench
from zero_topo.bench.sparse_ranks import model_for
from zero_topo.cli.recording import save
from zero_topo.config import SPARSE_MODES


def test_every_mode_is_measured_and_dense_once() -> None:
    """A mode that is added to the config is added to the benchmark."""
    jobs = list(SparseBench(sources=("synthetic",), densities=(0.1, 0.01)).jobs())
    assert {job["scheme"] for job in jobs} == {"dense", *(mode.MODE for mode in SPARSE_MODES)} == set(MODES)
    assert [job["density"] for job in jobs if job["scheme"] == "dense"] == [1.0]
    assert all(sum(job["scheme"] == mode.MODE for job in jobs) == 2 for mode in SPARSE_MODES)


@pytest.mark.parametrize("numel", [1, 10_000, 262_144, 1 << 20, 50_000_000])
def test_there_is_a_model_of_every_size(numel: int) -> None:
    """Its heads divide its width, and of its parameters there are about as many as asked for, if it can be so small."""
    config = model_for(numel)
    assert config.width % config.heads == 0
    assert numel < 20_000 or 0.7 * numel < 12 * config.layers * config.width**2 < 1.4 * numel


def test_a_record_is_shown_and_drawn(tmp_path: Path) -> None:
    """A line for each result, whole numbers, and the picture beside the record."""
    seconds = {"median": 0.5, "min": 0.4, "max": 0.6, "repeats": 3}
    sent = {"numel": 1000, "bytes_per_rank": 12346, "words_per_k": 3.5, "seconds": seconds, "exchange_s": 0.2}
    run: dict[str, Any] = {**sent, "source": "synthetic", "error": 0.1}
    densities = {"dense": 1.0, "oktopk": 0.01, "topk_a": 0.01}
    wanted = [{"mode": mode, "ranks": ranks, "density": densities[mode]} for mode in densities for ranks in (4, 8)]
    results = [{**run, **row} for row in wanted]
    console = Console(record=True, width=80, file=(tmp_path / "out").open("w"))
    sparse_report.show({"results": results}, console)
    shown = console.export_text()
    assert shown.count("oktopk") == 2 and "12.35 KB" in shown and "3.50" in shown
    (picture,) = save(sparse_report.draw({"results": results}), tmp_path)
    assert picture.stat().st_size > 1000
