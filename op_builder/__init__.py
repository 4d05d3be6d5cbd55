# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Builds zero_topo's native kernels; this file only says where their sources are (`builder.py`
needs torch).

This directory is `op_builder/` in a checkout and `zero_topo.op_builder` when installed. It never
defines a variable named dunder-deepspeed: DeepSpeed imports a top-level `op_builder` that does in
place of its own builders.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["source_dir"]


def source_dir() -> Path:
    """The directory of zero_topo's native sources, absolute.

    `csrc` stands next to `op_builder` wherever the two are: at the top of a checkout (also when
    imported through an editable install) and inside the installed package.

    Raises:
        FileNotFoundError: the sources are not there, so the installation is not whole.
    """
    directory = Path(__file__).resolve().parent.parent / "csrc"
    if not (directory / "zt_wire.h").is_file():
        raise FileNotFoundError(
            f"{directory} has no zt_wire.h: zero_topo is not wholly installed, reinstall it"
        )
    return directory
