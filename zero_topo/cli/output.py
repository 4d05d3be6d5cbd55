# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What commands print: nothing that a terminal would obey, and where ``--json`` is given the JSON
and nothing else.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import Any, TextIO, cast

from pydantic_core import to_jsonable_python

from zero_topo.strict import plain

_DOCUMENTS: ContextVar[TextIO | None] = ContextVar("documents", default=None)
STDOUT = 1
STDERR = 2


class _Plain:
    """A stream that writes control characters as escapes, for names come from files and from other
    people.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = (
            stream  # rich writes there what its consoles, see PlainConsole, have cleaned
        )

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """Writes control characters in what is printed as escapes."""
    out, err = (cast("TextIO", _Plain(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def only_json() -> Iterator[None]:
    """Sends all that is printed to standard error, programs that are started included, but for
    :func:`print_json`.
    """
    with _real_stdout() as documents, redirect_stdout(sys.stderr):
        token = _DOCUMENTS.set(documents)
        try:
            yield
        finally:
            _DOCUMENTS.reset(token)


@contextmanager
def _real_stdout() -> Iterator[TextIO]:
    """Standard output by a descriptor of its own, whose usual number is standard error meanwhile.

    Where ``sys.stdout`` is no descriptor, as in tests, it is that itself.
    """
    sys.stdout.flush()
    try:
        is_usual = sys.stdout.fileno() == STDOUT
    except (io.UnsupportedOperation, AttributeError, ValueError):
        is_usual = False
    if not is_usual:
        yield sys.stdout
        return
    with os.fdopen(os.dup(STDOUT), "w", encoding="utf-8") as documents:
        os.dup2(STDERR, STDOUT)
        try:
            yield documents
        finally:
            os.dup2(documents.fileno(), STDOUT)


def print_notes(notes: Iterable[str]) -> None:
    """Print each note on a line of its own."""
    for note in notes:
        print(f"- {note}")


def print_json(content: Mapping[str, Any]) -> None:
    """Print a JSON object to standard output; dataclasses in it are objects too.

    Raises:
        PydanticSerializationError: for what JSON has no form of.
    """
    print(
        json.dumps(to_jsonable_python(content), indent=2),
        file=_DOCUMENTS.get() or sys.stdout,
        flush=True,
    )
