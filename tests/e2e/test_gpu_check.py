# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` runs to its end without a GPU, says that it was a stand-in, and asks a GPU for
tests that exist.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.gpu import __main__ as gpu_check
from tests.gpu.__main__ import STAGES, Command, Stage
from tests.launching import ROOT, output

pytestmark = pytest.mark.long
ON_CPU = {**os.environ, "ZERO_TOPO_TEST_DEVICE": "cpu"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_on_the_cpu(stage: int) -> None:
    """Every command of its stand-in succeeds."""
    said = output([sys.executable, "-m", "tests.gpu", str(stage)], cwd=ROOT, env=ON_CPU)
    assert (
        f"stage {stage}: {STAGES[stage].title} -- STAND-IN" in said and "0 commands failed" in said
    )


def needed(names: Iterable[str]) -> dict[str, Distribution]:
    """Installed packages, and what they need."""
    found: dict[str, Distribution] = {}
    left = [Requirement(name) for name in names]
    while left:
        one = left.pop()
        if one.name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found[one.name] = distribution(one.name)
        left += map(Requirement, found[one.name].requires or ())
    return found


def pack(package: Distribution, folder: Path) -> None:
    """An installed package as the wheel that it was."""
    name = f"{package.metadata['Name'].replace('-', '_')}-{package.version}"
    tag = [
        line.split()[1]
        for line in (package.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag:")
    ][-1]
    with zipfile.ZipFile(folder / f"{name}-{tag}.whl", "w") as wheel:
        for file in package.files or ():
            path = Path(str(package.locate_file(file))).resolve()
            if (
                path.is_file()
                and path.suffix != ".pyc"
                and path.name not in ("RECORD", "INSTALLER", "direct_url.json")
            ):
                wheel.write(
                    path, f"{name}.data/scripts/{path.name}" if file.parts[0] == ".." else str(file)
                )
        rows = "".join(f"{entry},,\n" for entry in wheel.namelist())
        wheel.writestr(
            next(str(file) for file in package.files or () if file.name == "RECORD"), rows
        )


def test_it_installs_without_network_from_a_virtual_environment(tmp_path: Path) -> None:
    """Whose packages are torch, what that needs, and pip; next to a ``.venv`` that an earlier call
    left half made.
    """
    outer, wheels, checkout = tmp_path / "outer", tmp_path / "wheels", tmp_path / "checkout"
    venv.create(outer)
    there = needed(["torch", "pip"])
    target = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(outer), "platbase": str(outer)})
    )
    for package in there.values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (target / top).symlink_to(str(package.locate_file(top)))
    wheels.mkdir()
    for name, package in needed(
        shlex.split(output(["make", "-s", "-C", ROOT, "gpu-needs"]))
    ).items():
        if name not in there:
            pack(package, wheels)
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "runs", "build", "site"))
    venv.create(checkout / ".venv")
    words = [
        "make",
        "gpu-check",
        "STAGE=6",
        f"PYTHON={outer / 'bin' / 'python'}",
        f"GPU_WHEELS={wheels}",
    ]
    words.append(f"TORCH_EXTENSIONS_DIR={ROOT / '.torch_extensions'}")
    nowhere = "http://127.0.0.1:9"
    env = {"PATH": os.defpath, "HOME": str(tmp_path), "http_proxy": nowhere, "https_proxy": nowhere}
    assert "0 commands failed" in output(words, cwd=checkout, env=env)
    assert (checkout / ".venv" / ".set-up-for-gpu").exists()


@pytest.mark.parametrize("what", ["calls", "launches"])
def test_a_rank_of_384_calls_and_launches_little(what: str, tmp_path: Path) -> None:
    """A forward pass calls no more functions than stock's, and a step has few launches, those of
    the model and of DeepSpeed among them.
    """
    words = [sys.executable, "-m", "tests.gpu.one_of_many", what, str(tmp_path)]
    output(words, cwd=ROOT, env=ON_CPU)


def test_a_stage_ends_at_its_limit_and_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it had to run afterwards fails too."""
    monkeypatch.setattr(
        gpu_check, "commands", lambda *_: [Command(("sleep", "60")), Command(("true",))]
    )
    monkeypatch.setitem(STAGES, 1, Stage("sleeping", 0.2, "patience"))
    assert [entry["status"] for entry in gpu_check.run(1, True, tmp_path)] == [124, 124]
    assert "stage 1 proved: nothing" in capsys.readouterr().out
