# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""An XPU without a GPU, see ``stand_in.cpp``: :func:`environment` gives it to a process and its
children.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("stand_in.cpp")
TORCH = Path(torch.__file__).parent


def library() -> Path:
    """The compiled library, next to other extensions; half a minute where it is not there yet."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = (
        Path(os.environ.get("TORCH_EXTENSIONS_DIR", ".torch_extensions")) / f"zt_test_xpu_{key}"
    )
    built = folder / "stand_in.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"{os.getpid()}.so"  # renamed when it is whole
        flags = [
            "-O1",
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-w",
            f"-L{TORCH / 'lib'}",
            f"-Wl,-rpath,{TORCH / 'lib'}",
        ]
        headers = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(
            ["g++", *flags, *headers, str(SOURCE), "-o", str(own), *libraries],
            check=True,
            timeout=600,
        )
        own.rename(built)
    return built.resolve()


def environment(devices: int = 1) -> dict[str, str]:
    """Return the variables that give a Python process this number of XPUs, and make tests run on
    them.
    """
    paths = os.pathsep.join(filter(None, [str(SOURCE.parent), os.environ.get("PYTHONPATH")]))
    return {
        "STAND_IN_XPU": str(library()),
        "STAND_IN_XPUS": str(devices),
        "PYTHONPATH": paths,
        "ZERO_TOPO_TEST_DEVICE": "xpu",
        "DS_ACCELERATOR": "xpu",
    }
