# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Unit tests see no device tools, whatever machine they run on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest

TOOLS = ("amd-smi", "rocm-smi", "nvidia-smi", "lstopo")


@pytest.fixture(autouse=True, scope="session")
def no_device_tools() -> Iterator[None]:
    """Hides the programs and NVML's module; a test that needs one passes its own runner."""
    which = shutil.which
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            shutil, "which", lambda name, *rest, **more: None if name in TOOLS else which(name, *rest, **more)
        )
        patch.setitem(sys.modules, "pynvml", None)
        yield
