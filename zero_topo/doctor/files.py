# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks the space in ``/dev/shm``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from zero_topo.doctor.finding import OK, WARN, Finding
from zero_topo.units import MB, format_bytes

ENOUGH = 512 * MB


def shared_memory(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the space in ``/dev/shm``.

    Args:
        root: the directory that holds ``dev/shm``.
    """
    folder = root / "dev" / "shm"
    if not folder.is_dir():
        fix = "mount a tmpfs there (in a container: --shm-size=8g)"
        yield Finding(
            WARN, "/dev/shm", "is not there; NCCL and DeepSpeed's CPU all-reduce need it", fix
        )
        return
    free = shutil.disk_usage(folder).free
    if free < ENOUGH:
        text = (
            f"{format_bytes(free)} free; NCCL and DeepSpeed's CPU all-reduce keep their buffers "
            "there"
        )
        yield Finding(
            WARN,
            "/dev/shm",
            text,
            "remove deepspeed_allreduce_buffer_* of runs that crashed, or start the container with "
            "--shm-size=8g",
        )
    else:
        yield Finding(OK, "/dev/shm", f"{format_bytes(free)} free")
