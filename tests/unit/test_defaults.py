# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a block without a scheme does, that quantization is chosen only if asked for, and that a
named plan must fit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import Run
from tests.plans import config_file
from tests.unit.test_planner import engine, request, timed
from zero_topo.config import ResolvedConfig, ZeroTopoConfig, is_automatic, resolve_config
from zero_topo.cost.explain import explain, planned
from zero_topo.cost.planner import Request, rank_plans
from zero_topo.hook.initialize import request_of, resolve_block
from zero_topo.topology import Topology, load_preset
from zero_topo.units import GB

DGX = load_preset("dgx-h100", 32)
SPECS = ("weights_spec", "secondary_spec", "gradients_spec", "resident_spec")


def parse(**block: Any) -> ZeroTopoConfig:
    return ZeroTopoConfig.parse(block)


def on(topology: Topology, billions: float) -> Request:
    return request(topology, int(billions * 10**9))


def sends_in_full(config: ResolvedConfig) -> bool:
    plain = all(getattr(config, name) is None for name in SPECS)
    return plain and config.publish.delta is None and config.sync.MODE == "dense"


# -- the default -----------------------------------------------------------------------------------


def test_the_default_is_topo_where_a_gpu_has_several_ranks_and_chosen_where_it_is_one() -> None:
    """Also of a block with other keys; degrees and named schemes are what they say everywhere."""
    frontier = load_preset("frontier", 16)
    assert (
        not is_automatic(parse(), frontier) and resolve_config(parse(), frontier).scheme == "topo"
    )
    chosen: list[dict[str, Any]] = [
        {},
        {"meter": False},
        {"sync": {"mode": "quantized"}},
        {"lossy": True},
    ]
    stated: list[dict[str, Any]] = [
        {"scheme": "topo"},
        {"weights": 1, "gradients": 8, "optimizer": 32},
    ]
    assert all(is_automatic(parse(**block), DGX) for block in chosen)
    assert not any(is_automatic(parse(**block), DGX) for block in stated)
    assert is_automatic(parse(lossy=False), frontier)
    with pytest.raises(ValueError, match="zero-topo plan --recommend --params N"):
        resolve_config(parse(), DGX)


def test_the_default_holds_70_billion_on_four_dgx_where_topo_holds_more_than_there_is() -> None:
    """In one line: what, why, which other is near, and what quantization would gain in seconds and
    as a factor.
    """
    wanted = on(DGX, 70)
    chosen = planned(parse(), wanted)
    assert wanted.limit is not None and wanted.price(chosen).fits
    assert chosen.plan.weights > 1 and sends_in_full(chosen)
    (line,) = [note for note in chosen.notes if note.startswith("scheme auto")]
    ranking = rank_plans(parse(), wanted)
    faster = ranking.faster
    assert faster is not None
    factor = ranking.best.seconds / faster.seconds
    assert (
        factor > 1.02
        and f'"lossy": true would take {faster.seconds:.2f} s a step, {factor:.2f} times as fast'
        in line
    )
    assert (
        line.startswith("scheme auto, the default here: ")
        and f"near: {keys(ranking.timed[1])}" in line
    )
    assert (
        f"{keys(ranking.best)}, {ranking.best.seconds:.2f} s a step by prediction, is the fastest "
        "of the" in line
    )
    with pytest.raises(
        ValueError,
        match=r"scheme topo leaves 92\.\d+ GB of weights and gradients .*set \"weights\": \"node\"",
    ):
        planned(parse(scheme="topo"), wanted)


def keys(plan: Any) -> str:
    return json.dumps(dict(plan.candidate.settings)).strip("{}")


def test_the_engine_plans_for_its_model_and_the_smallest_device() -> None:
    """Of one that names no scheme; the memory of the devices counts where the machine's is not
    known, or less.
    """
    config = {
        "zero_optimization": {"stage": 3},
        "zero_topo": {"topology": {"nodes": 2, "gpus_per_node": 4, "ranks_per_gpu": 1}},
    }
    sevenb = engine(*[10**8] * 70)

    def weights(memory: int | None, device: str = "cuda") -> int:
        sevenb.device = torch.device(device)
        found = resolve_block(config, 8, (), sevenb, (), memory)
        shared = memory // 4 if memory and device == "cpu" else memory
        assert (
            found is not None and found.topology.memory_per_rank == shared and sends_in_full(found)
        )
        return found.plan.weights

    assert weights(80 * GB) == 1 < weights(32 * GB)
    # The ranks of a host share its memory
    assert weights(320 * GB, "cpu") == 1 < weights(128 * GB, "cpu")
    assert weights(None) >= 4  # what is not known is not taken for endless
    with pytest.raises(ValueError, match=r"none of .* plans fits"):
        weights(8 * GB)
    # Before there is an engine: any plan stands for all
    assert resolve_block(config, 8) is not None


def test_frozen_weights_take_memory_and_no_gradients() -> None:
    """Adapters of a model of 70 billion train where all of it would not fit."""
    node = load_preset("dgx-h100", 8)
    frozen = request_of(engine(*[-(10**9)] * 70, 10**8), node)
    found = planned(parse(), frozen)
    shards = frozen.price(found).memory
    assert (
        shards["frozen"] == 70 * 10**9 * 2 // found.plan.weights
        and shards["optimizer"] == 10**8 * 12 // 8
    )
    with pytest.raises(ValueError, match=r"none of .* plans fits"):
        planned(parse(), request_of(engine(*[10**9] * 70), node))


