# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture: python -m benchmarks.tree_figure docs/tree.svg"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.svg import DARK
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.observe.plots import ROLE_COLOURS
from zero_topo.observe.tree import DOMAIN_FILL, EMPTY, GREY, INK, RULE, tree_svg
from zero_topo.topology.presets import emulated

IN_DARK = {
    INK: DARK["ink"],
    GREY: DARK["grey"],
    RULE: DARK["line"],
    EMPTY: DARK["line"],
    DOMAIN_FILL["world"]: "#232730",
    DOMAIN_FILL["node"]: DARK["paper"],
    DOMAIN_FILL["gpu"]: "#262d3a",
    ROLE_COLOURS["weights"]: DARK["s0"],
    ROLE_COLOURS["secondary"]: DARK["s5"],
    ROLE_COLOURS["gradients"]: DARK["s1"],
    ROLE_COLOURS["optimizer"]: DARK["s2"],
}
"""Of each colour of the picture, the one that a dark page has."""


def readme_svg() -> str:
    """The scheme ``topo`` on 2 nodes x 2 GPUs x 2 GCDs, as in ``configs/demo.json``."""
    config = resolve_config(ZeroTopoConfig.parse({"scheme": "topo"}), emulated(2, 2, 2))
    bits = {
        "weights": str(config.weights_spec),
        "gradients": str(config.gradients_spec),
        "sync": None,
    }
    head, rest = tree_svg(config.plan, config.topology, bits).split("\n", 1)
    return "\n".join([head, _in_dark(), rest])


def _in_dark() -> str:
    """Return the style of a dark theme: a rule for each fill and stroke of a light one."""
    rules = []
    for light, dark in IN_DARK.items():
        rules += [f'[{part}="{light}"]{{{part}:{dark}}}' for part in ("fill", "stroke")]
    return f"<style>@media(prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


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
