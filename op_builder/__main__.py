# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m zero_topo.op_builder`: compile now what would be compiled at first use, and say what cannot be."""

from __future__ import annotations

import logging
import sys

from zero_topo.op_builder.builder import BUILDERS
from zero_topo.op_builder.jit import BuildError


def main() -> int:
    """Build every op; 0 if the CPU's kernels are there."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    missing = []
    for kind in BUILDERS:
        builder = kind()
        try:
            builder.load()
            print(f"{builder.name}: ready")
        except BuildError as error:
            print(f"{builder.name}: not here: {error}")
            missing.append(builder.name)
    return int("zt_cpu" in missing)


if __name__ == "__main__":
    sys.exit(main())
