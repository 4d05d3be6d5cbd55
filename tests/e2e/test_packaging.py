# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a user gets who installs the wheel: native sources, presets and examples, not only the
Python code.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.documents import starting
from tests.launching import ROOT, output
from zero_topo import __version__

BUILD, INSTALL = starting("pip ")
OFFLINE = ("--quiet", "--no-deps", "--no-index")

NOT_THE_PROJECT = shutil.ignore_patterns(
    ".*", "build", "dist", "runs", "site", "*.egg-info", "__pycache__", "tests"
)

LARGEST = 800_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as most people build it."""
    return built(tmp_path_factory.mktemp("wheel"))


def built(directory: Path, **env: str) -> Path:
    """The wheel, built with the README's line from a copy of the checkout so that no build
    directory is left in it.
    """
    shutil.copytree(ROOT, directory / "source", ignore=NOT_THE_PROJECT)
    command = [sys.executable, "-m", *shlex.split(BUILD), *OFFLINE, "--no-build-isolation"]
    output(command, cwd=directory / "source", env={**os.environ, **env})
    return next((directory / "source/dist").glob("*.whl"))


def run_outside(code: str, wheel: Path, folder: Path) -> str:
    """What code prints in a Python that sees the unpacked wheel, and no checkout through its
    working directory.
    """
    zipfile.ZipFile(wheel).extractall(folder / "site")
    env = {**os.environ, "PYTHONPATH": str(folder / "site")}
    return output([sys.executable, "-P", "-c", code], cwd=folder, env=env).strip()


def test_wheel_carries_everything_a_user_needs(wheel: Path) -> None:
    """Native sources, their finder, presets, example, type marker and licence; no tests, no records
    of benchmarks.
    """
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {
        "csrc/zt_wire.h",
        "op_builder/__init__.py",
        "py.typed",
        "examples/train_gpt.py",
        "cli/__init__.py",
    }
    presets = {
        f"topology/presets/{path.name}"
        for path in (ROOT / "zero_topo/topology/presets").glob("*.json")
    }
    assert presets
    assert {f"zero_topo/{name}" for name in wanted | presets} <= set(names)
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zero_topo").rglob("*.py")}
    assert modules <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {
        "zero_topo",
        f"zero_topo-{__version__}.dist-info",
    }
    records = {path.name for path in (ROOT / "benchmarks/records").glob("*.json")}
    assert (
        records
        and not records & {Path(name).name for name in names}
        and wheel.stat().st_size < LARGEST
    )


def test_the_readmes_line_installs_it(wheel: Path, tmp_path: Path) -> None:
    """Where the line before it has left the wheel; what it needs next to it is there already."""
    command = [sys.executable, "-m", *shlex.split(INSTALL), *OFFLINE, "--target", str(tmp_path)]
    output(command, cwd=wheel.parent.parent)
    assert (tmp_path / "zero_topo" / "csrc" / "zt_wire.h").exists()


def test_wheel_names_its_version_and_command(wheel: Path) -> None:
    """The version is the package's own, DeepSpeed no older than was tried, the command
    registered.
    """
    archive = zipfile.ZipFile(wheel)
    info = f"zero_topo-{__version__}.dist-info"
    metadata = archive.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Dist: deepspeed>=0.18\n" in metadata
    assert "zero-topo = zero_topo.cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_sources_are_found_in_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """source_dir() of the unpacked wheel is inside it and holds the header."""
    code = "from zero_topo.op_builder import source_dir; print(source_dir())"
    found = Path(run_outside(code, wheel, tmp_path))
    assert found == tmp_path / "site" / "zero_topo" / "csrc"
    assert (found / "zt_wire.h").read_text() == (ROOT / "csrc" / "zt_wire.h").read_text()


PREBUILT = """
import os, sys, torch
os.environ["PATH"] = os.environ["TORCH_EXTENSIONS_DIR"] = "/nowhere"
from zero_topo.quant import operators, ops
from zero_topo.quant.spec import BlockSpec
name = operators.select()
message = ops.quantize(torch.ones(1000), BlockSpec("int8"))
print(name, sys.modules["zero_topo.zt_cpu"].__file__, int(message[0]))
"""


@pytest.mark.long
def test_ops_built_ahead_of_time_need_no_compiler(tmp_path: Path) -> None:
    """With ZT_BUILD_OPS=1 the wheel carries the CPU's kernels, and they load where nothing can be
    compiled.
    """
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("g++ and ninja are needed to build ahead of time")
    printed = run_outside(PREBUILT, built(tmp_path, ZT_BUILD_OPS="1"), tmp_path)
    name, file, first = printed.splitlines()[-1].split()
    assert (name, first) == ("native", "127")
    assert Path(file).parent == tmp_path / "site" / "zero_topo"
