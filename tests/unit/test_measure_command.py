# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Before ranks can measure they must meet: what the launcher says becomes what torch reads, or a line says why not."""

from __future__ import annotations

import os

import pytest

from zero_topo.cli import main
from zero_topo.cli.measure import meeting_point
from zero_topo.launch.env import PORT

SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "nid[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_slurms_tasks_meet_on_their_first_host() -> None:
    numbers = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert meeting_point(SLURM) == numbers | {"MASTER_ADDR": "nid1", "MASTER_PORT": str(PORT)}


def test_what_the_launcher_has_set_is_kept() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here"}
    assert meeting_point(env) == env | {"MASTER_PORT": str(PORT)}


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({}, "no launcher's variables are here"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "only 1 rank is here"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR is not set"),
    ],
)
def test_ranks_that_cannot_meet_are_told_why(env: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        meeting_point(env)


def test_measuring_needs_a_job_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``topology --measure`` outside a job, or beside a stated machine, ends with one line."""
    for name in list(os.environ):
        if name.startswith(("WORLD_SIZE", "RANK", "LOCAL_", "SLURM_", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    assert main(["topology", "--measure"]) == 2
    assert "start every rank with it" in capsys.readouterr().err
    assert main(["topology", "--measure", "--from", "frontier"]) == 2
    assert "give one" in capsys.readouterr().err
