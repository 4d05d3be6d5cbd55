# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What only tests call is dead: every public function, class and method of the package has a caller
outside tests.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tests.house import Function, sources

REGISTERING = ("command", "callback", "register", "jit", "autotune", "heuristics")
"""Decorators that call, or hand to a framework that calls, what they decorate."""

NAME = re.compile(r"([\w.]+:)?[A-Za-z_]\w*(\(self[\w, ]*\))?")
"""A string that may name something to call: ``name`` (``getattr``, lazy imports), ``module:name``
(programs), or a method with its parameters (what the hook requires of DeepSpeed).
"""

CALLED_FROM_OUTSIDE: Mapping[str, str] = {
    "TopoStage3": "DeepSpeed, whose methods it overrides",
    "Topology.coordinates": "users of zero_topo.Topology who ask where a rank sits",
    "attach": "trainers on FSDP2 that shard the model themselves",
    "shard_mesh": "the same trainers",
    "Scatter": "FSDP2, as its reduce-scatter",
    "ShardedOptimizer.add_param_group": "torch's optimizers",
    "_HookingFinder": "importlib, as a loader",
}
"""Names whose callers are not in this repository, and who they are. A class stands for all of its
methods.
"""


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public functions and classes of a module, and public methods of its classes, as ``name`` or
    ``Class.name``.
    """
    for node in tree.body:
        if (
            isinstance(node, Function | ast.ClassDef)
            and not node.name.startswith("_")
            and not registered(node)
        ):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            methods = [
                item
                for item in node.body
                if isinstance(item, Function) and not item.name.startswith("_")
            ]
            yield from (
                (f"{node.name}.{item.name}", item) for item in methods if not registered(item)
            )


def registered(node: Function | ast.ClassDef) -> bool:
    """Whether a decorator makes the name known to somebody who calls it."""
    names = (
        re.findall(r"\w+", ast.unparse(decorator).partition("(")[0])
        for decorator in node.decorator_list
    )
    return any(words[-1] in REGISTERING for words in names)


def used_names(node: ast.AST) -> Iterator[str]:
    """Names that code reads: variables, attributes, strings that may name something, renamed
    imports.

    A plain import is no use, nor is a name in ``__all__``.
    """
    if isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
    ):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and NAME.fullmatch(node.value)
    ):
        yield node.value.partition("(")[0].rpartition(":")[2]
    elif isinstance(node, ast.alias) and node.asname:
        yield node.name.rpartition(".")[2]
    for child in ast.iter_child_nodes(node):
        yield from used_names(child)


def dead_names(trees: Mapping[str, ast.Module], callers: Iterable[ast.Module] = ()) -> list[str]:
    """``file: name`` of each public definition that nothing uses outside of itself.

    Args:
        trees: the package's modules by file.
        callers: modules outside the package that may use it.
    """
    uses = Counter(name for tree in (*trees.values(), *callers) for name in used_names(tree))
    found = []
    for file, tree in trees.items():
        for name, node in public_definitions(tree):
            last = name.rpartition(".")[2]
            if {name, name.partition(".")[0]} & CALLED_FROM_OUTSIDE.keys():
                continue
            if uses[last] <= sum(used == last for used in used_names(node)):
                found.append(f"{file}: {name}")
    return found


def test_public_names_have_a_caller_outside_tests() -> None:
    """Nothing public is kept alive by tests alone."""
    package = {source.name: source.tree for source in sources("zero_topo")}
    callers = [source.tree for source in sources("op_builder", "benchmarks")]
    assert not dead_names(package, callers)
