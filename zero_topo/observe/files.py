# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Files of results: each kind has a mark near its beginning, and only an older result of its kind
is written over.
"""

from __future__ import annotations

from pathlib import Path

HEAD = 4096  # bytes, among which a file's mark is
PLANS = "zero_topo plans"


def check_file(path: Path | None, ending: str, mark: str | None, force: bool | None = None) -> None:
    """Refuse the name of a result, before anything is computed.

    Args:
        path: the name; None if nothing is written.
        ending: what it must end in.
        mark: what results of its kind have near their beginning; None where an older result looks
            like a file that the user wrote.
        force: write over any file; None if the command has no such option.

    Raises:
        ValueError: for another ending, or a name where something else lies.
    """
    if path is None:
        return
    if not path.name.lower().endswith(ending):
        kind = ending.removeprefix(".").upper()
        raise ValueError(
            f"{path}: only {kind} is written here; give the file a name that ends in {ending}"
        )
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
