# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The emulated cluster without a network: specs, commands, counters, loads, results, refusals."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from benchmarks import cluster_report
from benchmarks.cluster import ClusterBench, assemble, dropped
from benchmarks.emulated_cluster import commands
from benchmarks.emulated_cluster.counters import Traffic
from benchmarks.emulated_cluster.spec import SPECS, LinkRates, Spec
from benchmarks.floors import (
    Load,
    all_reduce_loads,
    floors,
    loads,
    phases,
    stock_loads,
    tensor_load,
    uplink_bytes,
)
from benchmarks.schemes import KNOWN, BenchScheme
from benchmarks.training_setup import TrainingSetup
from tests.launching import ROOT
from tests.plans import resolve
from zero_topo.cost import Workload
from zero_topo.cost.tensor import tree_of

DATA = ROOT / "tests" / "data" / "emulated_cluster"
TINY = Spec("tiny", 2, 1, 2, LinkRates(80, 60, 40))  # the cluster of the captured counters


def test_t8_is_built_by_these_commands() -> None:
    """The whole plan, as reviewed: a change of it is a change of what all results were
    measured on.
    """
    planned = [shlex.join(command) for command in commands.build(SPECS["t8"], "zt")]
    assert planned == (DATA / "t8.txt").read_text().splitlines()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_uplinks_carry_what_the_schemes_promise(spec: Spec) -> None:
    """In units of the 16-bit model and (N-1)/N: ZeRO-3 3K; topo 2 and the paper 3 whatever K is, in
    16 bits.
    """
    parameters = 2048 * spec.world_size
    share = 2 * parameters * (spec.nodes - 1) / spec.nodes
    for name, fixed, per_micro_batch in (("zero3", 0, 3), ("topo", 2, 0), ("paper", 3, 0)):
        config = resolve(spec.topology(), scheme=name, quantize={"resident": None})
        for count in (1, 5):
            work = Workload.uniform([parameters], 2, count)
            assert uplink_bytes(loads(config, work, spec)) == share * (
                fixed + count * per_micro_batch
            )


def test_stock_moves_all_but_one_shard_over_every_link() -> None:
    """A ring passes (d-1)/d of the model over each link, twice to gather and once to reduce; gloo's
    own, twice.
    """
    ring, own = (
        sum(load.out["node"] for load in stock_loads([800], 2, SPECS["t8"], way))
        for way in (True, False)
    )
    assert ring == 2 * 3 * 7 * 100 * 2 and own == 2 * 4 * 7 * 100 * 2
    assert uplink_bytes(all_reduce_loads([800], SPECS["t8"], 4)) == 2 * 7 * 100 * 4


def test_pairs_that_share_layers_send_in_two_groups() -> None:
    """With TP 2 in a GPU each rank has half of the model, and the groups of both send: topo's
    uplinks carry what they carry without TP, and stock's ring has four ranks instead of eight.
    """
    spec = SPECS["t8"]
    parameters = 2048 * spec.world_size
    config = resolve(tree_of(spec.topology(), 2), scheme="topo", quantize={"resident": None})
    split = loads(config, Workload.uniform([parameters // 2], 2, 3), spec, shared=2)
    assert uplink_bytes(split) == 2 * parameters
    assert not any(load.out["gpu"] for load in split if load.phase.startswith("gather"))
    ring = stock_loads([400], 2, spec, ring=True, shared=2)
    assert uplink_bytes(ring) == 2 * (2 * 3 * 3 * 100 * 2)
    assert {load.out["gcd"] for load in ring if load.phase == "scatter"} == {2 * 3 * 100 * 2}
    setup = TrainingSetup(layers=3, width=64, context=8, batch=2)
    assert tensor_load(setup, 5, 2).out["gcd"] == 4 * 3 * 5 * (2 * 2 * 8 * 64) * 2


def test_layers_are_shared_inside_a_gpu() -> None:
    spec = Spec("whole", 2, 2, 1, LinkRates(80, 60, 40))
    with pytest.raises(ValueError, match="scheme 'topo-tp2': 2 ranks share each layer"):
        ClusterBench(spec, (KNOWN["topo-tp2"],), (1,), TrainingSetup(1, 128, 8, 1))


def test_floors_add_groups_or_overlap_them() -> None:
    """Serial: each group's slowest link in turn. Overlapped: the link that has most to do."""
    mbit = 1_000_000 / 8
    groups = [
        Load("gather_forward", "gpu", {"gcd": 160 * mbit, "gpu": 0, "node": 0}),
        Load("sync", "world", {"gcd": 80 * mbit, "gpu": 60 * mbit, "node": 40 * mbit}),
        Load("sync", "node", {"gcd": 0, "gpu": 120 * mbit, "node": 0}),
    ]
    assert floors(groups, TINY) == {"serial": 2 + 1 + 2, "overlapped": 3}
    assert phases(groups, TINY)["sync"] == {
        "floor_s": 3,
        "level_bytes": {"gcd": 80 * mbit, "gpu": 180 * mbit, "node": 40 * mbit},
    }


MEASURED: dict[str, Any] = {
    "phases": {},
    "cpu_s": 1.5,
    "loss": 3.0,
    "floor_s": {"serial": 1.5, "overlapped": 1.25},
}


def test_a_result_divides_by_the_steps_counted() -> None:
    """Bytes are per step of the window, which has one step more than are timed; times are of those
    timed.
    """
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
    assert (
        cluster_report.ratio(row, [row | {"scheme": "zero3", "step_s": {"median": 6.0}}, row]) == 3
    )


@pytest.mark.parametrize("scheme", KNOWN.values(), ids=KNOWN)
def test_the_known_schemes_are_accepted(scheme: BenchScheme) -> None:
    """Every block of the table is one that the config takes, on both presets.

    One whose first steps are dense is refused: its time would not be that of a sparse step.
    """
    dense = scheme.name in ("radius", "radius-aged", "scape")
    setup = TrainingSetup(layers=1, width=128, context=8, batch=1)
    for spec in SPECS.values():
        if dense:
            with pytest.raises(
                ValueError, match=r"its first \d+ steps send more than the later ones"
            ):
                ClusterBench(spec, (scheme,), (1, 8), setup)
        ClusterBench(spec, (scheme,), (1, 8), setup, warmup=60)
