# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From block to plan: the scheme tables, what overrides what, and what the user reads."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.plans import TREE, resolve
from zero_topo.config import SCHEMES, DenseSync, ResolvedConfig
from zero_topo.quant.spec import BlockSpec
from zero_topo.topology.model import Topology

FLAT = Topology("flat", nodes=2, gpus_per_node=4, ranks_per_gpu=1)
INT8, INT4, NF4 = BlockSpec("int8"), BlockSpec("int4"), BlockSpec("nf4", 64)


def degrees(config: ResolvedConfig) -> tuple[int | None, ...]:
    return tuple(config.plan.degrees().values())


def specs(config: ResolvedConfig) -> tuple[BlockSpec | None, ...]:
    return config.weights_spec, config.secondary_spec, config.gradients_spec


@pytest.mark.parametrize(
    ("scheme", "expected", "formats", "reduce"),
    [
        ("zero3", (8, None, 8, 8), (None, None, None), "reduce_scatter"),
        ("zero++", (8, 4, 8, 8), (INT8, None, INT4), "reduce_scatter"),
        ("hsdp", (4, None, 4, 4), (None, None, None), "reduce_scatter"),
        ("paper", (2, 2, 4, 8), (INT8, INT8, INT4), "all_reduce"),
        ("topo", (2, None, 4, 8), (INT8, None, NF4), "reduce_scatter"),
        ("topo-zero2", (1, None, 4, 8), (INT8, None, NF4), "reduce_scatter"),
    ],
)
def test_a_scheme_is_the_row_of_its_paper(
    scheme: str, expected: tuple[int, ...], formats: tuple[BlockSpec | None, ...], reduce: Any
) -> None:
    config = resolve(scheme=scheme)
    assert config.scheme == scheme
    assert degrees(config) == expected
    assert specs(config) == formats
    assert config.sync == DenseSync(mode="dense", reduce=reduce)


def test_an_empty_block_is_the_scheme_topo_and_says_so() -> None:
    config = resolve()
    assert config.scheme == "topo" and degrees(config) == degrees(resolve(scheme="topo"))
    assert config.notes[0].startswith("scheme topo (the default): weights INT8 over gpu (2 ranks)")
    assert resolve(overlap=False).scheme == "topo"


def test_the_free_form_quantizes_nothing_by_itself_and_has_no_secondary() -> None:
    config = resolve(weights=2, gradients="node", optimizer="world")
    assert config.scheme is None
    assert degrees(config) == (2, None, 4, 8)
    assert specs(config) == (None, None, None)
    assert config.notes[0].startswith(
        "no scheme: weights over 2 ranks, gradients over node (4 ranks)"
    )
    quantized = resolve(
        weights=2, secondary=4, gradients=4, optimizer=8, quantize={"secondary": "int8"}
    )
    assert degrees(quantized) == (2, 4, 4, 8) and quantized.secondary_spec == INT8


def test_user_degrees_override_the_schemes_and_those_that_follow_the_weights_follow() -> None:
    assert degrees(resolve(scheme="topo", secondary="node")) == (2, 4, 4, 8)
    assert degrees(resolve(scheme="paper", secondary="none")) == (2, None, 4, 8)
    assert degrees(resolve(scheme="paper", secondary=None)) == (2, None, 4, 8)
    assert degrees(resolve(scheme="paper", optimizer="node")) == (2, 2, 4, 4)
    assert degrees(resolve(scheme="paper", weights=None)) == (2, 2, 4, 8)
    assert degrees(resolve(scheme="paper", weights="node")) == (4, 4, 4, 8)
    assert degrees(resolve(scheme="hsdp", weights="gpu")) == (2, None, 4, 4)


def test_a_quantize_key_overrides_also_with_null_and_an_omitted_one_does_not() -> None:
    config = resolve(scheme="topo", quantize={"weights": None})
    assert specs(config) == (None, INT8, NF4)
    assert specs(resolve(scheme="zero++", quantize={"secondary": "int8"})) == (INT8, INT8, INT4)


def test_a_sync_key_overrides_and_an_omitted_one_keeps_the_schemes() -> None:
    assert resolve(scheme="paper", sync={"dtype": "fp32"}).sync == DenseSync(
        reduce="all_reduce", dtype="fp32"
    )
    assert resolve(scheme="paper", sync={"reduce": "reduce_scatter"}).sync == DenseSync(
        reduce="reduce_scatter"
    )