def fewer_are_faster(config: ResolvedConfig, job: Any) -> float:
    """A made-up clock: twice as fast with quantization."""
    return 1.0 if sends_in_full(config) else 0.5


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["dgx-h100", "frontier", "perlmutter"])
@pytest.mark.parametrize("billions", [1, 70])
def test_auto_chooses_fewer_bits_only_if_asked(machine: str, billions: float) -> None:
    wanted = on(load_preset(machine, 384), billions)
    ranking = timed(parse(scheme="auto"), wanted, fewer_are_faster)
    assert all(sends_in_full(plan.config) for plan in (*ranking.timed, *ranking.refused))
    assert not any(sends_in_full(plan.config) for plan in ranking.lossier)
    assert any(
        line.startswith('"lossy": true would take 500.0 ms a step, 2.00 times')
        for line in explain(ranking)
    )
    lossy = timed(parse(scheme="auto", lossy=True), wanted, fewer_are_faster)
    assert not lossy.lossier and lossy.best.candidate.losses


def test_bits_that_the_block_asks_for_are_kept_and_no_others_come_with_them() -> None:
    block = parse(
        scheme="auto", quantize={"weights": "int8"}, sync={"mode": "quantized", "bits": 4}
    )
    for plan in timed(block, on(DGX, 13), fewer_are_faster).timed:
        assert {word for part in plan.candidate.losses for word in part} <= {
            "int8 weights",
            "int4 sync",
        }
    resident = parse(scheme="auto", quantize={"resident": "int8"})
    with pytest.raises(
        ValueError, match='quantize more than these ask for; allow it \\("lossy": true\\)'
    ):
        rank_plans(resident, on(DGX, 13))


def test_where_only_fewer_bits_fit_that_is_reported_and_not_done() -> None:
    wanted = on(replace(load_preset("dgx-h100", 32), memory_per_rank=64 * GB), 70)
    wanted = replace(wanted, reserve=0.0)
    lossy = timed(parse(scheme="auto", lossy=True), wanted, fewer_are_faster)
    limit = (
        min(plan.stored for plan in (*lossy.timed, *lossy.refused) if not plan.candidate.losses) - 1
    )
    short = replace(wanted, topology=replace(wanted.topology, memory_per_rank=limit))
    with pytest.raises(ValueError, match=r'would fit, but is lossier \("lossy": true\)'):
        planned(parse(), short)
    assert planned(parse(lossy=True), short).gradients_spec is not None


@pytest.mark.parametrize(
    "block", [{"scheme": "topo"}, {"weights": 1, "gradients": 8, "optimizer": 8}]
)
@pytest.mark.parametrize("lossy", [True, False])
def test_lossy_next_to_a_plan_that_leaves_nothing_to_choose_is_refused(
    block: dict[str, Any], lossy: bool
) -> None:
    with pytest.raises(ValueError, match='lossy says what "scheme": "auto" may choose'):
        parse(**block, lossy=lossy)


# -- near ties -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slower", "wins"), [(0.019, True), (0.021, False)])
def test_a_plan_that_holds_clearly_less_wins_within_two_percent(slower: float, wins: bool) -> None:
    """And the reasons say what the faster one holds; above two percent the faster one wins."""

    def clock(config: ResolvedConfig, job: Any) -> float:
        return (
            1.0 if config.plan.weights == 1 else 1.0 + slower if config.plan.weights == 8 else 2.0
        )

    ranking = timed(parse(scheme="auto"), on(DGX, 7), clock)
    fastest = ranking.fastest
    assert fastest.seconds == 1.0 and (ranking.best.config.plan.weights == 8) == wins
    assert (ranking.best.stored < 0.9 * fastest.stored) == wins
    reason = (
        f"{fastest.candidate.name} would take {1 - 1 / (1 + slower):.1%} less, but needs "
        f"{fastest.stored / GB:.2f} GB"
    )
    assert (reason in explain(ranking)[0]) == wins


# -- named plans -----------------------------------------------------------------------------------


def test_a_named_plan_that_is_not_likely_to_fit_is_warned_of_with_a_way_out_that_fits() -> None:
    wanted = on(DGX, 45)
    block = parse(scheme="topo")
    (warning,) = [note for note in planned(block, wanted).notes if note.startswith("warning")]
    assert 'set "weights": "node", which needs' in warning and "most of it for" in warning
    wider = planned(parse(scheme="topo", weights="node"), wanted)
    assert not [note for note in wider.notes if note.startswith("warning")]
    assert not [note for note in planned(block, on(DGX, 7)).notes if note.startswith("warning")]
    default = planned(parse(), on(load_preset("frontier", 32), 45)).notes[-1]
    assert 'set "scheme": "topo", "weights": "node", which needs' in default


def test_check_tells_the_plan_for_a_model(run: Run, tmp_path: Path) -> None:
    """The default's, chosen; a named one's, refused where it cannot fit; a machine is stated
    once.
    """

    def check(block: dict[str, Any], *words: str) -> tuple[int, str, str]:
        return run("check", config_file(tmp_path, block), "--world-size", "32", *words)

    for size in (("--params", "70B"), ("--model", "llama-3-70b")):
        status, out, _ = check({}, "--machine", "dgx-h100", *size)
        assert status == 0 and "scheme auto, the default here: " in out and "near: " in out
        status, _, err = check({"scheme": "topo"}, "--machine", "dgx-h100", *size)
        assert status == 2 and "scheme topo leaves" in err
    status, _, err = check({"topology": "dgx-h100"}, "--machine", "frontier")
    assert status == 2 and "the block already names its machine" in err
    status, out, _ = check({})
    assert status == 0 and "is not known here, so the plan is not known either" in out
    status, out, _ = check({"lossy": True}, "--machine", "dgx-h100", "--json")
    reported = json.loads(out)
    assert (
        status == 0
        and reported["lossy"]
        and [row["params"] for row in reported["forecasts"]][-1] == 70 * 10**9
    )
    assert any(row["chosen"] and row["chosen"]["losses"] for row in reported["forecasts"])
