# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo plan`` and ``check``: their figures are those of the formulas, the default is marked,
and both agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.plans import config_file, printed, resolve
from zero_topo.config import SCHEMES, ZeroTopoConfig
from zero_topo.cost.bounds import cost_of
from zero_topo.cost.job import Job
from zero_topo.cost.rule import choose
from zero_topo.cost.transformer import scaled
from zero_topo.topology import load_preset

FRONTIER = ("--machine", "frontier", "--nodes", "48")
DGX = ("--machine", "dgx-h100", "--nodes", "4")


def test_figures_are_those_of_the_formulas(run: Run) -> None:
    """Of each scheme and of the rule's plan: degrees, memory, bytes and both bounds."""
    machine = load_preset("frontier", 384)
    job = Job(scaled(20 * 10**9), micro_batches=4)
    report = printed(run, "plan", "--params", "20e9", *FRONTIER, "--micro-batches", "4")
    assert set(report["plans"]) == {*SCHEMES, "auto"} and report["default"] == "topo"
    configs = {name: resolve(machine, scheme=name) for name in SCHEMES}
    configs["auto"] = choose(ZeroTopoConfig.parse({"scheme": "auto"}), machine, job)
    for name, found in report["plans"].items():
        cost = cost_of(configs[name], job, machine)
        assert cost.bounds is not None
        assert found["degrees"] == cost.config.plan.degrees()
        assert found["memory"] == cost.memory and found["sent_by_domain"] == cost.sent_by_domain
        assert found["at_least_s"] == cost.bounds.at_least
        assert found["at_most_s"] == cost.bounds.at_most
        assert 0 < cost.bounds.at_least < cost.bounds.at_most < 4 * cost.bounds.at_least
        assert found["quantizes"] == sorted(cost.config.kinds)
        stored = sum(found["memory"].values())
        assert found["fits"] == (stored <= report["memory_limit"])
    assert report["plans"]["topo"]["fits"] and report["memory_limit"] == int(68702699520 * 0.9)
    assert configs["auto"].notes[0] in report["notes"]


def test_the_default_is_marked_with_its_reason(run: Run) -> None:
    """On GPUs of several ranks topo, else the rule's plan; both in a table that is not cut."""
    for where, default, reason in (
        (FRONTIER, "topo", "the default where a GPU has several ranks"),
        (DGX, "auto", "scheme auto, the default here: weights on 1 rank, gradients on 1 rank"),
    ):
        status, out, err = run("plan", "--params", "13B", *where)
        assert (status, err) == (0, "")
        rows = [line.split() for line in out.splitlines()]
        marked = [row[0] for row in rows if row[1:2] == ["*"] and row[0] != "-"]
        assert marked == [default] and reason in out
        assert "…" not in out and "activations are recomputed; to keep them takes" in out


def test_where_nothing_fits_the_schemes_are_shown_with_what_would_do(run: Run) -> None:
    status, out, _ = run("plan", "--params", "900B", *DGX)
    assert status == 0 and "no plan fits 900B parameters on dgx-h100" in out
    assert "what would do" in out and "nodes" in out
    report = printed(run, "plan", "--params", "900B", *DGX)
    assert "auto" not in report["plans"]
    assert not any(found["fits"] for found in report["plans"].values())


def test_memory_is_drawn(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plans.png"
    status, out, _ = run("plan", "--params", "1B", *FRONTIER, "--plot", str(file))
    assert status == 0 and file.stat().st_size > 10_000 and f"Written: {file}" in out


# -- check -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [{}, {"scheme": "zero3"}])
@pytest.mark.parametrize("tensor", [1, 2])
def test_check_and_plan_agree(block: dict[str, Any], tensor: int, run: Run, tmp_path: Path) -> None:
    """Of the same machine, model, micro-batches and tensor parallel ranks."""
    words = ("--params", "7B", *DGX)
    more = ("--micro-batches", "2", "--tensor-parallel", str(tensor))
    plans = printed(run, "plan", *words, *more)["plans"]
    parallel: dict[str, Any] = {}
    if tensor > 1:
        parallel = {"tensor_parallel": {"autotp_size": tensor}}
    file = config_file(tmp_path, block, gradient_accumulation_steps=2, **parallel)
    found = printed(run, "check", file, *words)
    assert found["cost"] == plans[block.get("scheme", "auto")]
    assert found["plan"]["world_size"] == 32 // tensor


HOST = {
    "stage": 3,
    "reduce_bucket_size": 5e7,
    "stage3_max_live_parameters": 0,
    "sub_group_size": 1000,
    "stage3_prefetch_bucket_size": "auto",
    "offload_optimizer": {"device": "cpu"},
}
MUON = {"type": "Muon", "params": {"lr": 1e-3}}
COUNTED: list[tuple[dict[str, Any], Job]] = [
    (
        {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": False},
            "zero_optimization": HOST,
        },
        Job(scaled(10**9), 4, itemsize=4, live=0, bucket=50_000_000, sub_group=1000, offload=True),
    ),
    (
        {"gradient_accumulation_steps": 8, "optimizer": MUON},
        Job(scaled(10**9), micro_batches=8, muon=True),
    ),
]


@pytest.mark.parametrize(("keys", "job"), COUNTED, ids=["FP32 on the host", "Muon"])
def test_check_counts_what_the_config_says(
    keys: dict[str, Any], job: Job, run: Run, tmp_path: Path
) -> None:
    """Sequences, FP32 weights, small buckets, an optimizer on the host; Muon."""
    file = config_file(tmp_path, {"scheme": "zero3"}, **keys)
    found = printed(run, "check", file, "--params", "1B", *DGX)["cost"]
    machine = load_preset("dgx-h100", 32)
    cost = cost_of(resolve(machine, scheme="zero3"), job, machine)
    assert (found["memory"], found["sent_by_domain"]) == (cost.memory, cost.sent_by_domain)
    assert bool(found["memory"]["optimizer"]) != job.offload
    short = printed(run, "check", file, "--params", "1B", *DGX, "--seq", "512")["cost"]
    activations = [cost["memory"]["activations"] for cost in (found, short)]
    assert activations[1] == pytest.approx(activations[0] / 4, rel=1e-3)


def test_check_without_a_model_has_no_costs(run: Run, tmp_path: Path) -> None:
    """A named plan is shown; of an automatic one what will be chosen by; both say how to see
    costs.
    """
    named, automatic = (
        config_file(tmp_path, block, name)
        for block, name in (({"scheme": "topo"}, "named.json"), ({}, "automatic.json"))
    )
    found = printed(run, "check", named, *DGX)
    assert found["cost"] is None and found["plan"]["scheme"] == "topo"
    found = printed(run, "check", automatic, *DGX)
    assert found["cost"] is None and found["plan"] is None
    for file in (named, automatic):
        status, out, _ = run("check", file, *DGX)
        assert status == 0 and "--params 13B, or --model NAME" in out and out.endswith("ok\n")
