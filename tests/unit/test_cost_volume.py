# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The volume formulas against the paper's printed numbers; ``tests/ranks/test_step_bytes.py`` holds
them equal to what ranks send.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import pytest

from tests.paper import paper_volume_table
from tests.plans import resolve
from zero_topo.config import ResolvedConfig
from zero_topo.config.sparse_config import SparseSync
from zero_topo.config.sync_config import SyncSettings
from zero_topo.cost.volume import (
    Workload,
    change_bytes,
    gather_spec,
    largest_change_bytes,
    step_bytes,
)
from zero_topo.plan import Phase
from zero_topo.quant.spec import BlockSpec
from zero_topo.topology.model import Topology

FRONTIER = Topology("frontier", nodes=48, gpus_per_node=4, ranks_per_gpu=2)


# -- by hand ---------------------------------------------------------------------------------------


def test_the_expected_bytes_of_changes() -> None:
    """0.7 bits a weight at a learning rate of 1e-4 and weights of .01; 8.2 if all blocks are sent
    whole.
    """
    spec, numel = BlockSpec("int8"), 256 * 10**6
    assert 0.63 < 8 * change_bytes(1, [numel], spec) / numel < 0.7
    assert 8 * largest_change_bytes(1, [numel], spec) <= 8.2 * numel


@pytest.mark.parametrize("base", [SyncSettings, SparseSync])
def test_a_mode_without_a_formula_is_an_error_not_a_zero(base: type[SyncSettings]) -> None:
    """When a config selects it: neither bytes nor memory are those of another mode."""

    class Odd(base):  # type: ignore[misc, valid-type]
        mode: Literal["odd"] = "odd"

    with pytest.raises(TypeError, match=r"abstract class Odd .*(volume|peer_bytes)"):
        Odd.model_validate({"mode": "odd"})


# -- the paper -------------------------------------------------------------------------------------


def table_units(config: ResolvedConfig) -> dict[tuple[str, str], Fraction]:
    """Volumes of a large model in messages of 2 psi bytes: with no padding, and scales taken
    off.
    """
    block, n = 2**15, config.plan.world_size
    specs = {
        "gather_forward": config.weights_spec,
        "gather_backward": gather_spec(config, "gather_backward"),
        "scatter": config.gradients_spec,
    }
    bits = {
        phase: Fraction(block * spec.bits, 8 * spec.nbytes(block))
        for phase, spec in specs.items()
        if spec
    }
    sent = step_bytes(config, Workload.uniform([n * block]))
    return {
        key: Fraction(nbytes, 2 * n * block) * bits.get(key[0], 1) for key, nbytes in sent.items()
    }


@pytest.mark.parametrize(
    ("row", "block"),
    [
        ("ZeRO-3", {"scheme": "zero3"}),
        ("ZeRO++", {"scheme": "zero++", "quantize": {"secondary": "int8"}}),
        ("ZeRO-topo sec 8", {"scheme": "paper", "secondary": "node"}),
        ("ZeRO-topo sec 2", {"scheme": "paper"}),
    ],
)
def test_our_plans_are_the_rows_of_table_vii(row: str, block: dict[str, Any]) -> None:
    phases: tuple[Phase, ...] = ("gather_forward", "gather_backward", "scatter")
    config = resolve(FRONTIER, **block)
    if "topo" not in row:
        # In the table they send directly between all ranks.
        config = replace(config, plan=replace(config.plan, inner=None))
    table = paper_volume_table(nodes=48, ranks_per_node=8)[row]
    ours = {key: volume for key, volume in table_units(config).items() if key[0] in phases}
    assert ours == {(term.phase, term.domain): term.volume for term in table}
    assert [config.plan.pair_of(phase)[1] for phase in phases] == [term.degree for term in table]
