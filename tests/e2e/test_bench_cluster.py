# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Training in a real emulated cluster moves what it should.

Skipped where no cluster can be built: it needs root, `ip` and `tc`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.emulated_cluster import network
from benchmarks.emulated_cluster.spec import LinkRates, Spec
from tests.launching import ROOT, output

REASON = network.refusal()
pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


# Two nodes of one GPU of two GCDs. Links are fast, so that the test is.
TRAINING = Spec("pairs", 2, 1, 2, LinkRates(800, 800, 400))
WORDS = ["--micro-batches", "2", "--steps", "2", "--params", "265e3", "--layers", "1"]


def test_training_moves_the_bytes_of_the_formula(tmp_path: Path) -> None:
    """Stock with the ring, zero3 and topo, and two of them with TP 2 inside the GPU: the kernel
    counts on each uplink what the formulas say, and no drop. The pair sees the samples of both, so
    losses with TP are those without.
    """
    names = ["stock-ring", "zero3", "topo", "stock-ring-tp2", "topo-tp2"]
    path, record = tmp_path / "spec.json", tmp_path / "record.json"
    path.write_text(json.dumps(TRAINING.to_json()))
    words = [sys.executable, "-m", "benchmarks", "cluster", "--spec", str(path), *WORDS]
    words += ["--schemes", ",".join(names), "--record", str(record), "--json"]
    content: dict[str, Any] = json.loads(output(words, cwd=ROOT, timeout=300))
    records.write(tmp_path / "printed.json", content)  # numbers of lists have six digits there
    assert (tmp_path / "printed.json").read_text() == record.read_text()
    assert [row["scheme"] for row in content["results"]] == names
    losses = {row["scheme"]: row["loss"] for row in content["results"]}
    for name in ("stock-ring", "topo"):
        assert losses[f"{name}-tp2"] == pytest.approx(losses[name], rel=0.02)
    for row in content["results"]:
        assert row["drops"] == 0 and row["micro_batches"] == 2
        assert 0 < row["step_s"]["min"] <= row["step_s"]["median"] <= row["step_s"]["max"]
        uplink = row["uplink_bytes_per_step_per_node"]
        assert row["uplink_formula"] < uplink < 1.05 * row["uplink_formula"] + PROTOCOL
        metered = any("metered" in reported for reported in row["phases"].values())
        assert metered == (not row["scheme"].startswith("stock"))
    assert content["message_bytes"] == 2 * 264_960 and content["spec"] == TRAINING.to_json()


PROTOCOL = (
    20_000  # barriers, norms, acknowledgements: what hundreds of small messages cost in a step
)
