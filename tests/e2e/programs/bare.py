# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One rank trains, reports and leaves in a Python without the packages of the extras. Usage:
bare.py FOLDER.
"""

from __future__ import annotations

import sys

EXTRAS = ("rich", "typer", "matplotlib")
sys.modules |= dict.fromkeys(EXTRAS)  # type: ignore[arg-type]  # to import one raises ModuleNotFoundError

import zero_topo  # noqa: E402
from tests.e2e.programs import loop  # noqa: E402

if __name__ == "__main__":
    block = {"scheme": "zero3", "report": sys.argv[1]}
    engine = loop.engine(loop.config(zero_optimization={"stage": 3}, zero_topo=block))
    loop.train(engine, 0, 3)
    print(zero_topo.stats(engine))
    zero_topo.leave()
