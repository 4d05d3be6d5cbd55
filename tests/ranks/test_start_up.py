# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a start costs the host of one rank: of a 20B GPT-NeoX on all of Frontier as much as on two
nodes, but for N.
"""

from __future__ import annotations

import cProfile
import time
import tracemalloc
from dataclasses import replace

import pytest
import torch

from benchmarks.bare import bare_engine, matrices
from tests.harness import bound_world
from tests.marks import late
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.cost.job import Job
from zero_topo.cost.transformer import scaled
from zero_topo.engine.agreement import check_agreement
from zero_topo.engine.stage3 import Stage3
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import load_preset
from zero_topo.units import MB
from zero_topo.versions import torch_has

WORLD = 75_264
GROUPS = 65_864
"""Of the two-level groups of ``topo`` at that size; the most of any scheme."""


def machine(size: int) -> Topology:
    """Frontier, without reading the hosts, which are one here."""
    return replace(load_preset("frontier", size), emulated=True)


def start(scheme: str, on: Topology) -> Stage3:
    """Config, agreement, groups, layout and shards (of which nothing is allocated) of a rank in the
    middle.
    """
    numels = Job(scaled(20 * 10**9)).work.numels
    with bound_world(on.world_size, on.world_size // 2 + 3):
        config = resolve_config(ZeroTopoConfig.parse({"scheme": scheme}), on)
        check_agreement(config, torch.device("cpu"))
        return bare_engine(config, matrices(numels), torch.bfloat16, 500_000_000, device="meta")


def calls_of(scheme: str, on: Topology) -> int:
    """Python's calls of a start: seconds of a loaded machine are no measure."""
    profile = cProfile.Profile()
    profile.runcall(start, scheme, on)
    return sum(entry.callcount for entry in profile.getstats())


pytestmark = [
    pytest.mark.skipif(
        not torch_has("torch.distributed.split_group(backend=)", torch.__version__),
        reason="this torch makes groups one by one, and the stand-in for NCCL's world is not for "
        "it",
    ),
    pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl"),
    pytest.mark.usefixtures("reference"),
]


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a device that is not there are not built."""
    monkeypatch.setenv("ZERO_TOPO_QUANT", "reference")


@pytest.mark.long
def test_a_rank_of_75264_starts_in_seconds_and_megabytes() -> None:
    """10 s and 2 GB are promised; it takes about 2 s and 41 MB, most of it lists of ranks."""
    start("topo", machine(16))  # imports are not the engine's
    tracemalloc.start()
    begin = time.monotonic()
    start("topo", replace(machine(WORLD), order=tuple(reversed(range(WORLD)))))
    seconds, (_, peak) = time.monotonic() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 * MB
    assert seconds < 60  # traced, on a loaded machine


@pytest.mark.parametrize("scheme", ["topo", late("zero3")])
def test_a_start_loops_over_ranks_and_groups_a_few_times_only(scheme: str) -> None:
    """Nothing is done for each parameter and rank, which would be 40 million calls."""
    least, most = calls_of(scheme, machine(16)), calls_of(scheme, machine(WORLD))
    assert most - least < 8 * WORLD + 8 * GROUPS
