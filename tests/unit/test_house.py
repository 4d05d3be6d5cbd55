# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The limits that keep this a house: sizes, annotations, licence lines, and one seam to
DeepSpeed.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.documents import DOCUMENTS
from tests.house import Function, Source, function_lines, parameters, sources
from tests.launching import ROOT

LICENCE = "# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0"

MAX_FILE_LINES = 740
MEDIAN_FILE_LINES = 200
MAX_FUNCTION_LINES = 75
MAX_KERNEL_LINES = 120
MAX_ATTRIBUTES = 20
DATA_PATH = ("engine", "hook", "sync", "quant", "collectives")
SHORT_FUNCTION_LINES = 35
MAX_PARAMETERS = 9

SEAM = tuple(
    f"zero_topo/hook/{name}.py" for name in ("seam", "install", "optimizer", "inference", "start")
)
"""The one place that may name DeepSpeed's privates: the first lists and checks them, the next three
override them, with the signatures that DeepSpeed chose, the last reads its settings before an
engine is built.
"""


PACKAGE = sources("zero_topo", "op_builder", "benchmarks")
EVERYTHING = [*PACKAGE, *sources("tests")]


def is_kernel(function: Function) -> bool:
    """Whether a function is a Triton kernel, which may be longer: it cannot call what is not
    inlined.
    """
    return any(
        ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list
    )


def test_files_start_with_the_licence_line() -> None:
    """Every file says whose it is and under which licence, in its first line."""
    assert not [source.name for source in EVERYTHING if source.text.splitlines()[:1] != [LICENCE]]


def test_no_file_is_long() -> None:
    """No file has over 740 lines, and the median file of the package at most 200."""
    assert not [
        f"{source.name}: {source.lines}" for source in EVERYTHING if source.lines > MAX_FILE_LINES
    ]
    assert statistics.median(source.lines for source in PACKAGE) <= MEDIAN_FILE_LINES


def test_no_function_is_long() -> None:
    """No function has over 75 lines (kernels: 120), and 9 in 10 of the package have at most 35."""
    for where, function in functions(EVERYTHING):
        limit = MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES
        assert function_lines(function) <= limit, f"{where} has {function_lines(function)} lines"
    lengths = sorted(function_lines(function) for _, function in functions(PACKAGE))
    assert lengths[len(lengths) * 9 // 10] <= SHORT_FUNCTION_LINES


def test_functions_take_few_parameters() -> None:
    """More than nine parameters want to be a frozen dataclass. The seam's overrides keep
    DeepSpeed's signatures.
    """
    mine = [source for source in PACKAGE if source.name not in SEAM]
    many = {where: parameters(function) for where, function in functions(mine)}
    assert not {where: names for where, names in many.items() if len(names) > MAX_PARAMETERS}


def functions(files: list[Source]) -> Iterator[tuple[str, Function]]:
    """Every function of the files, with its place for messages."""
    for source in files:
        yield from (
            (f"{source.name}:{function.lineno} {function.name}", function)
            for function in source.functions()
        )


def test_only_the_seam_names_deepspeed_privates() -> None:
    """One place touches DeepSpeed's privates, so one place changes when DeepSpeed does."""
    seam = next(source for source in PACKAGE if source.name == SEAM[0])
    required = re.search(r"^REQUIRED.*?^\)", seam.text, re.MULTILINE | re.DOTALL)
    assert required, "the check is empty if the seam declares nothing"
    privates = set(re.findall(r'["}](_\w+)[("]', required[0]))
    assert privates
    found = {
        file.name: sorted(named_privates(file.tree, privates))
        for file in PACKAGE
        if file.name not in SEAM
    }
    assert not {name: named for name, named in found.items() if named}


def named_privates(tree: ast.Module, privates: set[str]) -> Iterator[str]:
    """Ways to name a private: attribute, method, string (getattr, patching), mangled name,
    import.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            node.attr in privates or node.attr.startswith("_DeepSpeed")
        ):
            yield f"line {node.lineno}: .{node.attr}"
        elif isinstance(node, Function) and node.name in privates:
            yield f"line {node.lineno}: def {node.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in privates or node.value.startswith("_DeepSpeed"):
                yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (
                f"line {node.lineno}: import of {part}" for part in parts if part.startswith("_")
            )


def test_notes_are_named_and_there_once() -> None:
    """A note that nobody names is a plain heading, and one that is named exists."""
    heads: list[str] = []
    named: set[str] = set()
    for source in EVERYTHING:
        own = re.findall(r'(?m)^ *(?:"""|# )?Note \[(.+)\]$', source.text)
        one_line = re.sub(r"\s*\n\s*(# )?", " ", source.text)
        rest = Counter(re.findall(r"Note \[([^\]]+)\]", one_line)) - Counter(own)
        heads += own
        named |= {*rest}
    for page in (*DOCUMENTS, *(ROOT / "csrc").iterdir()):
        named |= {*re.findall(r"Note \[([^\]]+)\]", page.read_text())}
    assert len(heads) == len({*heads})
    assert {*heads} <= named
    in_python = {
        name for source in PACKAGE for name in re.findall(r"Note \[([\w ]+)\]", source.text)
    }
    assert in_python <= {*heads}


def test_no_class_of_the_data_path_has_many_attributes() -> None:
    """At most 20, without those that DeepSpeed's optimizer has itself."""
    spec = find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    stock = (Path(spec.origin).parent / "runtime/zero/stage3.py").read_text()
    for source in sources(*(f"zero_topo/{room}" for room in DATA_PATH)):
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                names = {name for name in attributes(node) if f"self.{name}" not in stock}
                assert len(names) <= MAX_ATTRIBUTES, f"{source.name}: {node.name}: {sorted(names)}"


def attributes(of: ast.ClassDef) -> Iterator[str]:
    """The names that a class declares or its methods assign to `self`."""
    for statement in of.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
    for node in ast.walk(of):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if getattr(node.value, "id", None) == "self":
            yield node.attr
