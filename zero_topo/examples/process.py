# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Manners of one process among many on a machine: who speaks, how many threads it takes, how it leaves."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist


def behave() -> None:
    """Let rank 0 alone print, without DeepSpeed's small talk, and share the machine's cores among its ranks."""
    if int(os.environ.get("RANK", "0")):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process; errors still reach stderr)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*torch.distributed.*is deprecated", FutureWarning)  # DeepSpeed 0.19.8 calls it
    if "OMP_NUM_THREADS" not in os.environ:
        neighbours = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))


def leave() -> None:
    """End this process, after all ranks have come here.

    Not by Python's own shutdown: a thread of gloo may still be letting go of the last collective's tensors, and torch
    2.13 aborts a process whose Python ends under it (about one launch in thirty, on a busy machine). DeepSpeed's CPU
    collectives would leave 66 MB of shared memory for ever; this rank's are removed here.
    """
    dist.barrier()
    own = Path("/dev/shm", shared_memory(os.environ, os.getuid(), dist.get_rank()))
    dist.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():  # else mpirun takes it for a crash
        mpi.Finalize()
    own.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def shared_memory(env: Mapping[str, str], user: int, rank: int) -> str:
    """The name of the buffer of one rank in DeepSpeed's CPU collectives (its csrc/cpu/comm/shm.cpp)."""
    return f"deepspeed_allreduce_buffer_{user}_{env.get('MASTER_ADDR', '')}_{env.get('MASTER_PORT', '')}_{rank}"
