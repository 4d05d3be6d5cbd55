# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The scripts of `zero-topo launch flux`, read and run by a real Flux; skipped where none is
installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT
from zero_topo.launch.machines import load_launch_machine, machine_names

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("flux") is None, reason="flux is not installed (no package of Debian 12)"
    ),
]

MACHINES = [
    name for name in machine_names() if load_launch_machine(name).scheduler in (None, "flux")
]


def flux(folder: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as a user of Flux does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    return subprocess.run(
        ["flux", *words],
        input=given,
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def written(folder: Path, machine: str, *words: str) -> Path:
    """The script for a machine, in a file."""
    launch = [sys.executable, "-m", "zero_topo.cli", "launch", "flux", "--machine", machine, *words]
    done = subprocess.run(
        launch, capture_output=True, text=True, cwd=folder, timeout=60, check=True
    )
    file = folder / f"{machine}.flux"
    file.write_text(done.stdout)
    return file


@pytest.mark.parametrize("machine", MACHINES)
def test_flux_reads_every_machines_directives(tmp_path: Path, machine: str) -> None:
    """The jobspec has what the directives say."""
    ranks = load_launch_machine(machine).ranks_per_node or 2
    words = [
        "--nodes",
        "2",
        "--ranks-per-node",
        str(ranks),
        "--account",
        "lab",
        "--partition",
        "q",
        "--time",
        "0:30:00",
    ]
    file = written(tmp_path, machine, *words, "--", "true")
    done = flux(tmp_path, "batch", "--dry-run", str(file))
    assert done.returncode == 0, done.stderr
    spec = json.loads(done.stdout)
    node = spec["resources"][0]
    assert (node["type"], node["count"], node.get("exclusive")) == ("node", 2, True)
    system = spec["attributes"]["system"]
    assert (system["duration"], system["bank"], system["queue"]) == (1800, "lab", "q")


@pytest.mark.parametrize("machine", MACHINES)
def test_every_rank_of_a_flux_job_gets_its_number(tmp_path: Path, machine: str) -> None:
    """Two brokers on this host stand for two nodes: the worker's variables on all ranks."""
    ranks = load_launch_machine(machine).ranks_per_node or 2
    words = [
        "--nodes",
        "2",
        "--ranks-per-node",
        str(ranks),
    ]
    program = (
        "import os; print('found', *(os.environ[name] for name in ('RANK', 'LOCAL_RANK', "
        "'LOCAL_WORLD_SIZE', 'WORLD_SIZE')))"
    )
    file = written(tmp_path, machine, *words, "--", sys.executable, "-c", program)
    run = [
        "start",
        "-s",
        "2",
        "sh",
        "-c",
        f"flux job wait-event $(flux batch --output=job.out {file}) clean; cat job.out",
    ]
    done = flux(tmp_path, *run)
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("found"))
    expected = [f"found {rank} {rank % ranks} {ranks} {2 * ranks}" for rank in range(2 * ranks)]
    assert found == sorted(expected), done.stdout + done.stderr
