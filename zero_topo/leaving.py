# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ends a rank without an abort, and removes files that DeepSpeed's CPU collectives leave in
/dev/shm.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def leave(status: int = 0) -> NoReturn:
    """End this process after a barrier: the last line of a script that trains on CPUs. Collective.

    It first waits, as Python's end does, for threads that are no daemons and for executors: an
    asynchronous checkpoint is whole.

    A thread of gloo may still be releasing the tensors of the last collective. If Python ends at
    that moment, torch aborts the process after the work is done: "terminate called without an
    active exception", status -6. This function therefore ends the process without Python's
    shutdown, after the functions registered with ``atexit``. Files that are still open are flushed.

    Args:
        status: exit status of the process.
    """
    if threading.current_thread() is threading.main_thread():
        # Before the barrier: threads of a checkpoint use the same groups
        threading._shutdown()  # type: ignore[attr-defined]
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
    _flush_files()
    os._exit(status)


def _flush_files() -> None:
    """Flush open files, as Python does when it frees them."""
    for file in gc.get_objects():
        if issubclass(type(file), io.IOBase):
            with suppress(Exception):  # closed, or its reader has gone
                file.flush()


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
