# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Node launchers of ``benchmarks faults``, forked of one process, which imports what takes seconds
once for all.

Each line of stdin starts the launcher of one node: JSON of ``folder`` for logs and the launcher's
``status``, ``space`` (file of the node's network namespace), ``ranks`` (variables of the
environment of each) and the training's ``words``. A launcher ends its other ranks when one fails,
as `torchrun` does. All end with this process, which ends with stdin.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.faulty_training import start
from benchmarks.rank_main import die_with, enter_network
from benchmarks.training import prepare


def main() -> None:
    """Start launchers until stdin ends."""
    # Nobody waits for launchers: they write their status
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    prepare()
    gc.collect()
    gc.freeze()
    own = os.getpid()
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            die_with(own)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            launch(json.loads(line))


def launch(node: dict[str, Any]) -> None:
    """The life of a launcher."""
    folder = Path(node["folder"])
    status = 0
    own = os.getpid()
    children: dict[int, int] = {}
    enter_network(node["space"])
    for number, env in enumerate(node["ranks"]):
        pid = os.fork()
        if pid == 0:
            die_with(own)
            become(folder / f"{number}.log", env)
            run(node["words"])
        children[pid] = number
    while children:
        pid, ended = os.wait()
        del children[pid]
        if ended and not status:
            status = 1
            for other in children:
                os.kill(other, signal.SIGTERM)
    (folder / "status").write_text(str(status))
    os._exit(0)


def become(log: Path, env: dict[str, str]) -> None:
    """A rank's log and environment."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env)


def run(words: list[str]) -> None:
    """The rest of a rank's life."""
    try:
        start(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
