# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Files of results: each kind has a mark near its beginning, and only an older result of its kind
is written over.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = 4096  # bytes, among which a file's mark is
PLANS = "zero_topo plans"


def write_png(figure: Figure, path: Path, mark: str, dpi: float | str = 120) -> None:
    """Write a picture with its mark, which PNG puts before the pixels."""
    # figures without a layout of their own have labels outside their axes
    tight = "tight" if figure.get_layout_engine() is None else None
    figure.savefig(path, dpi=dpi, bbox_inches=tight, metadata={"Creator": mark})


def check_files(
    files: Iterable[tuple[Path | None, str, str | None]], force: bool | None = None
) -> None:
    """Refuse names of results, before anything is computed.

    Args:
        files: name, or None, with the ending it must have, and the mark that results of its kind
            have near their beginning; None where an older result looks like a file that the user
            wrote.
        force: write over any file; None if the command has no such option.

    Raises:
        ValueError: for another ending, two results of one name, or a name where something else
            lies.
    """
    taken = set()
    for path, ending, mark in files:
        if path is None:
            continue
        if not path.name.lower().endswith(ending):
            kind = ending.removeprefix(".").upper()
            raise ValueError(
                f"{path}: only {kind} is written here; give the file a name that ends in {ending}"
            )
        if path.resolve() in taken:
            raise ValueError(
                f"{path} would be written twice, the second time over the first; give another name"
            )
        taken.add(path.resolve())
        if (inside := next((above for above in path.parents if above.is_file()), None)) is not None:
            raise ValueError(f"{path} would lie in {inside}, which is a file; name a folder")
        ours = mark is not None and path.is_file() and mark.encode() in _head(path)
        if path.exists() and not force and not ours:
            strange = "" if mark is None else " and is no result of this kind"
            way_out = "" if force is None else ", or --force"
            raise ValueError(f"{path} exists{strange}; give another name{way_out}")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)
