# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A rank ends with its status, after what is registered for its end, and leaves nothing of its own
in shared memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.launching import ROOT, ended
from zero_topo.leaving import unlink_shared_memory

ENDING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import zero_topo

def work(seconds, word):
    time.sleep(seconds)
    sys.stdout.write(word + "\\n")
    if word == "thread":
        threading.Thread(target=work, args=(0.2, "its own thread")).start()

atexit.register(print, "at exit")
pool = ThreadPoolExecutor(1)
for number in range(2):
    pool.submit(work, 0.2, f"pool {number}")
threading.Thread(target=work, args=(1, "thread")).start()
threading.Thread(target=work, args=(60, "daemon"), daemon=True).start()
still_open = open(sys.argv[2], "w")
still_open.write("a line that is in the buffer")
print("last line", flush=True)
(zero_topo.leave if sys.argv[1] == "leave" else sys.exit)(3)
"""


def test_leave_ends_a_process_as_python_does(tmp_path: Path) -> None:
    """Threads and executors end first, then what is registered; open files are flushed; the status
    is the caller's. Outside of a job too.
    """
    ends = []
    for how in ("python", "leave"):
        command = [sys.executable, "-c", ENDING, how, str(tmp_path / how)]
        done = ended(command, cwd=ROOT, timeout=120)
        first, *between, last = done.stdout.splitlines()
        ends.append((done.returncode, first, sorted(between), last))
    words = ["its own thread", "pool 0", "pool 1", "thread"]
    assert ends == 2 * [(3, "last line", words, "at exit")]
    assert (tmp_path / "leave").read_text()


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
