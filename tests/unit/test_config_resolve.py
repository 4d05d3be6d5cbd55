# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From block to plan: the scheme tables, what overrides what, and what the user is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plans import TREE, resolve
from zero_topo.config import DenseSync, ResolvedConfig
from zero_topo.quant.spec import BlockSpec
from zero_topo.topology.model import Topology

FLAT = Topology("flat", nodes=2, gpus_per_node=4, ranks_per_gpu=1)
INT8, INT4 = BlockSpec(8), BlockSpec(4)


def degrees(config: ResolvedConfig) -> tuple[int | None, ...]:
    return tuple(config.plan.degrees().values())


def specs(config: ResolvedConfig) -> tuple[BlockSpec | None, ...]:
    return config.weights_spec, config.secondary_spec, config.gradients_spec


@pytest.mark.parametrize(
    ("scheme", "expected", "formats", "reduce"),
    [
        ("zero3", (8, None, 8, 8), (None, None, None), "reduce_scatter"),
        ("zero++", (8, 4, 8, 8), (INT8, None, INT4), "reduce_scatter"),
        ("mics", (4, None, 4, 4), (None, None, None), "reduce_scatter"),
        ("hsdp", (4, None, 4, 4), (None, None, None), "reduce_scatter"),
        ("paper", (2, 2, 4, 8), (INT8, INT8, INT4), "all_reduce"),
        ("topo", (2, 2, 4, 8), (INT8, INT8, INT4), "reduce_scatter"),
    ],
)
def test_a_scheme_is_the_row_of_its_paper(
    scheme: str, expected: tuple[int, ...], formats: tuple[BlockSpec | None, ...], reduce: str
) -> None:
    config = resolve(scheme=scheme)
    assert config.scheme == scheme
    assert degrees(config) == expected
    assert specs(config) == formats
    assert config.sync == DenseSync(mode="dense", reduce=reduce)


def test_mics_and_hsdp_are_one_plan() -> None:
    """So tests of what a plan does take one of them."""
    mics, hsdp = (resolve(scheme=scheme) for scheme in ("mics", "hsdp"))
    assert (mics.plan, specs(mics), mics.sync, mics.publish) == (hsdp.plan, specs(hsdp), hsdp.sync, hsdp.publish)


def test_an_empty_block_is_the_scheme_topo_and_says_so() -> None:
    config = resolve()
    assert config.scheme == "topo" and degrees(config) == (2, 2, 4, 8)
    assert config.notes[0].startswith("scheme topo (the default): weights int8 over gpu (degree 2)")
    assert resolve(meter=False).scheme == "topo"


def test_the_free_form_quantizes_nothing_by_itself_and_has_no_secondary() -> None:
    config = resolve(weights=2, gradients="node", optimizer="world")
    assert config.scheme is None
    assert degrees(config) == (2, None, 4, 8)
    assert specs(config) == (None, None, None)
    assert config.notes[0].startswith("no scheme: weights over 2 ranks, no secondary")
    quantized = resolve(weights=2, secondary=4, gradients=4, optimizer=8, quantize={"secondary": "int8"})
    assert degrees(quantized) == (2, 4, 4, 8) and quantized.secondary_spec == INT8


def test_user_degrees_override_the_schemes_and_those_that_follow_the_weights_follow() -> None:
    assert degrees(resolve(scheme="topo", secondary="node")) == (2, 4, 4, 8)
    assert degrees(resolve(scheme="paper", secondary="none")) == (2, None, 4, 8)
    assert degrees(resolve(scheme="paper", secondary=None)) == (2, None, 4, 8)
    assert degrees(resolve(scheme="topo", optimizer="node")) == (2, 2, 4, 4)
    assert degrees(resolve(scheme="topo", weights=None)) == (2, 2, 4, 8)
    assert degrees(resolve(scheme="mics", weights=2)) == (2, None, 2, 2)
    assert degrees(resolve(scheme="mics", weights="gpu", optimizer="world")) == (2, None, 2, 8)
    assert degrees(resolve(scheme="topo", weights="node")) == (4, 4, 4, 8)
    assert degrees(resolve(scheme="hsdp", weights="gpu")) == (2, None, 4, 4)


