# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What lies near the beginning of each kind of file that a command writes, by which it knows its own again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMORY, SCALING = (f"zero_topo {kind}" for kind in ("memory", "scaling"))
BENCH, RUN, PAGE = (f"zero_topo {kind}" for kind in ("bench", "run", "report"))


def write_png(figure: Figure, path: Path, mark: str, dpi: float | str = 120) -> None:
    """Write a picture with its mark, which PNG puts before the pixels."""
    # figures without a layout of their own have things beside their axes
    tight = "tight" if figure.get_layout_engine() is None else None
    figure.savefig(path, dpi=dpi, bbox_inches=tight, metadata={"Creator": mark})
