# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Leaves while an asynchronous checkpoint, an executor and a thread still write to a folder."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import zero_topo


class SlowWriter(dcp.FileSystemWriter):
    """Writes after the script's last line."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write, after a second."""
        time.sleep(1)
        return super().write_data(plan, planner)


def main(folder: Path) -> None:
    """Start all that writes, and leave."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def write(name: str) -> None:
        time.sleep(1 + rank)
        (folder / f"{name}{rank}").touch()

    state = {f"weight {rank}": torch.full((1000,), float(rank)), "step": 3}
    dcp.async_save(state, storage_writer=SlowWriter(folder / "checkpoint"))
    ThreadPoolExecutor(1).submit(write, "pool")
    threading.Thread(target=write, args=("thread",)).start()
    zero_topo.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
