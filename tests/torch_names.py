# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which names of torch zero_topo uses that the installed torch does not have, by zero_topo's own
sources.

The pinned release of torch is tested wholly; the other supported ones are compared with this list.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zero_topo
from zero_topo.versions import TORCH_SINCE, torch_has


def missing() -> list[str]:
    """Names of torch that are not there, and keywords that its functions do not take.

    Returns:
        Such as ``torch.cuda.no_such_name`` and ``torch.cat(no_such_keyword=)``, sorted; without
        what is not used where torch does not have it yet.
    """
    found: set[str] = set()
    for path in Path(zero_topo.__file__).parent.rglob("*.py"):
        found |= set(_missing_in(ast.parse(path.read_text(encoding="utf-8"))))
    import torch

    return sorted(
        name for name in found if name not in TORCH_SINCE or torch_has(name, torch.__version__)
    )


def private() -> set[str]:
    """Full names of torch with a part that begins with one underscore, as zero_topo uses them."""
    found: set[str] = set()
    for path in Path(zero_topo.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = dict(_imported(tree))
        used = {_dotted(node, names) or "" for node in ast.walk(tree)}
        found |= {name for name in used | set(names.values()) if "._" in name}
    # `a._b` of `a._b.c` is no name of its own.
    longer = {name.rpartition(".")[0] for name in found}
    return {name for name in found - longer if ".__" not in name}


def _missing_in(tree: ast.Module) -> Iterator[str]:
    names = dict(_imported(tree))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(parents.get(node), ast.Attribute) or (name := _dotted(node, names)) is None:
            continue
        try:
            value = _value(name)
        except AttributeError:
            yield name
            continue
        call = parents.get(node)
        keywords = (
            [word.arg for word in call.keywords]
            if isinstance(call, ast.Call) and call.func is node
            else []
        )
        yield from (f"{name}({word}=)" for word in keywords if word and not _takes(value, word))
    for name in names.values():
        try:
            _value(name)
        except AttributeError:
            yield name


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names in a file that stand for something of torch -> its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(a.asname or a.name.partition(".")[0], a.name) for a in node.names]
            found = [
                (name, full if name != full.partition(".")[0] else name) for name, full in found
            ]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        yield from ((name, full) for name, full in found if full.partition(".")[0] == "torch")


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """The full name of ``a.b.c`` if the file has ``a`` from torch."""
    if isinstance(node, ast.Attribute):
        start = _dotted(node.value, names)
        return None if start is None else f"{start}.{node.attr}"
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _value(name: str) -> Any:
    """What a full name stands for; modules on the way are imported."""
    first, *rest = name.split(".")
    value, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            try:
                importlib.import_module(path)
            except ImportError:
                raise AttributeError(name) from None
        value = getattr(value, part)
    return value


def _takes(function: Any, keyword: str) -> bool:
    """Whether a function takes a keyword, as far as it can be found."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)
