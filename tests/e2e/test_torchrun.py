# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun started by each kind of rendezvous know their nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import LAUNCHER_PREFIXES
from tests.launching import ROOT, free_port
from tests.marks import late

RANK = """
import os, sys
import torch.distributed as dist
from zero_topo.topology import resolve_topology
dist.init_process_group("gloo")
found = resolve_topology("auto", os.environ, dist.get_world_size())
places = [None] * dist.get_world_size()
own = dist.get_rank(), os.environ["LOCAL_RANK"], found.nodes, found.ranks_per_node
dist.all_gather_object(places, own)
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(places))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("kind", "nodes"), [("c10d", 2), late("standalone", 1), late("static", 2)])
def test_ranks_meet_and_know_their_nodes(kind: str, nodes: int, tmp_path: Path) -> None:
    """Two ranks: of one node, or of two, each with an agent of its own on this host."""
    (tmp_path / "rank.py").write_text(RANK)
    port = free_port()
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*LAUNCHER_PREFIXES, "MASTER_"))
    }
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    meeting = {
        "standalone": ["--standalone"],
        "static": ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": [
            "--nnodes",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-id",
            "x",
        ],
    }
    agents = []
    for node in range(nodes):
        words = [*meeting[kind], *(["--node-rank", str(node)] if kind == "static" else [])]
        words += [
            "--nproc-per-node",
            str(2 // nodes),
            str(tmp_path / "rank.py"),
            str(tmp_path / "places"),
        ]
        agents.append(
            subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *words], env=env)
        )
    try:
        assert [agent.wait(120) for agent in agents] == [0] * nodes
    finally:
        for agent in agents:
            agent.kill()
    local = [(0, "0"), (1, "1" if nodes == 1 else "0")]
    assert (tmp_path / "places").read_text() == repr(
        [(*place, nodes, 2 // nodes) for place in local]
    )
