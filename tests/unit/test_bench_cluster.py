# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The emulated cluster without a network: specs, commands, counters, loads, results, refusals."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cluster_report
from benchmarks.__main__ import main
from benchmarks.choice import load_blocks, schemes_named
from benchmarks.cluster import ClusterBench, assemble, dropped
from benchmarks.emulated_cluster import commands, network
from benchmarks.emulated_cluster.counters import Traffic, between, take
from benchmarks.emulated_cluster.spec import LEVELS, SPECS, LinkRates, Spec, load_spec
from benchmarks.floors import Load, floors, loads, phases, stock_loads, uplink_bytes
from benchmarks.recording import save
from benchmarks.schemes import KNOWN, BenchScheme
from benchmarks.training_setup import TrainingSetup, width_for
from tests.launching import ROOT
from tests.plans import resolve
from zero_topo.cost import Workload

DATA = ROOT / "tests" / "data" / "emulated_cluster"
TINY = Spec("tiny", 2, 1, 2, LinkRates(80, 60, 40))  # the cluster of the captured counters
SETUP = TrainingSetup(layers=1, width=64, context=8, batch=1)


# -- spec ----------------------------------------------------------------------------------------------------------


def test_the_presets_are_frontier_in_small() -> None:
    """Rates per GPU fall as on Frontier: 200 between dies, 100 between GPUs, 25 of the uplink."""
    for spec in SPECS.values():
        rates = spec.rates_mbit
        per_gpu = rates.gcd, rates.gpu, rates.node / spec.gpus_per_node
        assert [rate / per_gpu[2] for rate in per_gpu] == [8, 4, 1]
    assert SPECS["t8"].world_size == 8 and SPECS["t32"].world_size == 32


@given(st.integers(2, 9), st.integers(1, 9), st.integers(1, 4))
def test_a_spec_survives_json(nodes: int, gpus: int, gcds: int) -> None:
    """What is written into a record can be given as ``--spec``."""
    spec = Spec("some", nodes, gpus, gcds, LinkRates(3, 2, 1))
    assert Spec.from_json("spec", json.loads(json.dumps(spec.to_json()))) == spec
    assert len({spec.address(rank) for rank in range(spec.world_size)}) == spec.world_size


def test_a_file_describes_a_cluster(tmp_path: Path) -> None:
    """A JSON file works as a preset's name does, and lends its name."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps({k: v for k, v in TINY.to_json().items() if k != "name"}))
    assert load_spec(str(path)) == Spec("small", 2, 1, 2, LinkRates(80, 60, 40))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 1}, "no uplink"),
        ({"gpus_per_node": 0}, "gpus_per_node: must be .*, got 0"),
        ({"rates_mbit": {"gcd": 1, "gpu": 1}}, "missing key 'node'"),
        ({"rates_mbit": {"gcd": 1, "gpu": 1, "node": 0.5}}, "node: must be .*, got 0.5"),
        ({"rates_mbit": 7}, "must be a JSON object"),
        ({"gpus": 2}, "did you mean 'gpus_per_node'"),
    ],
)
def test_wrong_specs_are_refused(change: dict[str, Any], words: str) -> None:
    """Each mistake is named with its value."""
    with pytest.raises(ValueError, match=words):
        Spec.from_json("spec", TINY.to_json() | change)


# -- commands ------------------------------------------------------------------------------------------------------


def test_t8_is_built_by_these_commands() -> None:
    """The whole plan, as reviewed: a change of it is a change of what all results were measured on."""
    planned = [shlex.join(command) for command in commands.build(SPECS["t8"], "zt")]
    assert planned == (DATA / "t8.txt").read_text().splitlines()


@pytest.mark.parametrize("spec", [*SPECS.values(), TINY], ids=lambda spec: spec.name)
def test_every_link_is_limited_at_both_ends_at_its_level(spec: Spec) -> None:
    """No device of a veth pair is left without a token bucket, or a direction of its link would have no rate."""
    plan = commands.build(spec, "zt")
    pairs = [command for command in plan if "veth" in command]
    made = {(c[2], c[5]) for c in pairs} | {(c[c.index("netns") + 1], c[c.index("peer") + 2]) for c in pairs}
    limited = {(c[2], c[6]): c[10] for c in plan if c[0] == "tc"}
    assert set(limited) == made
    tally = Counter(limited.values())
    expected: Counter[str] = Counter()
    for level, units in (("gcd", spec.world_size), ("gpu", spec.gpus), ("node", spec.nodes)):
        expected[f"{getattr(spec.rates_mbit, level)}mbit"] += 2 * units
    assert tally == expected


def test_names_fit_the_kernel() -> None:
    """Device names have at most 15 characters, whatever the cluster's size."""
    plan = commands.build(Spec("wide", 16, 8, 4, LinkRates(3, 2, 1)), "zt")
    devices = [command[command.index("add") + 1] for command in plan if "veth" in command or "bridge" in command]
    peers = [command[command.index("peer") + 2] for command in plan if "veth" in command]
    assert max(map(len, devices + peers)) <= 15


