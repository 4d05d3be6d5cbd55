# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""TAGC: nothing is lost with a sketch or without, the index is an OR, and the compression is one
that can be peeled.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks.sync_cases import HIERARCHY, Step, check_nothing_is_lost, run, sync_world
from tests.ranks.worlds import World
from zero_topo.config.tagc_config import LEAST_BLOCKS, RATIOS, SAFE_LOAD, TagcSync
from zero_topo.cost import Workload, step_bytes
from zero_topo.sync import tagc as tagc_mode
from zero_topo.sync.base import Parameter
from zero_topo.sync.sparse import takes_part

ROW = LEAST_BLOCKS * 1024


def tagc(
    numels: tuple[int, ...], peers: int | None = 2, place: str = "data parallel", **sync: Any
) -> World:
    """A world with the mode, whose share of elements follows from the ratio."""
    sync = {"value_dtype": "fp32", "theta": None, **sync}
    return sync_world("tagc", place, peers, numels, **sync)


def check(w: World, results: list[list[Step]]) -> None:
    """Nothing is lost or estimated."""
    check_nothing_is_lost(w, results)
    assert all(seen.report["estimated"] == 0 for found in results for seen in found)


@pytest.mark.parametrize(
    ("place", "peers", "numels", "ratio"),
    [
        *(("data parallel", peers, (peers * ROW,), ratio) for peers in (2, 3) for ratio in RATIOS),
        # Rows that end with no block
        *((place, None, (8 * (ROW + 77), 8 * 9), 4) for place in HIERARCHY),
    ],
    ids=str,
)
def test_every_step_is_peeled(
    place: str, peers: int | None, numels: tuple[int, ...], ratio: int
) -> None:
    """At the shares that follow from the ratio, whatever the shape of the hierarchy."""
    w = tagc(numels, peers, place, ratio=ratio)
    results = run(w, 3)
    check(w, results)
    for found, step in product(results, range(3)):
        report = found[step].report
        assert (report["ratio"], report["fallbacks"]) == (ratio, 0)
        assert peers is None or torch.equal(found[step].rows, results[0][step].rows)
        if peers:
            assert report["union"] <= SAFE_LOAD / ratio
            assert report["density"] == pytest.approx(report["density_asked"], rel=0.01)


