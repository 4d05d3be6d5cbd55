# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what they measure, write and show, and what every record carries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quantizers, ranks
from benchmarks.__main__ import main as benchmarks

KEYS = {
    "backend",
    "op",
    "dtype",
    "bits",
    "block_size",
    "threads",
    "gb_per_s",
    "memcpy_gb_per_s",
    "memcpy_ratio",
}
QUICK = quantizers.Settings(
    nbytes=1 << 16, repeats=2, threads=(1,), dtypes=("fp32",), block_sizes=(256,), bits=(8,)
)


@pytest.fixture(autouse=True)
def without_compiling_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes a minute the first time; the other peers stay."""
    found = quantizers.peers
    monkeypatch.setattr(
        quantizers, "peers", lambda *a: (p for p in found(*a) if p.name != "torch.compile")
    )


def test_a_record_has_every_backend_and_peer_next_to_a_copy() -> None:
    """One result per kernel, with the ratio of its traffic to a copy's of the same run; absent ones
    say why.
    """
    ticks: list[int] = []
    *_, content = quantizers.run(QUICK, lambda words, done: ticks.append(done))
    assert sum(ticks) == QUICK.ticks()
    assert {"benchmark", "machine", "versions", "settings", "results", "skipped"} <= set(content)
    assert all(set(row) >= KEYS for row in content["results"])
    names = {row["backend"] for row in content["results"]}
    assert {"reference", "eager", "fbgemm"} <= names and names | set(content["skipped"]) >= {
        "native",
        "triton",
    }
    assert {row["op"] for row in content["results"] if row["backend"] == "reference"} >= {
        "assess",
        "emit",
        "apply",
    }
    (row,) = (
        row
        for row in content["results"]
        if (row["backend"], row["op"]) == ("reference", "quantize")
    )
    assert row["memcpy_ratio"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"])
    assert row["seconds"]["repeats"] == 2 and row["seconds"]["min"] <= row["seconds"]["median"]
    traffic = row["gb_per_s"] * 1e9 * row["seconds"]["median"]
    assert traffic == pytest.approx((1 << 16) + (1 << 14) + 256)  # FP32 in, INT8 and 64 scales out


def test_the_command_writes_its_record_and_prints_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--json` prints the record itself."""
    file = tmp_path / "record.json"
    words = (
        "quantizers --size 65536 --repeats 1 --threads 1 --dtypes bf16 --blocks 64 --json --record"
    )
    status = benchmarks([*words.split(), str(file)])
    assert status == 0 and json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def test_ranks_that_memory_cannot_hold_are_refused_before_any_starts() -> None:
    """99,999 ranks once filled the machine."""
    with pytest.raises(ValueError, match="99,999 ranks of"):
        ranks.Ranks("a:b", {}, [ranks.Place({})] * 99_999)
