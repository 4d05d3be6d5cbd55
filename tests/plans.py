# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Plans for the tests that only calculate, and the files and answers of commands that plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.commands import Run
from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.network import rates_of
from zero_topo.topology import Topology
from zero_topo.topology.rates import Rates

TREE = Topology("tree", nodes=2, gpus_per_node=2, ranks_per_gpu=2)


def resolve(topology: Topology = TREE, **block: Any) -> ResolvedConfig:
    """The plan of a block with these keys."""
    return resolve_config(ZeroTopoConfig.parse(block), topology)


def config_file(folder: Path, block: Any, name: str = "ds.json", **keys: Any) -> str:
    """The path of a DeepSpeed config of stage 3 in BF16 with this block and these keys."""
    stated = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    (folder / name).write_text(json.dumps({**stated, "zero_topo": block, **keys}))
    return str(folder / name)


def printed(run: Run, *words: str) -> Any:
    """What a command that succeeds in silence prints as JSON."""
    status, out, err = run(*words, "--json")
    assert (status, err) == (0, ""), err
    return json.loads(out)


def rates_on(topology: Topology) -> Rates:
    """The rates of a rank of a preset."""
    rates = rates_of(topology)
    assert rates is not None
    return rates
