# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sparse sync over MPI: the same bits and the same bytes as over torch, under a real mpirun."""

from __future__ import annotations

import importlib.util
import shutil
import sys

import pytest

from tests.launching import ROOT, free_port, output, rank_environment
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.topology.presets import emulated

pytestmark = pytest.mark.long
PROGRAM = ROOT / "tests/e2e/programs/mpi_peers.py"


def missing() -> str | None:
    """What this machine lacks for MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None if shutil.which("mpirun") else "mpirun is not installed"


@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
@pytest.mark.parametrize("ranks", [4, 2])
def test_mpi_carries_the_same_bits(ranks: int) -> None:
    """Ok-Topk, plain and sharded, several steps, thresholds exact and reused."""
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "--mca",
        "btl",
        "self,vader,tcp",
        "-n",
        str(ranks),
    ]
    command += [sys.executable, str(PROGRAM), str(free_port())]
    assert "SAME" in output(
        command, env=rank_environment(OMPI_MCA_rmaps_base_oversubscribe="1"), timeout=240
    )


def test_mpi_without_mpi4py_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, with the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = ZeroTopoConfig.parse({"sync": {"mode": "oktopk", "transport": "mpi"}})
    with pytest.raises(ValueError, match="mpi4py is not installed; pip install mpi4py"):
        resolve_config(config, emulated(2, 2, 2))
