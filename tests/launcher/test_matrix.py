# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every feature of ZeRO-3 under every scheme: trains as under stock ZeRO-3, or is refused with its
sentence.
"""

from __future__ import annotations

import json
import os
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.launcher import training
from tests.launcher.features import FEATURES, SCHEMES, expected, verdict
from tests.launcher.training import Job, largest_difference
from tests.matrix import recorded
from tests.suite import CELLS_VARIABLE


@pytest.mark.parametrize(("name", "scheme"), [*product(FEATURES, SCHEMES)])
def test_feature_under_scheme(name: str, scheme: str) -> None:
    """Losses, weights and what the caller sees, unquantized; for the record also losses as the
    scheme comes.

    The record, and with it the documents, says so of this cell.
    """
    path = os.environ.get(CELLS_VARIABLE)
    said = verdict(name, SCHEMES[scheme] if path else SCHEMES[scheme][:1])
    if path is None:
        assert said == recorded()["cells"][name][scheme], "record it anew: python -m tests.matrix"
    elif dist.get_rank() == 0:
        with open(path, "a") as file:
            file.write(json.dumps([name, scheme, said]) + "\n")


@pytest.mark.parametrize("name", [name for name in FEATURES if not FEATURES[name].refused])
def test_one_rank_alone_reads_persistent_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, skipped ones too, they are whole: no collective is left that the other ranks
    would miss.
    """
    config, read, steps = training.ds_config, [], DeepSpeedEngine.step

    def persistent(job: Job) -> dict[str, Any]:
        made = config(job)
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 40
        return made

    def step(engine: Any, *args: Any, **kwargs: Any) -> None:
        boundary = engine.is_gradient_accumulation_boundary()
        steps(engine, *args, **kwargs)
        for param in (
            engine.optimizer.persistent_parameters if boundary and dist.get_rank() == 1 else ()
        ):
            assert param.shape == param.ds_shape
            value = param.detach().float().sum().item()
            read.extend([value] if param.requires_grad else [])

    monkeypatch.setattr(training, "ds_config", persistent)
    monkeypatch.setattr(DeepSpeedEngine, "step", step)
    FEATURES[name].run(SCHEMES["topo"][-1].block | {"debug_checks": False})
    # Features whose persistent parameters are all frozen read the same each time
    assert not read or len(set(read)) > 2


@pytest.mark.core
def test_the_record_knows_every_cell() -> None:
    """And no other; `tests/unit/test_tables.py` holds the documents to it."""
    cells = recorded()["cells"]
    assert list(cells) == list(FEATURES)
    assert all(list(row) == list(SCHEMES) for row in cells.values())


ACTING = [name for name, feature in FEATURES.items() if feature.unlike]


@pytest.mark.parametrize("name", ACTING)
def test_a_feature_that_acts_changes_the_losses(name: str) -> None:
    """By a hundred times what parity allows, else that would say nothing."""
    assert largest_difference(expected(name).losses, expected(FEATURES[name].unlike).losses) > 1e-3
