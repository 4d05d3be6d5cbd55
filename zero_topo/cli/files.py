# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Files that the user names for results: nothing is written over but an older result of the same kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

HEAD = 4096  # bytes, among which a file's mark is

Force = Annotated[bool, typer.Option("--force", help="Overwrite a file even if this command did not write it.")]


def check_files(files: Iterable[tuple[Path | None, str, str | None]], force: bool) -> None:
    """Refuse names of results, before anything is computed.

    Args:
        files: name, or None, with the ending it must have, and the mark that results of its kind have near their
            beginning; None where an older result looks like a file that the user wrote.
        force: write over any file.

    Raises:
        ValueError: for another ending, two results of one name, or a name where something else lies.
    """
    taken = set()
    for path, ending, mark in files:
        if path is None:
            continue
        if not path.name.lower().endswith(ending):
            kind = ending.removeprefix(".").upper()
            raise ValueError(f"{path}: only {kind} is written here; give the file a name that ends in {ending}")
        if path.resolve() in taken:
            raise ValueError(f"{path} would be written twice, the second time over the first; give another name")
        taken.add(path.resolve())
        if (inside := next((above for above in path.parents if above.is_file()), None)) is not None:
            raise ValueError(f"{path} would lie in {inside}, which is a file; name a folder")
        ours = mark is not None and path.is_file() and mark.encode() in _head(path)
        if path.exists() and not force and not ours:
            strange = "" if mark is None else " and is no result of this kind"
            raise ValueError(f"{path} exists{strange}; give another name, or --force")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)
