# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A rank ends with its status, after what is registered for its end, and leaves nothing of its own
in shared memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.launching import ROOT
from zero_topo.leaving import unlink_shared_memory


def test_leave_runs_what_is_registered_and_gives_the_status() -> None:
    """As Python's own end does; what is printed arrives. Outside of a job too."""
    program = (
        "import atexit, zero_topo; atexit.register(print, 'at exit'); print('begins'); "
        "zero_topo.leave(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (3, "begins\nat exit\n")


def test_only_this_ranks_buffer_of_this_job_is_removed(tmp_path: Path) -> None:
    names = [
        f"deepspeed_allreduce_buffer_{os.getuid()}_h_{port}_{rank}"
        for port in (1, 12)
        for rank in (0, 1, 10)
    ]
    for name in names:
        (tmp_path / name).touch()
    for _ in range(2):  # it may be gone already
        unlink_shared_memory(1, {"MASTER_ADDR": "h", "MASTER_PORT": "1"}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {names[1]}
