# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What only tests call is dead: every public function, class and method of the package has a caller
outside tests.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from tests.house import Function, sources

CALLED_FROM_OUTSIDE = {
    "coordinates": "users of zero_topo.Topology who ask where a rank sits",
    "attach": "trainers on FSDP2 that shard the model themselves",
    "shard_mesh": "the same trainers",
    "add_param_group": "torch's optimizers",
    "find_spec": "importlib, as create_module and exec_module",
}
"""Names whose callers are not in this repository, and who they are."""


def public(tree: ast.Module) -> Iterator[str]:
    """Public functions and classes of a module, and public methods of its classes, but those that a
    decorator hands to a framework.
    """
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in (*tree.body, *(item for kind in classes for item in kind.body)):
        if isinstance(node, Function | ast.ClassDef) and not node.decorator_list:
            yield node.name


def used(tree: ast.Module) -> Iterator[str]:
    """Names that code reads, and words of strings, which may name something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.replace("(", " ").replace(":", " ").split()[:2]


def test_public_names_have_a_caller_outside_tests() -> None:
    """Nothing public is kept alive by tests alone."""
    package = sources("zero_topo")
    callers = [source.tree for source in (*package, *sources("op_builder", "benchmarks"))]
    uses = Counter(name for tree in callers for name in used(tree))
    dead = []
    for source in package:
        names = {name for name in public(source.tree) if not name.startswith("_")}
        dead += [f"{source.name}: {name}" for name in names if not uses[name]]
    assert not [name for name in dead if name.rpartition(" ")[2] not in CALLED_FROM_OUTSIDE]