@pytest.mark.parametrize("values", [tagc_mode.PROBE, 3])
def test_elements_that_peeling_does_not_reach_travel_next_to_the_sketch(
    values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few columns store all selections, far too many for those: the union is safe on average, and
    yet nothing is lost.

    Also if an estimate is right by chance: of two values it often is, and other probes follow.
    """
    monkeypatch.setattr(tagc_mode, "PROBE", values)
    w = tagc((2 * ROW,), 2)
    hot = torch.arange(2 * ROW) % 1024 < 40
    results = run(w, 1, lambda rank, step: [w.grads(rank, step)[0] * hot])
    assert all(
        found[0].report["repeated"] > 1000 and found[0].report["ratio"] == 4 for found in results
    )
    assert all(found[0].report["estimated"] == 0 for found in results)
    for rank, found in enumerate(results):
        residual = sum(
            (part for other in results for member, part in other[0].residuals if member == rank),
            torch.zeros(()),
        )
        due = w.own_mean(rank, 0) * w.own_columns(rank, [hot])
        torch.testing.assert_close(found[0].own + residual, due, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("sync", "ratios", "fallbacks", "words"),
    [
        ({"theta": 0.9}, [2, 2, 2], [1, 2, 3], "takes 2x"),
        ({"theta": 0.95}, [4, 4, 4], [1, 2, 3], "takes 4x"),
        ({"theta": 0.7}, [0, 0, 0], [1, 2, 3], "without a sketch"),
        ({"warmup": 2, "start_density": 0.5}, [0, 2, 10], [0, 0, 0], ""),
    ],
)
def test_a_union_too_dense_for_the_ratio_falls_back(
    sync: dict[str, Any],
    ratios: list[int],
    fallbacks: list[int],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To a ratio that holds it or to none; counted each time, said once, and nothing is lost. A
    warm-up that is too dense was asked for: it is no fallback, and nothing is said.
    """
    w = tagc((2 * ROW,), 2, ratio=10, **sync)
    with caplog.at_level(logging.INFO, "zero_topo.sync.tagc"):
        results = run(w, 3)
    check(w, results)
    for found in results:
        assert [seen.report["ratio"] for seen in found] == ratios
        assert [seen.report["fallbacks"] for seen in found] == fallbacks
    said = [record for record in caplog.records if record.name == "zero_topo.sync.tagc"]
    assert [record.threadName for record in said] == ["rank 0"] * bool(words)
    assert all(words in record.getMessage() for record in said)


def test_one_crowded_row_makes_all_fall_back() -> None:
    """The densest row decides for every rank: sketches of one exchange have one size."""
    w = tagc((3 * ROW,), 3, "owned", theta=0.97)
    crowd = torch.where(torch.arange(3 * ROW) < ROW, 100.0, 1.0)
    results = run(w, 2, lambda rank, step: [w.grads(rank, step)[0] * crowd])
    assert {(found[1].report["ratio"], found[1].report["fallbacks"]) for found in results} == {
        (2.0, 2.0)
    }
    assert results[0][1].report["union"] < SAFE_LOAD / 4


@given(
    asked=st.sampled_from(RATIOS),
    union=st.floats(0, 1),
    width=st.integers(1, 4 * ROW),
    peers=st.integers(1, 1000),
)
def test_the_ratio_is_the_largest_safe_one(
    asked: Any, union: float, width: int, peers: int
) -> None:
    """Never above the asked one; a sketch is never larger than its row. The share of zeros that the
    paper prints is raised where the union of all selections may not fit.
    """
    config = TagcSync(ratio=asked)
    found = config.safe_ratio(union, width)
    safe = [r for r in RATIOS if r <= asked and r * union <= SAFE_LOAD] if width >= ROW else []
    assert found == (max(safe) if safe else None)
    paper = {2: 0.80, 4: 0.90, 10: 0.9875}[asked]
    assert config.zeros(peers) == max(paper, 1 - SAFE_LOAD / (peers * asked))
    assert TagcSync(ratio=asked, theta=0.5).zeros(peers) == 0.5
    assert config.sketch_rows(width, asked) >= 3
    assert width < ROW or config.sketch_rows(width, asked) * 1024 < 0.6 * width


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("peers", [2, 3])
def test_bits_and_sketches_go_to_the_owners_and_that_is_what_the_formula_says(
    peers: int, ratio: int
) -> None:
    """To the byte, but for counts and what goes next to the sketch: an index to all peers, and the
    values back.
    """
    w = tagc((peers * ROW,), peers, "owned", ratio=ratio)
    work = replace(Workload.uniform([peers * ROW], itemsize=4), sync_itemsize=4)
    (formula,) = (n for (phase, _), n in step_bytes(w.config, work).items() if phase == "sync")
    blocks = LEAST_BLOCKS
    assert formula == (peers - 1) * (ROW // 8 + 4096 * -(-blocks // ratio))
    results = run(w, 2)
    # How dense a union is, or that not all is finite; how many elements go next to the sketch
    counts = 2 * 8 * (peers - 1)
    alongside = [int(found[1].report["repeated"]) for found in results]
    for found, own in zip(results, alongside, strict=True):
        extra = 4 * own * (peers - 1) + 4 * (sum(alongside) - own)
        assert found[1].sent == formula + counts + extra


DENSE = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    "transformer.h.0.attn.c_attn.weight",
    "gpt_neox.layers.0.attention.query_key_value.weight",
    "encoder.layer.0.attention.self.key.weight",
    "encoder.block.0.layer.0.SelfAttention.v.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "layers.0.self_attn.in_proj_weight",
    "blocks.0.qkv.weight",
)
SPARSE = (
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
    "transformer.h.0.attn.c_proj.weight",
    "encoder.block.0.layer.0.SelfAttention.o.weight",
    "blocks.0.up.weight",
)


def test_layers_outside_the_attention_core_are_sparse() -> None:
    """By the names that common models give them."""
    found = [name for name in (*DENSE, *SPARSE) if takes_part(Parameter(name, 1, 2), TagcSync())]
    assert found == list(SPARSE)