def test_a_quantize_key_overrides_also_with_null_and_an_omitted_one_does_not() -> None:
    config = resolve(scheme="topo", quantize={"weights": None, "block_size": 64})
    assert specs(config) == (None, BlockSpec(8, 64), BlockSpec(4, 64))
    assert specs(resolve(scheme="zero++", quantize={"secondary": "int8"})) == (INT8, INT8, INT4)
    asymmetric = resolve(scheme="zero3", quantize={"gradients": "int8", "symmetric": False})
    assert asymmetric.gradients_spec == BlockSpec(8, 256, symmetric=False)


def test_a_sync_key_overrides_and_an_omitted_one_keeps_the_schemes() -> None:
    assert resolve(scheme="paper", sync={"dtype": "fp32"}).sync == DenseSync(reduce="all_reduce", dtype="fp32")
    assert resolve(scheme="paper", sync={"reduce": "reduce_scatter"}).sync == DenseSync(reduce="reduce_scatter")


def test_collectives_go_through_the_node_unless_told_otherwise() -> None:
    assert resolve(scheme="zero++").plan.route(1, 8) == [(1, 4), (4, 8)]
    assert resolve(scheme="zero3", two_hop=False).plan.route(1, 8) == [(1, 8)]


def test_weights_held_whole_by_every_rank_need_no_secondary_and_the_user_is_told_how_to_shard() -> None:
    """And not where they are sharded, or held by everyone on purpose."""
    config = resolve(FLAT, scheme="topo")
    told = 'gpu domain has one rank on this machine: every rank holds all weights; set "weights": "node" to shard them'
    assert degrees(config) == (1, None, 4, 8) and config.secondary_spec is None
    assert told in config.notes and any(note.startswith("no secondary copy is kept") for note in config.notes)
    on_purpose = resolve(scheme="topo", weights="rank", secondary=None)
    assert degrees(on_purpose) == (1, None, 4, 8)
    for quiet in (on_purpose, resolve(TREE, scheme="topo")):
        assert not any("every rank holds all weights" in note for note in quiet.notes)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"weights": "node", "gradients": "gpu", "optimizer": "world"}, "dependency rule.*gradients degree 2"),
        ({"scheme": "topo", "optimizer": "gpu"}, "dependency rule.*optimizer degree 2"),
        ({"scheme": "topo", "weights": 3}, "weights degree 3 does not divide the world of 8"),
        ({"scheme": "zero3", "secondary": 16}, "secondary degree 16 does not divide"),
    ],
)
def test_an_impossible_plan_is_refused_with_the_rule_it_breaks(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(**block)


def test_notes_tell_of_sync_publish_and_hops_exactly_when_they_happen() -> None:
    def has(config: ResolvedConfig, word: str) -> bool:
        return any(note.startswith(word) for note in config.notes)

    topo, zero3, hsdp = (resolve(scheme=scheme) for scheme in ("topo", "zero3", "hsdp"))
    assert has(topo, "sync: dense reduce_scatter over 2 gradient copies") and not has(zero3, "sync")
    assert has(topo, "publish") and not has(hsdp, "publish")
    assert has(resolve(scheme="zero++"), "scatter in two hops") and not has(topo, "scatter")
    assert has(resolve(scheme="mics"), "scheme mics: shards over the node (4 ranks)")
    assert not has(resolve(scheme="mics", weights=2), "scheme mics: shards")


def test_the_plan_follows_the_placement_of_the_ranks() -> None:
    cyclic = Topology("cyclic", 2, 2, 2, order=(0, 4, 1, 5, 2, 6, 3, 7))
    assert resolve(cyclic, scheme="topo").plan.group(0, 1, 2) == [0, 2]


def test_the_resolved_config_is_json_for_reports() -> None:
    report = resolve(scheme="topo", seed=3).to_json()
    assert report["degrees"] == {"weights": 2, "secondary": 2, "gradients": 4, "optimizer": 8}
    assert report["quantize"] == {"weights": "int8/256", "secondary": "int8/256", "gradients": "int4/256"}
    assert report["sync"] == {"mode": "dense", "reduce": "reduce_scatter", "dtype": None}
    assert report["seed"] == 3
