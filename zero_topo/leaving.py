# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ends a rank without an abort, and removes files that DeepSpeed's CPU collectives leave in
/dev/shm.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def leave(status: int = 0) -> NoReturn:
    """End this process after a barrier: the last line of a script that trains on CPUs. Collective.

    A thread of gloo may still be releasing the tensors of the last collective. If Python ends at
    that moment, torch aborts the process after the work is done: "terminate called without an
    active exception", status -6. This function runs the functions registered with ``atexit`` and
    ends the process without Python's shutdown.

    Args:
        status: exit status of the process.
    """
    met = dist.is_initialized()
    if met:
        dist.barrier()
    atexit._run_exitfuncs()
    if met:
        unlink_shared_memory(dist.get_rank())
        dist.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")
    # Else mpirun reports a crash
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def unlink_shared_memory(
    rank: int,
    env: Mapping[str, str] = os.environ,
    folder: Path = Path("/dev/shm"),
) -> None:
    """Unlink this rank's shared-memory buffer of DeepSpeed's CPU collectives (its
    csrc/cpu/comm/shm.cpp), 66 MB.

    DeepSpeed never unlinks it. Ranks that have mapped the buffer keep it until they end, so it may
    be unlinked once all ranks have opened it: after any collective that follows
    ``init_distributed``.

    Args:
        rank: the rank of this process.
        env: the launcher's environment.
        folder: the system's shared-memory folder.
    """
    job = f"{os.getuid()}_{env.get('MASTER_ADDR', '')}_{env.get('MASTER_PORT', '')}"
    (folder / f"deepspeed_allreduce_buffer_{job}_{rank}").unlink(missing_ok=True)
