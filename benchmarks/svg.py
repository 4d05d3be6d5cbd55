# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes the pictures of README and docs as SVG, in one style that follows the theme, light or
dark.

A picture is a column of panels. It is narrow, so that its letters can be read on a telephone. A
browser applies the reader's ``prefers-color-scheme``, or the ``color-scheme`` of the element that
shows the picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH = 600
MARGIN = 16
LABELS = 144
"""Width of the column of labels."""
VALUES = 92
"""Width of the column of values."""
ROW = 22
BAR = 13
LETTER = 6.6
"""Mean width of a letter of the smaller size, for the places of a legend."""
PLOT = 170
"""Height of a panel of lines."""
LIGHT = {
    "paper": "#ffffff",
    "ink": "#222222",
    "grey": "#5f6b7a",
    "line": "#d9dfe6",
    "s0": "#2f6db5",
    "s1": "#c9741c",
    "s2": "#3f9c55",
    "s3": "#b3476b",
    "s4": "#7a5fb0",
    "s5": "#7fb0e0",
    "s6": "#8a94a3",
}
DARK = {
    "paper": "#1e2129",
    "ink": "#e6e9ef",
    "grey": "#a3adbb",
    "line": "#3f4754",
    "s0": "#6ea8f7",
    "s1": "#f0a85c",
    "s2": "#6fc985",
    "s3": "#e987a8",
    "s4": "#ab98ea",
    "s5": "#b7d2f2",
    "s6": "#7d8797",
}