# -- counters ------------------------------------------------------------------------------------------------------


def test_traffic_is_what_crossed_between_two_snapshots() -> None:
    """Each level's bytes by unit and direction; what was sent before the first snapshot does not count.

    A megabyte went from rank 0 to rank 2 through a queue that was made too short.
    """
    text = (DATA / "link.json").read_text()
    later = take(text, [(DATA / "qdisc.json").read_text()])
    zero = json.loads(text)
    for entry in zero:
        for direction in ("rx", "tx"):
            entry["stats64"][direction]["bytes"] //= 2
    traffic = between(TINY, take(json.dumps(zero), []), later)
    assert traffic.out["node"] == (503193, 3161) and traffic.into["node"] == (3161, 503193)
    assert traffic.out["gcd"] == (751524, 0, 3161, 0) and traffic.into["gcd"][2] == 503193
    assert traffic.drops == 51
    assert traffic.mean("node") == (503193 + 3161) / 2 and traffic.busiest("gpu") == 751524


# -- loads and floors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_uplinks_carry_what_the_schemes_promise(spec: Spec) -> None:
    """In units of the 16-bit model and (N-1)/N: ZeRO-3 3K; topo 2 and the paper 3 whatever K is, in 16 bits."""
    parameters = 2048 * spec.world_size
    share = 2 * parameters * (spec.nodes - 1) / spec.nodes
    for name, fixed, per_micro_batch in (("zero3", 0, 3), ("topo", 2, 0), ("paper", 3, 0)):
        config = resolve(spec.topology(), scheme=name, quantize={"resident": None})
        for count in (1, 5):
            work = Workload.uniform([parameters], 2, count)
            assert uplink_bytes(loads(config, work, spec)) == share * (fixed + count * per_micro_batch)


def test_a_link_carries_what_leaves_its_unit() -> None:
    """topo's in-GPU gather stays off every trunk; its scatter crosses the trunks of GPUs and no uplink."""
    spec = SPECS["t8"]
    planned = loads(resolve(spec.topology(), scheme="topo"), Workload.uniform([4096 * 8]), spec)
    found = {(load.phase, load.domain): load.out for load in planned}
    gather, scatter = found["gather_forward", "gpu"], found["scatter", "node"]
    assert gather["gcd"] > 0 and gather["gpu"] == gather["node"] == 0
    assert scatter["node"] == 0
    # each rank sends a third of its scatter to each of the three others; two of them sit behind the other trunk
    assert scatter["gpu"] == pytest.approx(2 * 2 / 3 * scatter["gcd"])


def test_stock_moves_all_but_one_shard_over_every_link() -> None:
    """A ring passes (d-1)/d of the model over each link, twice to gather and once to reduce; gloo's own, twice."""
    ring, own = (sum(load.out["node"] for load in stock_loads([800], 2, SPECS["t8"], way)) for way in (True, False))
    assert ring == 2 * 3 * 7 * 100 * 2 and own == 2 * 4 * 7 * 100 * 2


def test_floors_add_hops_or_overlap_them() -> None:
    """Serial: each hop's slowest link in turn. Overlapped: the link that has most to do."""
    mbit = 1_000_000 / 8
    hops = [
        Load("gather_forward", "gpu", {"gcd": 160 * mbit, "gpu": 0, "node": 0}),
        Load("sync", "world", {"gcd": 80 * mbit, "gpu": 60 * mbit, "node": 40 * mbit}),
        Load("sync", "node", {"gcd": 0, "gpu": 120 * mbit, "node": 0}),
    ]
    assert floors(hops, TINY) == {"serial": 2 + 1 + 2, "overlapped": 3}
    assert phases(hops, TINY)["sync"] == {
        "floor_s": 3,
        "level_bytes": {"gcd": 80 * mbit, "gpu": 180 * mbit, "node": 40 * mbit},
    }


# -- what is measured ----------------------------------------------------------------------------------------------


