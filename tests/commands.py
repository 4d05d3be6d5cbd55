# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How tests run a ``zero-topo`` command line in their own process."""

from __future__ import annotations

from collections.abc import Callable

LAUNCHER_PREFIXES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI",
    "GROUP_",
    "CROSS_",
)
Run = Callable[..., tuple[int, str, str]]
"""Words of the command line -> exit status, stdout, stderr."""
