# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads the project's own sources for the tests that hold it to its rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.launching import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file of the checkout."""

    path: Path

    @cached_property
    def text(self) -> str:
        """The whole file."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def name(self) -> str:
        """Path below the checkout's root, for messages."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__.py` of a package."""
        return self.path.name == "__init__.py"

    @property
    def module(self) -> str:
        """Dotted module name, as `import` takes it."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def lines(self) -> int:
        """Lines in the file."""
        return len(self.text.splitlines())

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        return (node for node in self.nodes if isinstance(node, Function))

    def imports(self) -> set[str]:
        """Absolute names of everything imported anywhere in the file, except under
        `if TYPE_CHECKING:`.

        `from a import b` gives both `a` and `a.b`: only the file system tells whether b is a
        module.
        """
        return {name for node in _at_run_time(self.tree) for name in self._imported(node)}

    def imports_for_types(self) -> set[str]:
        """As `imports`, with those under `if TYPE_CHECKING:` too."""
        return {name for node in self.nodes for name in self._imported(node)}

    def _imported(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self._base(node)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        """The module a `from` import names, relative ones resolved."""
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        package = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*package, *([node.module] if node.module else [])])


def sources(*directories: str) -> list[Source]:
    """Every Python file below the given directories of the checkout, sorted by path."""
    found = (path for name in directories for path in (ROOT / name).rglob("*.py"))
    return [_source(path) for path in sorted(found)]


@cache
def _source(path: Path) -> Source:
    """Read and parsed once for all tests."""
    return Source(path)


def function_lines(function: Function) -> int:
    """Lines from `def` to the end of the body, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters(function: Function) -> list[str]:
    """Names of the parameters a caller can give, without self, cls, *args and **kwargs."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in every if argument.arg not in ("self", "cls")]


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Walks a tree without the bodies of `if TYPE_CHECKING:`."""
    yield node
    children = (
        node.orelse
        if isinstance(node, ast.If) and _is_type_checking(node.test)
        else ast.iter_child_nodes(node)
    )
    for child in children:
        yield from _at_run_time(child)


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "attr", ""), getattr(test, "id", ""))