MEASURED: dict[str, Any] = {"phases": {}, "cpu_s": 1.5, "loss": 3.0, "floor_s": {"serial": 1.5, "overlapped": 1.25}}


def test_a_result_divides_by_the_steps_counted() -> None:
    """Bytes are per step of the window, which has one step more than are timed; times are of those timed."""
    traffic = Traffic(
        out={"node": (400, 200), "gpu": (40, 20), "gcd": (4, 4, 4, 0)},
        into={"node": (200, 400), "gpu": (20, 40), "gcd": (4, 4, 0, 4)},
        drops=3,
    )
    measured = {**MEASURED, "counted_steps": 4, "step_seconds": [1.0, 4.0, 2.0], "formula": 70.4}
    row = assemble(TINY, {**measured, "scheme": "topo", "micro_batches": 2}, traffic)
    assert row["step_s"] == {"median": 2.0, "min": 1.0, "max": 4.0, "repeats": 3}
    assert row["uplink_bytes_per_step_per_node"] == 75 and row["uplink_formula"] == 70
    assert row["uplink_bytes_by_node"] == {"out": [100, 50], "into": [50, 100]}
    assert row["level_bytes"] == {"gcd": 1, "gpu": 8, "node": 75}
    assert row["level_rate_share"]["node"] == pytest.approx(400 / 4 / 2.0 / (40e6 / 8))
    assert dropped([row]) == "packets were dropped, so these times are not valid: topo at 2 (3)"
    assert dropped([row | {"drops": 0}]) is None
    assert cluster_report.ratio(row, [row | {"scheme": "zero3", "step_s": {"median": 6.0}}, row]) == 3


def test_every_scheme_is_measured_with_every_number_of_micro_batches() -> None:
    """Jobs go by number of micro-batches, then scheme; the block carries the cluster's shape, stock has none."""
    bench = ClusterBench(TINY, tuple(schemes_named(["stock-ring", "topo"])), (1, 4), SETUP, steps=2)
    jobs = bench.settings()["jobs"]
    found = [(job["micro_batches"], job["scheme"]) for job in jobs]
    assert found == list(itertools.product((1, 4), ("stock-ring", "topo")))
    assert jobs[0]["block"] is None and jobs[0]["ring"]
    assert jobs[1]["block"] == {"topology": TINY.topology_block(), "scheme": "topo"}
    assert bench.ticks() == 2 * (1 + 4) * 3


def test_a_block_is_refused_by_the_config_itself(tmp_path: Path) -> None:
    """An unknown key in a scheme is told in the config's own words, before anything is built."""
    path = tmp_path / "blocks.json"
    path.write_text(json.dumps({"mine": {"scheme": "topo", "wieghts": "gpu"}}))
    mine = schemes_named(["mine"], load_blocks(path))
    with pytest.raises(ValueError, match="did you mean 'weights'"):
        ClusterBench(TINY, tuple(mine), (1,), SETUP)


def test_a_block_may_name_its_optimizer(tmp_path: Path) -> None:
    """Beside the block, whose own "optimizer" is a degree."""
    path = tmp_path / "blocks.json"
    block = {"scheme": "topo", "optimizer": "node", "sync": {"mode": "ternary"}}
    path.write_text(json.dumps({"mine": {"block": block, "optimizer": "AgedAdamW"}, "plain": block}))
    mine, plain = schemes_named(["mine", "plain"], load_blocks(path))
    assert mine == BenchScheme("mine", block, optimizer="AgedAdamW") and plain == BenchScheme("plain", block)


@pytest.mark.parametrize("scheme", KNOWN.values(), ids=KNOWN)
def test_the_known_schemes_are_accepted(scheme: BenchScheme) -> None:
    """Every block of the table is one that the config takes, on both presets.

    One whose first steps are dense is refused: its time would not be that of a sparse step.
    """
    dense = scheme.name in ("radius", "radius-aged", "scape")
    for spec in SPECS.values():
        if dense:
            with pytest.raises(ValueError, match=r"its first \d+ steps send more than the later ones"):
                ClusterBench(spec, (scheme,), (1, 8), SETUP)
        ClusterBench(spec, (scheme,), (1, 8), SETUP, warmup=60)


@pytest.mark.parametrize(("parameters", "layers"), [(20e6, 4), (1e6, 2), (1e3, 1), (300e6, 12)])
def test_the_width_meets_the_number_of_parameters(parameters: float, layers: int) -> None:
    """No neighbouring width comes nearer."""
    width = width_for(int(parameters), layers)
    off = {w: abs(TrainingSetup(layers, w, 1, 1).parameters - parameters) for w in range(64, 4096, 64)}
    assert off[width] == min(off.values())


