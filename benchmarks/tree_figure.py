# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws the machine as a tree with what each rank holds, as SVG; the README's picture is

    python -m benchmarks.tree_figure docs/tree.svg

Each bar is the whole model cut into one world shard per rank; filled pieces are what the rank above it holds. What is
filled comes from the plan's own index arithmetic, so the picture cannot disagree with the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from zero_topo.config import ROLES, ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.topology.presets import emulated

COLOURS = {"weights": "#2f6db5", "secondary": "#7fb0e0", "gradients": "#d9822b", "optimizer": "#3f9c55"}
INK, GREY, EMPTY = "#222222", "#666666", "#d9dfe6"
DOMAIN_FILL = {"world": "#f7f8fa", "node": "#ffffff", "gpu": "#f1f5fb"}
LEFT, CELL, BAR, GAP, ROW = 112, 10, 15, 14, 24
TITLE = 20  # height of a box's name
TOP = 90  # where the first bars begin


@dataclass(frozen=True)
class Box:
    """A rectangle, in pixels."""

    x: float
    y: float
    width: float
    height: float

    def draw(self, fill: str, stroke: str = "none", radius: float = 0) -> str:
        """As an SVG element."""
        place = f'x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}"'
        return f'<rect {place} rx="{radius:g}" fill="{fill}" stroke="{stroke}"/>'


def tree_svg(config: ResolvedConfig) -> str:
    """The picture of a plan on its machine, readable for up to 16 ranks.

    Args:
        config: from ``resolve_config``; ranks are drawn in tree order.
    """
    width = _span(config, 0, config.plan.world_size)[1] + 3 * GAP
    height = TOP + ROW * len(ROLES) + 142
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">'
    parts = [Box(0, 0, width, height).draw("#ffffff")]
    parts += [*_domains(config), *_bars(config), *_collectives(config)]
    return "\n".join([head, *parts, "</svg>", ""])


def _bar_width(config: ResolvedConfig) -> float:
    return CELL * config.plan.world_size


def _x(config: ResolvedConfig, position: int) -> float:
    """Left edge of the bars of a tree position: a gap between ranks, a wider one between GPUs and between nodes."""
    tree = config.topology
    edges = position // tree.degree("gpu") + position // tree.degree("node")
    return LEFT + 2 * GAP + position * (_bar_width(config) + GAP) + edges * 1.5 * GAP


def _span(config: ResolvedConfig, first: int, degree: int) -> tuple[float, float]:
    """Left and right edge of the bars of ``degree`` tree positions from ``first`` on."""
    return _x(config, first), _x(config, first + degree - 1) + _bar_width(config)


def _text(x: float, y: float, text: str, size: int = 12, style: str = f'fill="{INK}"') -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {style}>{escape(text)}</text>'


def _domains(config: ResolvedConfig) -> Iterator[str]:
    """Nested boxes of the world, the nodes and the GPUs, and the ranks' names."""
    bottom = TOP + ROW * len(ROLES)
    for level, inset, domain in ((3, 2 * GAP, "world"), (2, GAP, "node"), (1, GAP / 2, "gpu")):
        degree = config.topology.degree(domain)
        for first in range(0, config.plan.world_size, degree):
            left, right = _span(config, first, degree)
            top = TOP - 20 - level * TITLE
            box = Box(left - inset, top, right - left + 2 * inset, bottom - top + inset / 2)
            yield box.draw(DOMAIN_FILL[domain], "#b8c0cc", 6)
            name = domain if domain == "world" else f"{domain} {first // degree}"
            yield _text(left - inset + 6, top + 14, name, 11, f'fill="{GREY}"')
    for position in range(config.plan.world_size):
        rank = config.plan.rank_at[position]
        yield _text(_x(config, position), TOP - 6, f"rank {rank}", 11, f'fill="{INK}" font-weight="bold"')


def _bars(config: ResolvedConfig) -> Iterator[str]:
    """For each role and rank the model as a bar, with what the rank holds filled."""
    plan = config.plan
    for row, (role, degree) in enumerate(plan.degrees().items()):
        y = TOP + row * ROW + 4
        yield _text(6, y + BAR - 3, role, 12, f'fill="{COLOURS[role]}" font-weight="bold"')
        yield _text(6 + LEFT - 34, y + BAR - 3, "-" if degree is None else f"1/{degree}", 11, f'fill="{GREY}"')
        for rank in range(plan.world_size if degree else 0):
            held = {plan.position(shard) for shard in plan.rows(rank, degree or 1)}
            for piece in range(plan.world_size):
                box = Box(_x(config, plan.position(rank)) + piece * CELL, y, CELL - 1, BAR)
                yield box.draw(COLOURS[role] if piece in held else EMPTY)


def _collectives(config: ResolvedConfig) -> Iterator[str]:
    """Under the tree: a bracket over the ranks each collective spans, and what travels there."""
    plan = config.plan
    y = TOP + ROW * len(ROLES) + 34
    rows = [
        (plan.weights, "gather", f"{_bits(config.weights_spec)}, before each forward and backward", "weights"),
        (plan.gradients, "scatter", f"{_bits(config.gradients_spec)}, during each backward", "gradients"),
        (plan.world_size, "sync", "16 bits, once per optimizer step; publish brings the weights back", "optimizer"),
    ]
    for degree, name, what, role in rows:
        for first in range(0, plan.world_size, degree):
            left, right = _span(config, first, degree)
            corner = f"M {left:g} {y - 6:g} V {y:g} H {right:g} V {y - 6:g}"
            yield f'<path d="{corner}" fill="none" stroke="{COLOURS[role]}" stroke-width="2"/>'
        yield _text(6, y + 4, name, 12, f'fill="{COLOURS[role]}" font-weight="bold"')
        yield _text(_span(config, 0, 1)[0], y + 17, what, 12)
        y += 38


def _bits(spec: object) -> str:
    return "16 bits" if spec is None else f"INT{getattr(spec, 'bits', '')}"


def readme_config() -> ResolvedConfig:
    """The scheme ``topo`` on 2 nodes x 2 GPUs x 2 dies, as in ``configs/demo.json``."""
    return resolve_config(ZeroTopoConfig.parse({"scheme": "topo"}), emulated(2, 2, 2))


def main(arguments: list[str]) -> None:
    """Write the README's picture to the file named.

    Raises:
        SystemExit: unless exactly one file is named.
    """
    if len(arguments) != 1:
        raise SystemExit("usage: python -m benchmarks.tree_figure FILE.svg")
    Path(arguments[0]).write_text(tree_svg(readme_config()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
