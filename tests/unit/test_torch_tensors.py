# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every tensor that the package creates names its dtype and its device: a script may set other
defaults.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house import sources

NAMES = (
    "arange asarray as_tensor empty empty_permuted empty_strided eye full linspace logspace ones "
    "rand randint randn randperm range scalar_tensor tensor zeros"
)
FACTORIES = set(NAMES.split())
"""Functions of torch whose result has the default dtype or the default device unless the call names
them.
"""

NAMED = {"dtype", "device"}


def unnamed(tree: ast.AST) -> Iterator[str]:
    """References to a factory that are not a call with a dtype and a device; a ``dtype=None`` is
    none.
    """
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in FACTORIES:
            continue
        if ast.unparse(node.value) != "torch":
            continue
        call = called.get(id(node))
        keywords = call.keywords if call else []
        given = {word.arg for word in keywords if ast.unparse(word.value) != "None"}
        if not given.issuperset(NAMED):
            yield f"{node.lineno}: {ast.unparse(call or node)}"


@pytest.mark.parametrize("part", ["engine", "sync", "quant", "collectives", "hook", "mesh.py"])
def test_every_tensor_names_its_dtype_and_device(part: str) -> None:
    """A script with another default dtype or device trains as any other: no tensor of ours follows
    the default.
    """
    found = [
        source for source in sources("zero_topo") if source.name.startswith(f"zero_topo/{part}")
    ]
    assert found
    assert not [(source.name, place) for source in found for place in unnamed(source.tree)]
    assert not [
        source.name
        for source in found
        if "torch.Tensor(" in source.text or "FloatTensor" in source.text
    ]
