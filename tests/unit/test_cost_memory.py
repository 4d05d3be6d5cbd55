# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The memory formulas: the paper's table, the exact bytes, and what padding adds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.paper import paper_memory_table
from tests.plans import resolve
from zero_topo.config import SCHEMES, ResolvedConfig
from zero_topo.cost.job import Job, deepspeed_settings
from zero_topo.cost.memory import memory_bytes, padding_bytes
from zero_topo.cost.model_files import load_model
from zero_topo.cost.planner import Request
from zero_topo.cost.volume import Workload
from zero_topo.topology.model import Topology

FRONTIER = Topology("frontier", nodes=48, gpus_per_node=4, ranks_per_gpu=2)


def ideal_bytes(config: ResolvedConfig, parameters: int) -> dict[str, Fraction]:
    """Without padding and scales: what a model holds that every degree and block divides, in
    proportion.
    """
    block, spec = 2**15, config.secondary_spec
    whole = config.plan.world_size * block
    stored = {
        role: Fraction(n) for role, n in memory_bytes(config, Workload.uniform([whole]), 2).items()
    }
    stored["secondary"] *= (
        1 if spec is None else Fraction(block * spec.bits, 8 * spec.nbytes(block))
    )
    return {role: nbytes * parameters / whole for role, nbytes in stored.items()}


@pytest.mark.parametrize(
    ("row", "block"),
    [
        ("ZeRO-3", {"scheme": "zero3"}),
        ("ZeRO++", {"scheme": "zero++"}),
        ("ZeRO-topo sec 8", {"scheme": "paper", "secondary": "node"}),
        ("ZeRO-topo sec 2", {"scheme": "topo", "quantize": {"resident": None}}),
    ],
)
def test_our_plans_are_the_rows_of_the_papers_table(row: str, block: dict[str, Any]) -> None:
    assert (
        ideal_bytes(resolve(FRONTIER, **block), 10**9) == paper_memory_table(10**9, nodes=48)[row]
    )


CODES = {"weights": "int8", "gradients": "int4", "resident": "int8"}


def test_what_a_rank_holds_of_codes_by_hand() -> None:
    """N = 8, W = 2, O = 8: codes and scales of the matrix, a vector twice over, and the own rows of
    both in 16 bits.
    """
    config = resolve(weights="gpu", gradients="node", optimizer="world", quantize=CODES)
    work = Workload.uniform([8 * 250, 80], dims=(2, 1))
    codes, own, vector = 4 * 256 + 128, (250 + 10) * 2, 4 * 10 * 2
    stored, padding = memory_bytes(config, work, 2), padding_bytes(config, work, 2)
    assert (stored["weights"], stored["secondary"]) == (codes + own + vector, 0)
    assert padding["weights"] == codes - 1000


@given(
    scheme=st.sampled_from(list(SCHEMES)),
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    nodes=st.integers(1, 3),
)
def test_memory_is_the_ideal_plus_the_padding_that_is_reported(
    scheme: str, numels: list[int], nodes: int
) -> None:
    config = resolve(Topology("t", nodes, 2, 2), scheme=scheme, quantize={"resident": None})
    work = Workload.uniform(numels)
    stored = memory_bytes(config, work, accumulation_itemsize=2)
    padding = padding_bytes(config, work, accumulation_itemsize=2)
    ideal = ideal_bytes(config, sum(numels))
    for role, nbytes in stored.items():
        assert 0 <= nbytes - padding[role] <= ideal[role] < nbytes - padding[role] + 1, role


def test_a_loss_scaler_makes_quantized_sync_keep_a_residual() -> None:
    """FP16 may skip steps, so the residual cannot be stored among the gradients: 4 bytes for each
    other node's row.
    """
    config = resolve(FRONTIER, scheme="topo", sync={"mode": "quantized", "bits": 4})
    job = Job(load_model("gpt2"), 1, 1, **deepspeed_settings({"fp16": {"enabled": True}}))
    request = Request(FRONTIER, job)
    stored = request.price(config).memory
    assert stored["residual"] == 4 * 47 * sum(
        config.plan.shard_numel(n) for n in request.work.numels
    )
    plain = replace(request, job=replace(job, **deepspeed_settings({"bf16": {"enabled": True}})))
    assert plain.price(config).memory == {k: v for k, v in stored.items() if k != "residual"}


def test_parameters_of_two_types_on_the_wire_each_have_a_secondary_copy() -> None:
    """BF16 weights of which some are sent as FP16 take what they take without that."""
    config = resolve(Topology("8", nodes=2, gpus_per_node=2, ranks_per_gpu=2), scheme="zero++")
    work = Workload.uniform([4096, 999, 4096, 70_000])
    mixed = replace(work, lowered=(True, False, False, True))
    assert memory_bytes(config, mixed, 2) == memory_bytes(config, work, 2)
    assert memory_bytes(config, work, 2)["secondary"]
