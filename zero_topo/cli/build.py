# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo build``: compile now, for all nodes that share the cache, what ranks would compile at
first use.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated

import typer

from zero_topo.strict import words_of

MISSING = 1


def build(
    arch: Annotated[
        str,
        typer.Option(
            metavar="sm_90|gfx90a",
            help="GPU architectures, comma-separated; default: those of this machine's GPUs, else "
            "all.",
        ),
    ] = "",
) -> None:
    """Compile the kernels before a job starts. Exit status 1 if a required one does not compile."""
    import torch

    from zero_topo.op_builder.builder import CPUBuilder, GPUBuilder
    from zero_topo.op_builder.jit import BuildError

    names = [architecture(word, torch.version.hip is not None) for word in words_of(arch)]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    needed = 0
    for builder in (CPUBuilder(), *([GPUBuilder((name,)) for name in names] or [GPUBuilder()])):
        try:
            print(f"{builder.name}: {builder.build()}")
        except BuildError as error:
            print(f"{builder.name}: not here: {error}")
            needed += bool(names) or isinstance(builder, CPUBuilder)
    if needed:
        raise typer.Exit(MISSING)


def architecture(word: str, rocm: bool) -> str:
    """A GPU architecture as torch's builds name it: "9.0" for sm_90, gfx90a for itself.

    Raises:
        ValueError: if it is none, or this torch is for other GPUs.
    """
    found = re.fullmatch(r"gfx[0-9a-f]+" if rocm else r"sm_(\d+)(\d)", word)
    if found is None:
        wanted = "AMD GPUs: names such as gfx90a" if rocm else "NVIDIA GPUs: names such as sm_90"
        raise ValueError(f"--arch {word}: this torch compiles for {wanted}")
    return word if rocm else f"{found[1]}.{found[2]}"
