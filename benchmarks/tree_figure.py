# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture: python -m benchmarks.tree_figure docs/tree.svg"""

from __future__ import annotations

import sys
from pathlib import Path

from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.observe.tree import tree_svg
from zero_topo.topology.presets import emulated


def readme_svg() -> str:
    """The scheme ``topo`` on 2 nodes x 2 GPUs x 2 GCDs, as in ``configs/demo.json``."""
    config = resolve_config(ZeroTopoConfig.parse({"scheme": "topo"}), emulated(2, 2, 2))
    bits = {
        "weights": str(config.weights_spec),
        "gradients": str(config.gradients_spec),
        "sync": None,
    }
    return tree_svg(config.plan, config.topology, bits)


def main(arguments: list[str]) -> None:
    """Write the README's picture to the file named.

    Raises:
        SystemExit: unless exactly one file is named.
    """
    if len(arguments) != 1:
        raise SystemExit("usage: python -m benchmarks.tree_figure FILE.svg")
    Path(arguments[0]).write_text(readme_svg(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
