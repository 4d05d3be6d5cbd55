# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what they measure, write and show, and what every record carries."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import peers, quantizers, ranks, records, scale_report, sparse, sparse_report
from benchmarks.__main__ import main as benchmarks
from benchmarks.recording import save
from benchmarks.room import check_room
from benchmarks.sparse import MODES, WHOLE, SparseBench
from benchmarks.sparse_ranks import model_for
from zero_topo import versions
from zero_topo.config import SPARSE_MODES

KEYS = {"backend", "op", "dtype", "bits", "block_size", "threads", "gb_per_s", "memcpy_gb_per_s", "memcpy_ratio"}
QUICK = quantizers.Settings(nbytes=1 << 16, repeats=2, threads=(1,), dtypes=("fp32",), block_sizes=(256,), bits=(8,))


@pytest.fixture(autouse=True)
def without_compiling_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes a minute the first time; the other peers stay."""
    found = quantizers.peers
    monkeypatch.setattr(quantizers, "peers", lambda *a: (p for p in found(*a) if p.name != "torch.compile"))


def test_a_record_has_every_backend_and_peer_beside_a_copy() -> None:
    """One result per kernel, with the ratio of its traffic to a copy's of the same run; absent ones say why."""
    ticks: list[int] = []
    *_, content = quantizers.run(QUICK, lambda words, done: ticks.append(done))
    assert sum(ticks) == QUICK.ticks()
    assert {"benchmark", "machine", "versions", "settings", "results", "skipped"} <= set(content)
    assert all(set(row) >= KEYS for row in content["results"])
    names = {row["backend"] for row in content["results"]}
    assert {"reference", "eager", "fbgemm"} <= names and names | set(content["skipped"]) >= {"native", "triton"}
    assert {row["op"] for row in content["results"] if row["backend"] == "reference"} >= {"assess", "emit", "apply"}
    (row,) = (row for row in content["results"] if (row["backend"], row["op"]) == ("reference", "quantize"))
    assert row["memcpy_ratio"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"])
    assert row["seconds"]["repeats"] == 2 and row["seconds"]["min"] <= row["seconds"]["median"]
    traffic = row["gb_per_s"] * 1e9 * row["seconds"]["median"]
    assert traffic == pytest.approx((1 << 16) + (1 << 14) + 256)  # FP32 in, INT8 and 64 scales out


def test_deepspeeds_quantizer_is_called_as_zero_plus_plus_calls_it() -> None:
    """By a stand-in of its operators, whose groups must divide what they get."""

    def quantize(x: Tensor, groups: int, bits: int, kind: str) -> list[Tensor]:
        assert (x.dtype, kind, x.numel() % groups) == (torch.float16, "symmetric", 0)
        return [torch.zeros(len(x), x.shape[1] * bits // 8, dtype=torch.int8), torch.zeros(groups, 1)]

    def quantized_reduction(q: Tensor, scales: Tensor, into: int, out: int, bits: int, kind: str, many: int) -> None:
        assert (len(scales), out * many, kind) == (into, into, "symmetric")

    def dequantize(q: Tensor, scales: Tensor, groups: int, bits: int, kind: str) -> None:
        assert len(scales) == groups

    own = (quantize, dequantize, quantized_reduction)
    module = SimpleNamespace(Symmetric="symmetric", **{function.__name__: function for function in own})
    found = peers._deepspeed(module, torch.zeros(8 * 4096))
    assert len(found) == 3 * 2 * 2
    for op in found:
        op.call()
        assert op.traffic > 2 * 4096


def test_the_command_writes_record_and_picture_and_prints_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--json` prints the record itself; the picture lies beside it."""
    file = tmp_path / "record.json"
    words = "quantizers --size 65536 --repeats 1 --threads 1 --dtypes bf16 --blocks 64 --json --record"
    status = benchmarks([*words.split(), str(file)])
    assert status == 0 and json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert (tmp_path / "quantizers.png").stat().st_size > 1000


def test_every_mode_is_measured_and_what_sends_all_once() -> None:
    """A mode that is added to the config is added to the benchmark."""
    jobs = list(SparseBench(sources=("synthetic",), densities=(0.1, 0.01)).jobs())
    assert {job["scheme"] for job in jobs} == {*WHOLE, *(mode.MODE for mode in SPARSE_MODES)} == set(MODES)
    assert [job["density"] for job in jobs if job["scheme"] in WHOLE] == [1.0, 1.0]
    assert all(sum(job["scheme"] == mode.MODE for job in jobs) == 2 for mode in SPARSE_MODES)


@pytest.mark.parametrize("numel", [1, 10_000, 262_144, 1 << 20, 50_000_000])
def test_there_is_a_model_of_every_size(numel: int) -> None:
    """Its heads divide its width, and of its parameters there are about as many as asked for, if it can be so small."""
    config = model_for(numel)
    assert config.width % config.heads == 0
    assert numel < 20_000 or 0.7 * numel < 12 * config.layers * config.width**2 < 1.4 * numel


def test_a_record_of_sparse_modes_is_shown_and_drawn(tmp_path: Path) -> None:
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


def test_a_record_says_where_and_with_what_it_was_measured(tmp_path: Path) -> None:
    """Machine, versions and settings stand beside the numbers, and survive the file."""
    content = records.record("quantizers", {"sizes": [1, 2]}, {"results": [3]})
    path = tmp_path / "new" / "record.json"
    records.write(path, content)
    read = json.loads(path.read_text())
    assert read == content and read["results"] == [3] and read["settings"] == {"sizes": [1, 2]}
    assert read["format"] == records.FORMAT and read["benchmark"] == "quantizers"
    assert read["machine"]["processor"] and read["machine"]["cores"] >= 1 and read["machine"]["memory_bytes"] > 2**20
    assert read["versions"]["python"] == platform.python_version() and read["versions"]["torch"]


def test_what_is_not_there_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record made without a library, without git or outside of a checkout says so rather than failing."""
    monkeypatch.setattr(versions, "RECORDED", ("torch", "no-such-library"))
    monkeypatch.setenv("PATH", "")
    found = versions.used()
    assert found["torch"] and found["no-such-library"] is None and found["commit"] is None


def test_a_spread_is_median_and_extremes() -> None:
    """Of an even number of values the median is the mean of the middle two."""
    assert records.Spread.of([4.0, 1.0, 2.0, 10.0]) == records.Spread(median=3.0, min=1.0, max=10.0, repeats=4)


def test_what_a_step_launches_is_shown_beside_deepspeeds_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A column for each number of ranks, phases by scheme, what was counted on real ranks, and the picture."""
    file = tmp_path / "record.json"
    words = "scale --ranks 8,16 --schemes topo,topo-q4 --params 2 --numel 1024 --repeats 1 --real-ranks 0 --record"
    assert benchmarks([*words.split(), str(file)]) == 0 and "topo-q4" in capsys.readouterr().out
    assert (tmp_path / "scale.png").stat().st_size > 1000
    content = json.loads(file.read_text())
    assert [(row["scheme"], row["ranks"]) for row in content["results"]] == [
        (scheme, ranks) for ranks in (8, 16) for scheme in ("topo", "topo-q4")
    ]
    for row in content["results"]:
        phases = row["phases"].values()
        launched = sum(counts["operations"] + counts["kernels"] + counts["collectives"] for counts in phases)
        assert row["launches_per_parameter"] == launched / 2 and row["phases"]["sync"]["seconds"]["repeats"] == 1
        assert row["phases"]["gather_forward"]["allocated_bytes"] >= 2 * 2 * 1024 and row["sent"]
    counted = {"operations": 10, "kernels": 0, "collectives": 4, "syncs": 2}
    real = {"scheme": "stock", "ranks": 8, "phases": {"step": counted}, "plain": {"step": counted}}
    console = Console(record=True, width=80, file=(tmp_path / "out").open("w"))
    scale_report.show({**content, "real": [real]}, console)
    assert "stock inside DeepSpeed's engine on 8 real ranks: 7.0 launches per parameter" in console.export_text()
    (picture,) = save(scale_report.draw({**content, "real": [real]}), tmp_path)
    assert picture.stat().st_size > 1000


def test_ranks_that_memory_cannot_hold_are_refused_before_any_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--ranks 99999` once filled the machine; nor does a smaller size of the same run start first."""

    def started(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(sparse, "Ranks", started)
    status, said = benchmarks(["sparse", "--modes", "dense", "--ranks", "2,99999"]), capsys.readouterr().err
    assert status == 2 and len(said.splitlines()) == 1 and "99,999 ranks of" in said and "take at most" in said
    with pytest.raises(ValueError, match="99,999 ranks of"):
        ranks.Ranks("a:b", {}, [ranks.Place({})] * 99_999)


def test_available_memory_is_the_least_of_kernel_and_control_groups(tmp_path: Path) -> None:
    """Of version 2 and 1, a parent's limit too; "max" is none, and a system that tells nothing refuses nothing."""
    check_room(10**6, 0, tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   10000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/box\n3:cpu:/box\n0::/job/step\n")
    check_room(10, 0, tmp_path)
    with pytest.raises(ValueError, match=r"10\.24 GB are available: take at most 160 ranks"):
        check_room(161, 0, tmp_path)
    groups = tmp_path / "sys/fs/cgroup"
    for folder, limit, used in (("job/step", "max", 1), ("job", 2 * 10**9, 10**9)):
        (groups / folder).mkdir(parents=True, exist_ok=True)
        (groups / folder / "memory.max").write_text(f"{limit}\n")
        (groups / folder / "memory.current").write_text(f"{used}\n")
    with pytest.raises(ValueError, match=r"1\.00 GB are available: take at most 15 ranks"):
        check_room(16, 0, tmp_path)
    (groups / "memory/box").mkdir(parents=True)
    (groups / "memory/box/memory.limit_in_bytes").write_text("500000000")
    (groups / "memory/box/memory.usage_in_bytes").write_text("600000000")
    with pytest.raises(ValueError, match=r"0 B are available: take at most 0 ranks"):
        check_room(1, 0, tmp_path)
