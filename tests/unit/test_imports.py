# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Imports run one way, and planning needs no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import pytest

from tests.data import table
from tests.house import Source, sources
from tests.launching import ROOT, ended

ROOMS = table("rooms")
"""A room is a module or a package below `zero_topo`, the longest name that fits.

- ``may import``: what each room may import besides itself.
- ``top``: the public face and the programs, each of which may import those before it and all that
  is below; nothing below imports them.
- ``deepspeed``: those that may import DeepSpeed. ``torch free``: those that import nothing
  ``heavy``.
"""
MAY_IMPORT, TOP = ROOMS["may import"], ROOMS["top"]


def room(module: str) -> str:
    """The room a module of zero_topo belongs to: "" for the package itself."""
    inner = module.removeprefix("zero_topo").removeprefix(".")
    fitting = [
        name
        for name in (*MAY_IMPORT, *TOP)
        if name and (inner == name or inner.startswith(f"{name}."))
    ]
    return max(fitting, key=len, default="" if not inner else inner.partition(".")[0])


def resolved(names: Iterable[str], known: dict[str, Source]) -> set[str]:
    """The modules of zero_topo among imported names: `a.b` where b is no module counts as `a`."""
    ours = {name for name in names if name.split(".")[0] == "zero_topo"}
    found = {name for name in ours if name in known}
    attributes = {name.rpartition(".")[0] for name in ours if name not in known}
    # `from package import submodule` names the package as well: keep it only if something else is
    # taken from it.
    packages = {name for name in found if known[name].is_package and name not in attributes}
    return {
        name
        for name in found | (attributes & set(known))
        if name not in packages or name in attributes
    }


MODULES = {source.module: source for source in sources("zero_topo")}
PLANNING_MODULES = sorted(module for module in MODULES if room(module) in ROOMS["torch free"])


def test_imports_run_one_way() -> None:
    """No module imports a room above its own, not even for its types."""
    for module, source in MODULES.items():
        here = room(module)
        assert here in MAY_IMPORT or here in TOP, f"{module} is in a room the house does not know"
        allowed = {here, *MAY_IMPORT.get(here, ())}
        if here in TOP:
            allowed = {*MAY_IMPORT, *TOP[: TOP.index(here) + 1]}
        wrong = {
            name
            for name in resolved(source.imports_for_types(), MODULES)
            if room(name) not in allowed
        }
        assert not wrong, f"{module} may import {sorted(allowed)}, but imports {sorted(wrong)}"


def test_no_module_imports_itself_by_others() -> None:
    """Not even for its types: what two modules share has a module of its own."""
    below: dict[str, set[str]] = {}
    for module, source in MODULES.items():
        below[module] = resolved(source.imports_for_types(), MODULES) - {module}
    ends = {module for module, names in below.items() if not names}
    while ends:  # what imports nothing that is left can be in no circle
        below = {module: names - ends for module, names in below.items() if module not in ends}
        ends = {module for module, names in below.items() if not names}
    assert not below


def test_the_engine_knows_no_deepspeed() -> None:
    """Only the hook and the programs import DeepSpeed, at the top or inside a function."""
    users = {
        module
        for module, source in MODULES.items()
        if any(n.split(".")[0] == "deepspeed" for n in source.imports())
    }
    assert users and {room(module) for module in users} <= set(ROOMS["deepspeed"])


def test_planning_modules_never_name_torch() -> None:
    """The torch-free modules import none of torch, deepspeed and numpy, at the top or inside a
    function.
    """
    for module in PLANNING_MODULES:
        heavy = {name for name in MODULES[module].imports() if name.split(".")[0] in ROOMS["heavy"]}
        assert not heavy, f"{module} must run without torch, but imports {sorted(heavy)}"


def test_the_package_needs_no_checkout() -> None:
    """Benchmarks and tests import the package, never the reverse: neither is installed with it."""
    found = {
        module: {name.split(".")[0] for name in source.imports_for_types()}
        for module, source in MODULES.items()
    }
    assert not {module for module, names in found.items() if names & {"benchmarks", "tests"}}


PROGRAM = """
import sys
from importlib import import_module, metadata

class Reached(BaseException): ...

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise Reached(name)

def installed(name, version=metadata.version):
    if name in HEAVY:
        raise metadata.PackageNotFoundError(name)
    return version(name)

metadata.version = installed
sys.meta_path.insert(0, Guard())
for module in MODULES:
    import_module(module)
sys.exit(import_module("zero_topo." + sys.argv.pop(1)).main())
"""


SECONDS = 4.0


@pytest.mark.parametrize(
    "words",
    [
        "cli --help",
        "cli plan --params 20B --machine frontier --nodes 48 --json",
        "cli topology --from frontier",
        "cli launch slurm --machine dgx-h100 -- true",
        "neox.__main__ check neox_configs/frontier-20b.yml",
    ],
)
def test_planning_runs_without_torch(words: str) -> None:
    """A login node has no torch: neither importing the planning half nor a command looks for a
    heavy package.

    Not even one that it could do without, and none is installed. What the commands take of a
    processor is bounded.
    """
    if words.startswith("neox"):
        pytest.importorskip("yaml")
    modules = [
        name for name in (*PLANNING_MODULES, "zero_topo.launch.worker") if words == "cli --help"
    ]
    program = PROGRAM.replace("HEAVY", repr(ROOMS["heavy"])).replace("MODULES", repr(modules))
    before = os.times()
    command = [sys.executable, "-c", program, *words.split()]
    done = ended(command, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    after = os.times()
    taken = after.children_user + after.children_system
    assert taken - before.children_user - before.children_system < SECONDS
