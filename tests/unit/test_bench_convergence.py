# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Paired losses: what is trained, how differences from stock are taken, what is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.choice import schemes_named
from benchmarks.convergence import CHANGE, Convergence, compare, joined, run
from benchmarks.in_process import data_parallel
from benchmarks.schemes import BenchScheme
from benchmarks.training import build_model, change, products_in_fp32
from benchmarks.training_setup import TrainingSetup

SETUP = TrainingSetup(layers=1, width=64, context=8, batch=1)


def wanted(*schemes: str, seeds: tuple[int, ...] = (0, 1)) -> Convergence:
    """Twenty steps of some schemes."""
    return Convergence(tuple(schemes_named(schemes)), SETUP, 20, seeds)


def test_stock_and_the_chaos_floor_are_always_trained() -> None:
    """Each seed trains stock, stock with other initial weights, and the schemes, whether stock is
    named or not.
    """
    for named in (["stock", "topo"], ["topo"]):
        jobs = wanted(*named).settings()["jobs"]
        assert [(job["seed"], job["scheme"], job["change"]) for job in jobs] == [
            (seed, *run)
            for seed in (0, 1)
            for run in (("stock", 0.0), ("chaos", CHANGE), ("topo", 0.0))
        ]
        assert jobs[0]["block"] is None and jobs[1]["block"] is None
        shape = {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}
        assert jobs[2]["block"] == {"topology": {"emulated": shape}, "scheme": "topo"}
    assert wanted("topo").ticks() == 20 * 2 * 3


def test_a_scheme_may_have_a_rate_of_its_own() -> None:
    """Which its name tells; stock and the others keep the benchmark's."""
    (scheme,) = schemes_named(["adams"])
    jobs = replace(wanted("topo"), schemes=(scheme.at(7e-4), scheme), floors=0).settings()["jobs"][
        :3
    ]
    assert [(job["scheme"], job.get("lr")) for job in jobs] == [
        ("stock", None),
        ("adams@0.0007", 7e-4),
        ("adams", None),
    ]
    assert jobs[1]["block"] == jobs[2]["block"]
    rates = [SETUP.of_job(job, 1)["optimizer"]["params"]["lr"] for job in jobs]
    assert rates == [SETUP.lr, 7e-4, SETUP.lr]


def test_muon_trains_its_matrices_at_the_schemes_rate_and_the_others_at_the_benchmarks() -> None:
    """Without clipping, which would be of its updates, and with stock's condition; in FP32 where
    asked for.
    """
    (scheme,) = schemes_named(["muon-changed"])
    jobs = replace(wanted("topo"), schemes=(scheme.at(0.04), scheme), floors=0).settings()["jobs"][
        1:3
    ]
    assert [job["change"] for job in jobs] == [1e-3, 1e-3]
    for job, rate in zip(jobs, (0.04, 0.02), strict=True):
        config = replace(SETUP, bf16=False).of_job(job, 1)
        assert (config["optimizer"]["params"]["muon_lr"], config["optimizer"]["params"]["lr"]) == (
            rate,
            SETUP.lr,
        )
        assert (
            config["gradient_clipping"] == 0
            and config["zero_optimization"]["reduce_scatter"] is False
        )
        assert config["bf16"] == {"enabled": False}


