# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun or mpirun started find their hosts, on one and on two pretended ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import LAUNCHER_PREFIXES
from tests.launching import ROOT, free_port

pytestmark = pytest.mark.long
PROGRAM = [str(ROOT / "tests/e2e/programs/launched.py")]


def clean(**more: str) -> dict[str, str]:
    """This environment without a launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*LAUNCHER_PREFIXES, "MASTER_"))
    }
    here = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    return kept | here | more


def ran(commands: list[list[str]], envs: list[dict[str, str]], folder: Path) -> list[Any]:
    """What each rank wrote, once the programs ended."""
    programs = [
        subprocess.Popen(command, env=env) for command, env in zip(commands, envs, strict=True)
    ]
    try:
        assert [program.wait(120) for program in programs] == [0] * len(programs)
    finally:
        for program in programs:
            program.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def assert_found(seen: list[Any], nodes: int) -> None:
    """All ranks found one tree, in which each is where it runs."""
    assert [rank["topology"] for rank in seen] == [seen[0]["topology"]] * 4
    tree = seen[0]["topology"]
    shape = tree["nodes"], tree["gpus_per_node"], tree["ranks_per_gpu"]
    assert shape == (nodes, 4 // nodes, 1) and "order" not in tree
    assert [rank["place"] for rank in seen] == [
        [rank // (4 // nodes), rank % (4 // nodes), 0] for rank in range(4)
    ]


@pytest.mark.parametrize(("kind", "nodes"), [("c10d", 2), ("standalone", 1), ("static", 2)])
def test_torchruns_ranks_find_their_nodes(kind: str, nodes: int, tmp_path: Path) -> None:
    """One node, or two, each with an agent of its own, and an identity as NCCL reads it."""
    port = str(free_port())
    meeting = {
        "standalone": ["--standalone"],
        "static": ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port],
        "c10d": ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x"],
    }[kind]
    if kind == "c10d":
        meeting += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    commands = []
    for node in range(nodes):
        words = [*meeting, *(["--node-rank", str(node)] if kind == "static" else [])]
        words += ["--nproc-per-node", str(4 // nodes), *PROGRAM, str(tmp_path)]
        commands.append([sys.executable, "-m", "torch.distributed.run", *words])
    envs = [clean(NCCL_HOSTID=f"node {node}") for node in range(nodes)]
    assert_found(ran(commands, envs, tmp_path), nodes)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
@pytest.mark.parametrize("nodes", [2, 1])
def test_mpiruns_ranks_find_their_nodes(nodes: int, tmp_path: Path) -> None:
    """Through the worker, which gives torch its variables."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    for node in range(nodes):
        command += [":"] if node else []
        command += ["-n", str(4 // nodes), "env", f"NCCL_HOSTID=node {node}", sys.executable]
        command += ["-m", "zero_topo.launch.worker", "--", sys.executable, *PROGRAM, str(tmp_path)]
    env = clean(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert_found(ran([command], [env], tmp_path), nodes)
