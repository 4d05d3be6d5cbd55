# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Collects all inputs of the checks, so that a test can replace any of them by something broken."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_topo.doctor.refusals import torch_state
from zero_topo.topology.presets import machine_of_cluster, preset_names
from zero_topo.topology.probes import slurm
from zero_topo.versions import installed


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class Surroundings:
    """Holds the inputs of the doctor's checks.

    Attributes:
        env: environment variables.
        root: the directory that holds ``dev/shm`` and ``proc``.
        which: path of a program, or None.
        version: version of an installed package, or None.
        free: free bytes of a folder's file system.
        torch: the report on torch and DeepSpeed, see ``probe.py``.
        python: version of this Python.
        machine: the machine's preset, or None to find it from the environment.
        now: seconds since the epoch.
    """

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    which: Callable[[str], str | None] = shutil.which
    version: Callable[[str], str | None] = installed
    free: Callable[[Path], int] = free_bytes
    torch: Callable[[], Mapping[str, Any]] = torch_state
    python: str = platform.python_version()
    machine: str | None = None
    now: float = field(default_factory=time.time)

    def machine_name(self) -> str | None:
        """Return the name of this machine if it is a known one, or None."""
        if self.machine is not None:
            return self.machine
        known = machine_of_cluster(slurm.cluster(self.env))
        if known is not None:
            return known.name
        # Set by the modules of OLCF's machines.
        system = self.env.get("LMOD_SYSTEM_NAME", "").lower()
        return system if system in preset_names() else None