def test_in_one_process_a_mode_that_sends_everything_trains_like_dense_sync() -> None:
    """Within rounding, on two ranks, behind the optimizer that it needs; its bytes are counted."""
    modes: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("oktopk", "AdamW", {}),
        ("radius", "AdamW", {"interval": 4, "value_dtype": "fp32"}),
        ("scape", "AdamS", {}),
    )
    schemes = tuple(
        BenchScheme(
            mode, data_parallel({"mode": mode, "density": 1.0, **more}), optimizer=optimizer
        )
        for mode, optimizer, more in modes
    )
    exact = BenchScheme("adams", data_parallel({"mode": "dense"}), optimizer="AdamS")
    setup = replace(SETUP, bf16=False, lr=1e-3)
    bench = Convergence((exact, *schemes), setup, 10, (0,), shape=(2, 1, 1), one_process=True)
    ticks: list[int] = []
    *_, content = run(bench, lambda _, steps: ticks.append(steps))
    rows = {row["scheme"]: row for row in content["results"]}
    curves = {name: torch.tensor(seeds["0"]) for name, seeds in content["curves"].items()}
    for mode, optimizer, _ in modes:
        dense = "stock" if optimizer == "AdamW" else "adams"
        torch.testing.assert_close(curves[mode], curves[dense], atol=1e-5, rtol=0)
        assert rows[mode]["evaluation"]["loss"] == pytest.approx(
            rows[dense]["evaluation"]["loss"], abs=1e-5
        )
        assert (
            rows[mode]["crossing_bytes"] > 4 * setup.parameters // 2
            and rows[dense]["crossing_bytes"] is None
        )
    assert (curves["adams"] - curves["stock"]).abs().max() > 1e-3 and sum(ticks) == bench.ticks()


def test_in_one_process_only_sync_and_the_optimizer_differ() -> None:
    """What it would not train is refused, with what to give instead."""
    settings: dict[str, Any] = {
        "setup": replace(SETUP, bf16=False),
        "shape": (2, 1, 1),
        "one_process": True,
    }
    replace(wanted("oktopk"), **settings)
    for other in (
        {"setup": SETUP},
        {"shape": (2, 2, 1)},
        {"micro_batches": 2},
        {"schemes": wanted("topo").schemes},
    ):
        with pytest.raises(ValueError, match="give --fp32, a shape such as 4x1x1"):
            replace(wanted("oktopk"), **settings | other)


def curve(level: float, *last: float, evaluation: float | None = None) -> dict[str, Any]:
    """A run of twenty losses, of which some are the last, and an evaluation, at the losses' level
    if not given.
    """
    losses = [level] * (20 - len(last)) + list(last)
    return {"losses": losses, "evaluation": evaluation or level, "crossing_bytes": None}


def test_differences_are_paired_by_seed() -> None:
    """Seeds far apart do not hide a scheme that is one percent worse with each of them."""
    worse = {0: curve(1.0, 1.01, 1.01, evaluation=0.99), 1: curve(3.0, 3.03, 3.03, evaluation=3.06)}
    stock, topo = compare({"stock": {0: curve(1.0), 1: curve(3.0)}, "topo": worse})
    assert stock["last"]["difference"]["worst"] == 0 and stock["last"]["loss"] == 2.0
    assert topo["last"]["difference"]["by_seed"] == pytest.approx({"0": 0.01, "1": 0.01})
    assert topo["overall"]["difference"]["mean"] == pytest.approx(0.001)
    assert topo["evaluation"]["difference"]["mean"] == pytest.approx(0.005)
    assert topo["evaluation"]["difference"]["worst"] == pytest.approx(0.02)


def made(curves: dict[str, dict[int, dict[str, Any]]], when: str = "now") -> dict[str, Any]:
    """A record of some runs."""
    losses = {
        name: {str(seed): run["losses"] for seed, run in seeds.items()}
        for name, seeds in curves.items()
    }
    settings = wanted("topo", seeds=tuple(curves["stock"])).settings()
    head = {"when": when, "machine": {"cores": len(when)}, "versions": {}, "settings": settings}
    return {**head, "results": compare(curves), "curves": losses}