@dataclass(frozen=True)
class Bar:
    """A row of a panel of bars.

    Attributes:
        label: at its left.
        parts: ``(value, series)`` laid one after the other.
        text: at its right.
        low, high: ends of a thin line over the bar, if both are given.
    """

    label: str
    parts: Sequence[tuple[float, int]]
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A line of a panel: its name, its number of a series, its points, and whether it is dashed."""

    name: str
    series: int
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass
class Picture:
    """A picture that grows downwards.

    Attributes:
        title: what it shows, for readers that do not see it.
        parts: elements written so far.
        y: where the next panel begins.
    """

    title: str
    parts: list[str] = field(default_factory=list)
    y: float = MARGIN

    def svg(self) -> str:
        """Return the file's text."""
        height = round(self.y + MARGIN / 2)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" '
            f'height="{height}" role="img">'
        )
        title = f"<title>{escape(self.title)}</title>"
        paper = f'<rect width="{WIDTH}" height="{height}" rx="6" class="paper"/>'
        return "\n".join([head, title, _style(), paper, *self.parts, "</svg>", ""])

    def heading(self, text: str, note: str = "") -> None:
        """Write a panel's heading, and a smaller line under it."""
        self.y += 14
        self._text(MARGIN, self.y, text, "ink bold")
        if note:
            self.y += 17
            self._text(MARGIN, self.y, note, "grey small")
        self.y += 10

    def bars(self, rows: Sequence[Bar]) -> None:
        """Draw a panel of bars with one scale."""
        most = max(max(sum(value for value, _ in row.parts), row.high or 0.0) for row in rows)
        room = WIDTH - 2 * MARGIN - LABELS - VALUES
        left = MARGIN + LABELS
        for row in rows:
            middle = self.y + ROW / 2
            self._text(left - 8, middle + 4, row.label, "ink", "end")
            start = float(left)
            for value, series in row.parts:
                width = value / most * room
                self._rect(start, middle - BAR / 2, width, f"s{series}")
                start += width
            if row.low is not None and row.high is not None:
                self._whisker(left + row.low / most * room, left + row.high / most * room, middle)
                start = max(start, left + row.high / most * room)
            self._text(start + 6, middle + 4, row.text, "grey")
            self.y += ROW
        self.y += 8

    def lines(self, lines: Sequence[Line], below: str, form: str, zero: bool = False) -> None:
        """Draw a panel of lines; ``form`` formats the numbers at its left, ``below`` is under it.

        Args:
            lines: with one scale each way.
            below: what the horizontal scale counts.
            form: of the numbers of the vertical scale, such as "{:.1f}".
            zero: whether to draw a stronger line at 0.
        """
        xs = [x for line in lines for x, _ in line.points]
        ys = [y for line in lines for _, y in line.points]
        left = MARGIN + 44
        right = WIDTH - MARGIN - 8
        self.y += 8
        top = self.y
        bottom = self.y + PLOT
        low = min(ys)
        high = max(ys)

        def place(x: float, y: float) -> tuple[float, float]:
            across = left + (x - min(xs)) / (max(xs) - min(xs)) * (right - left)
            return across, bottom - (y - low) / (high - low) * (bottom - top)

        for tick in _ticks(low, high):
            level = place(min(xs), tick)[1]
            kind = "axis" if zero and tick == 0 else "rule"
            self.parts.append(f'<path d="M{left} {level:.1f}H{right}" class="{kind}"/>')
            self._text(left - 6, level + 4, form.format(tick), "grey small", "end")
        for tick in _ticks(min(xs), max(xs)):
            self._text(place(tick, low)[0], bottom + 16, f"{tick:,.0f}", "grey small", "middle")
        for line in lines:
            points = " ".join(
                f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points)
            )
            dashes = ' stroke-dasharray="5 3"' if line.dashed else ""
            self.parts.append(f'<polyline points="{points}" class="curve l{line.series}"{dashes}/>')
        self.y = bottom + 32
        self._text((left + right) / 2, self.y, below, "grey small", "middle")
        self.y += 8
        self.legend([(line.name, line.series) for line in lines])

    def legend(self, entries: Iterable[tuple[str, int]]) -> None:
        """Write the names of series, in as many rows as they need."""
        x = float(MARGIN)
        self.y = self.y + 12
        for name, series in entries:
            width = 22 + LETTER * len(name)
            if x > MARGIN and x + width > WIDTH - MARGIN:
                x = float(MARGIN)
                self.y = self.y + 18
            self._rect(x, self.y - 9, 12, f"s{series}", 10)
            self._text(x + 17, self.y, name, "ink small")
            x += width + 10
        self.y += 14

    def note(self, text: str) -> None:
        """Write a small line."""
        self.y += 8
        self._text(MARGIN, self.y, text, "grey small")
        self.y += 10

    def _text(self, x: float, y: float, text: str, kind: str, anchor: str = "start") -> None:
        how = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{how}>{escape(text)}</text>'
        )

    def _rect(self, x: float, y: float, width: float, kind: str, height: float = BAR) -> None:
        if width > 0:
            self.parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" '
                f'class="{kind}"/>'
            )

    def _whisker(self, low: float, high: float, y: float) -> None:
        ends = "".join(f"M{x:.1f} {y - 3:.1f}V{y + 3:.1f}" for x in (low, high))
        self.parts.append(f'<path d="M{low:.1f} {y:.1f}H{high:.1f}{ends}" class="whisker"/>')


def _style() -> str:
    def rules(colours: dict[str, str]) -> str:
        fills = "".join(
            f".{name}{{fill:{colour}}}" for name, colour in colours.items() if name != "line"
        )
        strokes = "".join(
            f".l{name[1:]}{{stroke:{colours[name]}}}" for name in colours if name[1:].isdecimal()
        )
        lines = {"rule": "line", "axis": "grey", "whisker": "ink"}
        drawn = "".join(f".{name}{{stroke:{colours[of]}}}" for name, of in lines.items())
        return fills + strokes + drawn

    fixed = (
        "text{font-family:system-ui,sans-serif;font-size:14px}.small{font-size:12.5px}.bold{font-weight:600}"
        "path,polyline{fill:none}.curve{stroke-width:1.6}"
    )
    return f"<style>{fixed}{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}</style>"


def _ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers from ``low`` to ``high``."""
    distance = high - low
    scale = 10.0
    while scale > distance:
        scale /= 10
    while scale * 10 <= distance:
        scale *= 10
    steps = (scale / 10, scale / 5, scale / 2, scale, 2 * scale, 5 * scale)
    step = next(step for step in steps if distance / step <= 6)
    first = -(-low // step)
    found = [
        round((first + index) * step, 9)
        for index in range(8)
        if (first + index) * step <= high + 1e-9
    ]
    assert all(b > a for a, b in pairwise(found))
    return found
