# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws the machine as a tree with the shards that each rank stores, as SVG.

Each bar is the whole model, cut into one world shard per rank; the filled shards are those that the
rank above stores. The plan's index arithmetic determines them, so the picture always agrees with
the engine. Of more than 16 ranks only the first 8 are drawn, or whole nodes of them, and a rank's
shards are one part of its bar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from zero_topo.config import ROLES
from zero_topo.observe.plots import ROLE_COLOURS
from zero_topo.plan import Plan
from zero_topo.topology.model import Topology

INK = "#222222"
GREY = "#666666"
EMPTY = "#d9dfe6"
RULE = "#b8c0cc"
DOMAIN_FILL = {"world": "#f7f8fa", "node": "#ffffff", "gpu": "#f1f5fb"}
LEFT = 112
CELL = 6
BAR = 15
GAP = 7
ROW = 24
TITLE = 20  # height of a box's name
TOP = 90  # where the first bars begin
MOST = 16
FIRST = 8  # ranks that are all drawn, and how many of more


def tree_svg(plan: Plan, topology: Topology, wire: Mapping[str, str | None]) -> str:
    """Return the picture of a plan on its machine; ranks are in tree order.

    Args:
        plan: the shards of each rank.
        topology: the machine.
        wire: wire formats of "weights" and "gradients", such as "int8/256", and the mode of "sync";
            None is 16 bits.
    """
    width = max(_extent(topology, 0, topology.world_size)[1] + 3 * GAP, LEFT + 460)
    height = TOP + ROW * len(ROLES) + 142
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif">'
    )
    parts = [_box(0, 0, width, height, "#ffffff")]
    parts += [
        *_domains(plan, topology),
        *_bars(plan, topology),
        *_collectives(plan, topology, wire),
    ]
    return "\n".join([head, *parts, "</svg>", ""])


def _shown(topology: Topology) -> int:
    """Return the number of ranks that are drawn: all, else those of the first whole nodes, else a
    fixed number.
    """
    world = topology.world_size
    node = topology.degree("node")
    return world if world <= MOST else FIRST // node * node or FIRST


def _bar_width(topology: Topology) -> float:
    return CELL * (topology.world_size if topology.world_size <= MOST else FIRST)


def _x(topology: Topology, position: int) -> float:
    """Left edge of the bars of a tree position: a gap between ranks, a wider one between GPUs and
    between nodes.
    """
    edges = sum(position // topology.degree(unit) for unit in ("gpu", "node"))
    return LEFT + 2 * GAP + position * (_bar_width(topology) + GAP) + edges * 1.5 * GAP


def _extent(topology: Topology, first: int, degree: int) -> tuple[float, float]:
    """Left and right edge of the bars of ``degree`` tree positions from ``first`` on, as far as
    they are drawn.
    """
    return _x(topology, first), _x(
        topology, min(first + degree, _shown(topology)) - 1
    ) + _bar_width(topology)


def _box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    stroke: str = "none",
    radius: float = 0,
) -> str:
    """Return a rectangle, in pixels, as an SVG element."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="{radius:g}" fill="{fill}" stroke="{stroke}"/>'


def _text(x: float, y: float, text: str, size: int = 12, style: str = f'fill="{INK}"') -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {style}>{escape(text)}</text>'


def _domains(plan: Plan, topology: Topology) -> Iterator[str]:
    """Nested boxes of the world, the nodes and the GPUs, and the ranks' names."""
    bottom = TOP + ROW * len(ROLES)
    shown = _shown(topology)
    for level, inset, domain in ((3, 2 * GAP, "world"), (2, GAP, "node"), (1, GAP / 2, "gpu")):
        degree = topology.degree(domain)
        for first in range(0, shown, degree):
            left, right = _extent(topology, first, degree)
            top = TOP - 20 - level * TITLE
            size = right - left + 2 * inset, bottom - top + inset / 2
            yield _box(left - inset, top, *size, DOMAIN_FILL[domain], RULE, 6)
            name = f"{domain} {first // degree}" if domain != "world" else _world(topology, shown)
            yield _text(left - inset + 6, top + 14, name, 11, f'fill="{GREY}"')
    for position in range(shown):
        rank = plan.rank_at[position]
        yield _text(
            _x(topology, position), TOP - 6, f"rank {rank}", 11, f'fill="{INK}" font-weight="bold"'
        )


def _bars(plan: Plan, topology: Topology) -> Iterator[str]:
    """For each role and rank the model as a bar, with the shards that the rank stores filled."""
    for row, (role, degree) in enumerate(plan.degrees().items()):
        y = TOP + row * ROW + 4
        yield _text(6, y + BAR - 3, role, 12, f'fill="{ROLE_COLOURS[role]}" font-weight="bold"')
        yield _text(
            6 + LEFT - 34,
            y + BAR - 3,
            "-" if degree is None else f"1/{degree}",
            11,
            f'fill="{GREY}"',
        )
        for rank in plan.rank_at[: _shown(topology)] if degree else ():
            x = _x(topology, plan.position(rank))
            if degree and plan.world_size > MOST:
                width = _bar_width(topology)
                yield _box(x, y, width, BAR, EMPTY)
                left = x + plan.position(rank) % degree * width / degree
                yield _box(left, y, max(1, width / degree), BAR, ROLE_COLOURS[role])
                continue
            stored = {plan.position(shard) for shard in plan.rows(rank, degree or 1)}
            for piece in range(plan.world_size):
                yield _box(
                    x + piece * CELL,
                    y,
                    CELL - 1,
                    BAR,
                    ROLE_COLOURS[role] if piece in stored else EMPTY,
                )


def _collectives(plan: Plan, topology: Topology, wire: Mapping[str, str | None]) -> Iterator[str]:
    """Draw, under the tree, a bracket over the ranks of each collective, with its wire format."""
    y = TOP + ROW * len(ROLES) + 34
    sync = f"{wire['sync'] or '16 bits'}, once per optimizer step; publish brings the weights back"
    rows = [
        (
            plan.weights,
            "gather",
            f"{_bits(wire['weights'])}, before each forward and backward",
            "weights",
        ),
        (
            plan.gradients,
            "scatter",
            f"{_bits(wire['gradients'])}, during each backward",
            "gradients",
        ),
        (plan.world_size, "sync", sync, "optimizer"),
    ]
    for degree, name, what, role in rows:
        for first in range(0, _shown(topology), degree):
            left, right = _extent(topology, first, degree)
            corner = f"M {left:g} {y - 6:g} V {y:g} H {right:g} V {y - 6:g}"
            yield f'<path d="{corner}" fill="none" stroke="{ROLE_COLOURS[role]}" stroke-width="2"/>'
        yield _text(6, y + 4, name, 12, f'fill="{ROLE_COLOURS[role]}" font-weight="bold"')
        yield _text(_x(topology, 0), y + 17, what, 12)
        y += 38


def _world(topology: Topology, shown: int) -> str:
    world = topology.world_size
    return "world" if shown == world else f"world: the first {shown} of {world:,} ranks"


def _bits(wire: str | None) -> str:
    return "16 bits" if wire is None else wire.partition("/")[0].upper()