def test_the_table_and_the_pictures_are_made_of_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record with one result per scheme prints one line each, complete, and draws two pictures."""
    traffic = Traffic({level: (7_000_000, 7_000_000) for level in LEVELS}, {level: (1, 1) for level in LEVELS}, 0)
    told = {**MEASURED, "counted_steps": 2, "step_seconds": [2.0], "formula": 3.4e6}
    names = ("stock", "zero3", "topo-q4")
    rows = [assemble(TINY, told | {"scheme": name, "micro_batches": k}, traffic) for k in (1, 8) for name in names]
    content = {"results": rows, "spec": TINY.to_json(), "message_bytes": 10**6, "compute_s_per_micro_batch": 0.1}
    cluster_report.show(content)
    out = capsys.readouterr().out
    assert out.count("3.50 MB") == out.count("3.40 MB") == 6 and out.count("1.00x") == 6
    assert "1.25 - 1.50" in out and cluster_report.STOCK_NOTE in out.replace("\n", " ")
    assert all(path.stat().st_size > 10_000 for path in save(cluster_report.draw(content), tmp_path))


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "present", "said"),
    [
        (1000, "ip tc", "needs root"),
        (0, "ip", "tc not found; install iproute2"),
        (0, "ip tc", "`ip netns add` failed: Operation not permitted"),
    ],
    ids=["without root", "without tools", "a kernel that refuses is quoted"],
)
def test_where_no_cluster_can_be_built_it_ends_with_one_line(
    user: int, present: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and nothing is started; only to clean up as a plain user neither."""

    def refuse(command: tuple[str, ...]) -> str:
        raise RuntimeError("`ip netns add` failed: Operation not permitted")

    monkeypatch.setattr("benchmarks.cluster.run", pytest.fail)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}" if tool in present.split() else None)
    monkeypatch.setattr(network, "_run", refuse)
    for words in ([], ["--clean"]) if user else ([],):
        assert main(["cluster", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error


def test_leftovers_are_those_of_dead_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace is a leftover if the process that its name tells is gone, or is another one with the same number."""
    mine = network.EmulatedNetwork(TINY).prefix
    dead = mine.replace(str(os.getpid()), "4194305", 1)
    recycled = mine.rpartition("-")[0].rpartition("-")[0] + "-1-0"
    for prefix in (mine, dead, recycled, "others-1-2-3"):
        (tmp_path / f"{prefix}-fabric").touch()
    monkeypatch.setattr(network, "NAMESPACES", tmp_path)
    assert network.leftovers() == sorted([f"{dead}-fabric", f"{recycled}-fabric"])


@pytest.mark.parametrize(
    "error", [RuntimeError("rank 3 said last: no"), KeyboardInterrupt()], ids=["failed", "stopped"]
)
def test_what_was_measured_before_a_failure_is_kept(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that fails after an hour costs what follows, not what is measured; its words are told without a trace."""

    def run(bench: ClusterBench, tick: Any) -> Iterator[dict[str, Any]]:
        yield {"results": [bench.spec.name]}
        raise error

    monkeypatch.setattr("benchmarks.cluster.run", run)
    monkeypatch.setattr(network, "refusal", lambda: None)
    path = tmp_path / "record.json"
    status = main(["cluster", "--record", str(path)])
    assert json.loads(path.read_text()) == {"results": ["t8"]}
    said = capsys.readouterr().err
    assert str(path) in said and "Traceback" not in said
    assert (status, "no" in said) == ((1, True) if isinstance(error, RuntimeError) else (130, False))


def test_fit_takes_some_schemes_and_predicts_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Every step of the emulated cluster that was measured is predicted within 20 percent."""
    words = ["fit", str(ROOT / "benchmarks/records/cluster-t8.json"), "--predict", "paper,zero++"]
    status, found = main([*words, "--json"]), json.loads(capsys.readouterr().out)
    assert status == 0 and found["rates"]["peak_flops"] > 0
    rows = [(row["scheme"], row["micro_batches"], row["fitted"]) for row in found["results"]]
    fitted = {"zero3": True, "topo": True, "paper": False, "zero++": False}
    assert sorted(rows) == sorted((scheme, count, fitted[scheme]) for scheme in fitted for count in (1, 8))
    assert all(0.8 < row["ratio"] < 1.2 for row in found["results"])
    status, out = main(words), capsys.readouterr().out
    assert status == 0 and "measured" in out and "predicted" in out