def test_seeds_are_added_to_a_record() -> None:
    """As if all had been trained at once; a scheme with fewer seeds keeps them; each part's machine
    is reported.
    """
    runs = {
        "stock": {seed: curve(1.0 + seed) for seed in range(3)},
        "chaos": {0: curve(1.001)},
        "topo": {0: curve(1.01), 1: curve(2.5, 2.0), 2: curve(3.3, evaluation=2.9)},
    }
    older, newer = (
        {
            name: {seed: run for seed, run in found.items() if seed in seeds}
            for name, found in runs.items()
        }
        for seeds in ((0, 1), (2,))
    )
    del newer["chaos"]
    content, whole = joined(made(older, "before"), made(newer)), made(runs)
    assert content["curves"] == whole["curves"] and [
        run["machine"]["cores"] for run in content["before"]
    ] == [6]
    for row, expected in zip(content["results"], whole["results"], strict=True):
        assert row["crossing_bytes"] is None and row["scheme"] == expected["scheme"]
        for name in ("last", "overall", "evaluation"):
            assert row[name]["loss"] == pytest.approx(expected[name]["loss"])
            assert row[name]["difference"]["by_seed"] == expected[name]["difference"]["by_seed"]
            assert row[name]["difference"]["worst"] == expected[name]["difference"]["worst"]
    assert (
        len(joined(content, made({name: {3: curve(1.0)} for name in ("stock", "topo")}))["before"])
        == 2
    )


def test_schemes_are_added_to_a_record() -> None:
    """What it has is not trained again, but for stock, with which the new ones are compared. A
    scheme that has changed in between is refused.
    """
    runs = {name: {0: curve(level), 1: curve(level)} for name, level in (("stock", 1), ("topo", 2))}
    before = made({"chaos": runs["stock"], **runs})
    more = replace(wanted("topo", "topo-nf4"), before=before)
    assert [(job["scheme"], job["seed"]) for job in more.left()] == [
        ("stock", 0),
        ("topo-nf4", 0),
        ("stock", 1),
        ("topo-nf4", 1),
    ]
    added = made({"stock": runs["stock"], "topo-nf4": runs["topo"]})
    content = joined(before, {**added, "settings": wanted("topo-nf4").settings()})
    names = {"chaos", "stock", "topo", "topo-nf4"}
    assert {row["scheme"] for row in content["results"]} == names
    assert {job["scheme"] for job in content["settings"]["jobs"]} == names
    with pytest.raises(ValueError, match="the record has all 2 seeds of these schemes"):
        replace(wanted("topo-nf4"), before=content)
    muon = tuple(replace(scheme, optimizer="Muon") for scheme in more.schemes)
    with pytest.raises(ValueError, match="its schemes differ"):
        replace(more, schemes=muon)


def test_the_changed_weights_are_near_and_the_same_everywhere() -> None:
    """The chaos run starts within a few 1e-6 of stock, by the same change on every rank; no change
    is no change.
    """
    models = [build_model(SETUP, 3) for _ in range(3)]
    for model, size in zip(models, (0.0, CHANGE, CHANGE), strict=True):
        change(model, size, 3)
    plain, *changed = (
        torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models
    )
    assert torch.equal(*changed)
    assert 0 < (changed[0] - plain).abs().max() < 10 * CHANGE
    assert torch.equal(
        plain, torch.cat([p.detach().flatten() for p in build_model(SETUP, 3).parameters()])
    )


def test_products_are_those_of_fp32_rounded_where_no_vectors_multiply_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU with AVX-512 nothing is replaced; elsewhere it is, until the result is dropped, and
    wider types keep theirs.
    """
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert products_in_fp32() is None
    found: list[torch.dtype] = []
    multiply = torch.mm

    def seen(left: torch.Tensor, right: torch.Tensor, **out: Any) -> torch.Tensor:
        found.append(left.dtype)
        return multiply(left, right, **out)

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch, "mm", seen)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 64, dtype=torch.float64, generator=generator) for _ in range(2))
    plain = left @ right
    products = products_in_fp32()
    assert products is not None and torch.equal(left @ right, plain)
    low, other = left.bfloat16(), right.bfloat16()
    product = low @ other
    assert found == [torch.float64, torch.float32]
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, multiply(low.float(), other.float()).bfloat16())
    del products
    found.clear()
    torch.matmul(low, other)
    assert not found
