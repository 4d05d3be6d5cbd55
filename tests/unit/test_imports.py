# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Imports run one way, and planning needs no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

from tests.house import Source, sources
from tests.launching import ROOT

HEAVY = ("torch", "deepspeed", "numpy")

_PLANNING = ("units", "strict", "topology", "quant.spec", "plan", "config", "cost")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "units": (),
    "quant.spec": ("units",),
    "strict": (),
    "topology": ("units", "strict"),
    "plan": ("units", "topology"),
    "config": ("units", "strict", "topology", "quant.spec", "plan"),
    "cost": ("units", "strict", "topology", "quant.spec", "plan", "config"),
    "mesh": _PLANNING,
    "quant": _PLANNING,
    "collectives": (*_PLANNING, "mesh", "quant"),
    "sync": (*_PLANNING, "mesh", "quant", "collectives"),
    "engine": ("", *_PLANNING, "mesh", "quant", "collectives", "sync"),
    "observe": (*_PLANNING, "mesh", "quant", "collectives"),
}
"""What each room may import besides itself. Rooms not named here are the top and may import any other room but each
other's privates; a room is a module or a package below `zero_topo`, the longest name that fits."""

TOP = ("", "lazy_hook", "run", "neox", "cli", "doctor", "launch", "bench", "examples")
"""The public face and the programs. Nothing below imports them."""

TORCH_FREE = _PLANNING


def room(module: str) -> str:
    """The room a module of zero_topo belongs to: "" for the package itself."""
    inner = module.removeprefix("zero_topo").removeprefix(".")
    fitting = [name for name in (*MAY_IMPORT, *TOP) if name and (inner == name or inner.startswith(f"{name}."))]
    return max(fitting, key=len, default="" if not inner else inner.partition(".")[0])


def resolved(names: Iterable[str], known: dict[str, Source]) -> set[str]:
    """The modules of zero_topo among imported names: `a.b` where b is no module counts as `a`."""
    ours = {name for name in names if name.split(".")[0] == "zero_topo"}
    found = {name for name in ours if name in known}
    attributes = {name.rpartition(".")[0] for name in ours if name not in known}
    # `from package import submodule` names the package as well: keep it only if something else is taken from it.
    packages = {name for name in found if known[name].is_package and name not in attributes}
    return {name for name in found | (attributes & set(known)) if name not in packages or name in attributes}


MODULES = {source.module: source for source in sources("zero_topo")}
PLANNING_MODULES = sorted(module for module in MODULES if room(module) in TORCH_FREE)


def test_imports_run_one_way() -> None:
    """No module imports a room above its own, not even for its types."""
    for module, source in MODULES.items():
        here = room(module)
        assert here in MAY_IMPORT or here in TOP, f"{module} is in a room the house does not know"
        allowed = {here, *MAY_IMPORT.get(here, ())}
        wrong = {name for name in resolved(source.imports_for_types(), MODULES) if room(name) not in allowed}
        assert here in TOP or not wrong, f"{module} may import {sorted(allowed)}, but imports {sorted(wrong)}"


def test_planning_modules_never_name_torch() -> None:
    """The torch-free modules import none of torch, deepspeed and numpy, at the top or inside a function."""
    for module in PLANNING_MODULES:
        heavy = {name for name in MODULES[module].imports() if name.split(".")[0] in HEAVY}
        assert not heavy, f"{module} must run without torch, but imports {sorted(heavy)}"


def test_planning_modules_do_not_reach_torch() -> None:
    """Following the imports that importing a module executes, packages' own included, never ends at torch."""
    todo = [(module, module) for module in PLANNING_MODULES]
    seen: set[str] = set()
    while todo:
        name, chain = todo.pop()
        parts = name.split(".")
        for package in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
            if package in seen or package not in MODULES:
                continue
            seen.add(package)
            imported = MODULES[package].imports_on_import()
            heavy = {found for found in imported if found.split(".")[0] in HEAVY}
            assert not heavy, f"{chain} -> {package} imports {sorted(heavy)}"
            todo += [(found, f"{chain} -> {found}") for found in imported if found.startswith("zero_topo")]


def test_the_package_needs_no_checkout() -> None:
    """Benchmarks and tests import the package, never the reverse: neither is installed with it."""
    found = {module: {name.split(".")[0] for name in source.imports_for_types()} for module, source in MODULES.items()}
    assert not {module for module, names in found.items() if names & {"benchmarks", "tests"}}


WITHOUT_TORCH = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for module in MODULES:
    importlib.import_module(module)
assert not [name for name in sys.modules if name.split(".")[0] in HEAVY]
"""


def test_planning_runs_without_torch() -> None:
    """A login node has no torch: the planning half and the command line import on a machine without heavy packages."""
    wanted = sorted({"zero_topo", "zero_topo.cli", *PLANNING_MODULES} & set(MODULES))
    program = WITHOUT_TORCH.replace("HEAVY", repr(HEAVY)).replace("MODULES", repr(wanted))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_rooms_exist() -> None:
    """The rule above would allow nothing if the rooms' names were wrong: the rooms of the house exist in it."""
    rooms = {room(module) for module in MODULES}
    assert {"units", "topology", "plan", "quant.spec", "quant", "collectives", "sync", "engine", "config"} <= rooms
    assert room("zero_topo.quant.spec") == "quant.spec"
    assert room("zero_topo.quant.ops") == "quant"
    assert room("zero_topo") == ""
