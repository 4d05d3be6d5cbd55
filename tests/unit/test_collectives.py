# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Rings fitted to measured collectives: the presets' are those of public logs, a user's files give
the user's own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.rings import Timed, fit_rings, read_tests
from tests.commands import Run
from tests.launching import ROOT
from zero_topo.cost.network import Network
from zero_topo.topology import load_preset
from zero_topo.topology.presets import load_machine
from zero_topo.topology.rates import Collective, Rates, Ring

PER_NODE = {"frontier": 8, "perlmutter": 4}
FITTED: tuple[tuple[str, Collective, str], ...] = (
    ("frontier", "gather", "frontier all_gather, eager off"),
    ("frontier", "reduce", "frontier reduce_scatter, eager off"),
    ("perlmutter", "gather", "perlmutter all_gather"),
)


@cache
def runs() -> dict[str, dict[str, dict[str, float]]]:
    """The public logs: run -> ranks -> bytes in all -> milliseconds."""
    return dict(json.loads((ROOT / "benchmarks/records/collectives.json").read_text())["runs"])


def timed(machine: str, collective: Collective, run: str) -> list[Timed]:
    return [
        Timed(
            collective, int(ranks), max(1, int(ranks) // PER_NODE[machine]), float(nbytes), ms / 1e3
        )
        for ranks, times in runs()[run].items()
        for nbytes, ms in times.items()
    ]


def rates_of(machine: str) -> Rates:
    rates = load_machine(machine).rates
    assert rates is not None
    return rates


@pytest.mark.parametrize(("machine", "collective", "run"), FITTED)
def test_a_presets_rings_are_fitted_to_the_logs(
    machine: str, collective: Collective, run: str
) -> None:
    """What the JSON says is what the fit finds, and its spread is the fit's mean error."""
    preset, found = (
        rates_of(machine).rings[collective],
        fit_rings(timed(machine, collective, run))[collective],
    )
    for domain, ring in preset.items():
        fitted = found[domain]
        assert (ring.bandwidth, ring.step) == pytest.approx(
            (fitted.bandwidth, fitted.step), rel=0.01
        )
        assert ring.small == fitted.small and ring.small_step == pytest.approx(
            fitted.small_step, rel=0.01
        )
        assert ring.spread == pytest.approx(fitted.spread, abs=0.01)


@pytest.mark.parametrize(
    ("ranks", "megabytes", "ms"),
    [(8, 67, 0.72), (8, 268, 2.59), (64, 268, 3.72), (128, 1074, 14.7), (512, 67, 16.1)],
)
def test_groups_on_frontier_take_what_was_measured(ranks: int, megabytes: int, ms: float) -> None:
    """A gather of all ranks in one ring, as published, to within a third."""
    nbytes = 2 ** round(math.log2(megabytes * 1e6))
    assert runs()["frontier all_gather, eager off"][str(ranks)][str(nbytes)] == pytest.approx(
        ms, rel=0.01
    )
    network = Network(load_preset("frontier", ranks), rates_of("frontier"))
    sent = nbytes * (ranks - 1) / ranks
    assert network.stage_time(1, ranks, sent, "ring").seconds == pytest.approx(ms / 1e3, rel=0.33)


def test_rings_next_to_each_other_share_what_one_ring_has() -> None:
    """Eight rings across nodes, one for each GCD, get an eighth of the bandwidth each, and pay a
    step for each node.
    """
    network, ring = (
        Network(load_preset("frontier", 384), rates_of("frontier")),
        rates_of("frontier").rings["gather"],
    )
    found = network.stage_time(8, 384, 47e6, "ring")
    assert found.latency == pytest.approx(47 * ring["world"].step)
    assert found.busy == pytest.approx({"world": 47e6 * 8 / ring["world"].bandwidth})
    pairs = network.stage_time(2, 8, 3e6, "ring")
    assert pairs.busy == pytest.approx({"node": 3e6 * 2 / ring["node"].bandwidth})
    few = network.stage_time(1, 384, 383 * 1000.0, "ring")
    assert few.latency == pytest.approx(383 * (ring["world"].small_step or 0.0))


def test_libfabrics_eager_mode_is_what_the_launcher_turns_off() -> None:
    """With it on, some messages of 65 to 260 KB a rank take ten times as long and more, which no
    other size does.
    """
    on, off = runs()["frontier all_gather, eager on"], runs()["frontier all_gather, eager off"]
    slower = {int(nbytes) // 512: on["512"][nbytes] / off["512"][nbytes] for nbytes in off["512"]}
    assert {size for size, factor in slower.items() if factor > 10} == {2**17, 2**18}
    assert on["512"][str(2**26)] == 189.397
    script = (ROOT / "tests/data/launch/frontier-48.sbatch").read_text()
    assert 'export FI_CXI_RDZV_EAGER_SIZE="0"' in script and "189 ms" in script


# -- a user's own ----------------------------------------------------------------------------------

HEADER = """# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20
#
rccl-tests: Version develop:ae3e635
# Using devices
"""  # noqa: E501
COLUMNS = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501


def printed(ranks: int, ring: Ring, name: str = "all_gather_perf", per_node: int = 8) -> str:
    """What rccl-tests prints on nodes whose collectives take what the ring says."""
    lines = [
        f"#  Rank {rank:2d} Group  0 Pid  {9000 + rank} on frontier{rank // per_node:05d} device  "
        f"{rank % per_node} [0000:c1:00] AMD Instinct MI250X"
        for rank in range(ranks)
    ]
    for power in range(20, 31):
        us = ring.seconds(ranks, 2**power / ranks) * 1e6
        rate = 2**power / us / 1e3
        cells = f"{us:8.2f}  {rate:6.2f}  {rate * (ranks - 1) / ranks:6.2f}      0"
        lines.append(
            f"{2**power:12d} {2**power // 4:13d}     float    none      -1 {cells} {cells}"
        )
    end = f"# Collective test concluded: {name}\n" if name else ""
    return f"{HEADER}{chr(10).join(lines[:ranks])}\n{COLUMNS}{chr(10).join(lines[ranks:])}\n{end}"


def test_outputs_of_rccl_tests_give_rates_that_simulate_takes(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Any number of files, both collectives; what is printed is read back by --set rates=FILE, and
    changes the step.
    """
    truth = Ring(70e9, 30e-6, small=2**14, small_step=10e-6)
    for ranks in (8, 16, 64):
        (tmp_path / f"gather-{ranks}.out").write_text(printed(ranks, truth))
    (tmp_path / "reduce_scatter.txt").write_text(printed(64, truth, name=""))
    assert benchmarks(("rings", *map(str, sorted(tmp_path.iterdir())))) == 0
    own = tmp_path / "own.json"
    own.write_text(capsys.readouterr().out)
    found = json.loads(own.read_text())["rings"]
    for domain in ("node", "world"):
        ring = found["gather"][domain]
        assert (ring["bandwidth"], ring["step"]) == pytest.approx((70e9, 30e-6), rel=0.03) and ring[
            "spread"
        ] < 0.02
    assert set(found["reduce"]) == {"world"}
    words = (
        "simulate",
        "--gcds",
        "64",
        "--schemes",
        "stock",
        "--micro-batches",
        "1",
        "--overlap",
        "0",
        "--json",
    )
    slow, usual = (json.loads(run(*words, *more)[1]) for more in (("--set", f"rates={own}"), ()))
    assert slow["results"][0]["seconds"] > usual["results"][0]["seconds"]
    plan = (
        "plan",
        "--params",
        "1B",
        "--machine",
        "frontier",
        "--nodes",
        "2",
        "--recommend",
        "--json",
    )
    slow, usual = (json.loads(run(*plan, *more)[1]) for more in (("--set", f"rates={own}"), ()))
    assert slow["recommended"]["seconds"] > usual["recommended"]["seconds"]


def test_a_ring_as_the_page_says_it_is_read(tmp_path: Path) -> None:
    """The bus bandwidth of the largest message and the time of the smallest give the ring without a
    fit.
    """
    truth, path = Ring(70e9, 30e-6), tmp_path / "all_gather.out"
    path.write_text(printed(64, truth))
    busbw = float(path.read_text().splitlines()[-2].split()[7]) * 1e9
    step = read_tests(path)[0].seconds / 63
    assert (busbw, step) == pytest.approx((truth.bandwidth, truth.step), rel=0.15)


GOOD = printed(8, Ring(1e11, 1e-5))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GOOD.replace("all_gather", "all_reduce"), "output of all_reduce, from which no ring"),
        (GOOD.replace("all_gather_perf", "it"), "without the name of its collective"),
        (GOOD.replace("#  Rank  7", "#  Rank 12"), "lists 8 of 13 ranks"),
        (
            "\n".join(line for line in GOOD.splitlines() if "Rank" not in line),
            "without its '# Rank' lines",
        ),
        ("all_gather: nothing here", "without rows of times"),
        (
            "\n".join(GOOD.splitlines()[:-9]),
            "3 measurements of a collective cannot separate latency from bandwidth",
        ),
    ],
)
def test_what_tells_no_ring_is_refused(
    text: str, complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In one line, with the file and what to give."""
    path = tmp_path / "some.out"
    path.write_text(text.replace("Collective test concluded: all_gather", "all_gather"))
    if "cannot separate" in complaint:
        path.write_text("all_gather_perf\n" + text)
    status = benchmarks(("rings", str(path)))
    error = capsys.readouterr().err
    assert status == 2 and complaint in error and error.count("\n") == 1, error


@pytest.mark.parametrize("name", ["all_gather_old_columns.log", "all_gather_srun_labels.log"])
@pytest.mark.parametrize("change", [str, lambda text: text.replace("\n", "\r\n")])
def test_older_and_labelled_outputs_are_read(
    name: str, change: Callable[[str], str], tmp_path: Path
) -> None:
    """Without the columns of operation and root, as before 2.11, and with the rank that
    ``srun --label`` writes.
    """
    path = tmp_path / name
    path.write_text(change((ROOT / "tests/data/nccl" / name).read_text()))
    rows: list[Any] = read_tests(path)
    assert [row.nbytes for row in rows] == [4**n * 2**20 for n in range(6)]
    assert {(row.ranks, row.nodes) for row in rows} == {(8, 1)} and rows[0].seconds == 24.77e-6
    assert fit_rings(rows)["gather"]["node"].bandwidth > 1e10


def test_an_old_reduce_scatter_has_an_operation_and_no_root(tmp_path: Path) -> None:
    path = tmp_path / "reduce_scatter.log"
    text = (ROOT / "tests/data/nccl/all_gather_old_columns.log").read_text()
    path.write_text(re.sub(r"float +", "float     sum   ", text))
    rows: list[Any] = read_tests(path)
    assert len(rows) == 6 and rows[-1].seconds == 4900.64e-6 and rows[0].collective == "reduce"