def test_weights_stored_whole_by_every_rank_need_no_secondary_and_the_user_reads_how_to_shard() -> (
    None
):
    """And not where they are sharded, or stored by everyone on purpose."""
    config = resolve(FLAT, scheme="topo")
    reported = (
        'gpu domain has one rank on this machine: every rank stores all weights; set "weights": '
        '"node" to shard them'
    )
    assert degrees(config) == (1, None, 4, 8) and config.secondary_spec is None
    assert reported in config.notes and any(
        note.startswith("no secondary copy of the weights") for note in config.notes
    )
    on_purpose = resolve(scheme="topo", weights="rank", secondary=None)
    assert degrees(on_purpose) == (1, None, 4, 8)
    for quiet in (on_purpose, resolve(TREE, scheme="topo")):
        assert not any("every rank stores all weights" in note for note in quiet.notes)


RESIDENT: dict[str, Any] = {"weights": "int8", "resident": "int8"}
CODED: dict[str, Any] = {
    "weights": "gpu",
    "gradients": "node",
    "optimizer": "world",
    "quantize": RESIDENT,
}
OBSTACLES: list[tuple[dict[str, Any], str]] = [
    (
        {"quantize": {"weights": None}},
        'quantize.weights = null: all gathers send the INT8 weights; set it to "int8"',
    ),
    (
        {"secondary": "node"},
        "secondary = 4: all gathers send the INT8 weights, which 2 ranks share",
    ),
    ({"secondary": "gpu", "quantize": {"secondary": None}}, "quantize.secondary = null"),
    (
        {"gradients": "gpu", "optimizer": "gpu"},
        "weights = 2: each rank stores exactly the weights that it updates",
    ),
]


def test_resident_codes_are_what_both_passes_gather() -> None:
    """No secondary copy next to them, also where the user asked for one over the same ranks; and
    the run says so.
    """
    same: dict[str, Any] = {"secondary": "gpu", "quantize": {**RESIDENT, "secondary": "int8"}}
    for secondary in ({}, same):
        config = resolve(**CODED | secondary)
        assert config.resident_spec == config.weights_spec == BlockSpec("int8")
        assert degrees(config) == (2, None, 4, 8) and config.secondary_spec is None
    assert any(
        note.startswith("weights are stored as INT8 only, one scale per 256")
        for note in config.notes
    )
    changes = (
        "all-gather of updated weights after each step (publish): as the INT8 values that "
        "changed, lossless"
    )
    assert f"{changes}, over world" in config.notes
    assert resolve(scheme="zero++").resident_spec is None


@pytest.mark.parametrize(("change", "message"), OBSTACLES)
def test_codes_that_the_user_asked_for_are_refused_next_to_what_they_cannot_do(
    change: dict[str, Any], message: str
) -> None:
    """With the value, the reason and the way out, never without codes in silence."""
    block = {**CODED, **change, "quantize": {**RESIDENT, **change.get("quantize", {})}}
    with pytest.raises(
        ValueError, match='quantize.resident = "int8" does not go with ' + re.escape(message)
    ):
        resolve(**block)
    resolve(**block | {"quantize": {**block["quantize"], "resident": None}})


@pytest.mark.parametrize(("change", "message"), OBSTACLES)
def test_codes_that_only_the_scheme_asks_for_give_way_and_a_note_says_why(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's key never fails for a default that he did not write."""
    scheme = {**SCHEMES["topo"], "quantize": {**RESIDENT, "secondary": "int8"}}
    monkeypatch.setattr("zero_topo.config.resolve.SCHEMES", {"topo": scheme})
    assert resolve(scheme="topo").resident_spec == BlockSpec("int8")
    config = resolve(scheme="topo", **change)
    assert config.resident_spec is None
    reported = message.partition(":")[0]
    assert [reported in note for note in config.notes].count(True) == 1


def test_a_config_names_all_its_kinds_of_blocks() -> None:
    """For the choice of kernels: of weights, gradients, what crosses nodes and what is
    published.
    """
    block: dict[str, Any] = {
        "scheme": "topo",
        "quantize": {"gradients": "nf4"},
        "sync": {"mode": "quantized"},
    }
    assert resolve(**block).kinds == {"int8", "nf4"}
    plain = {"weights": None, "secondary": None, "gradients": None}
    published = {**plain, "publish": "int4"}
    assert resolve(scheme="topo", quantize=published).kinds == {"int4"}
    assert resolve(scheme="topo", quantize=plain).kinds == set()
