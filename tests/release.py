# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``make release-check``: what a user gets, from sdist to uninstall, where nobody has seen the
checkout.

The sdist is built from a copy of the checkout and the wheel from the sdist alone; each is installed
from a folder without an index into a fresh virtual environment, which takes the other packages from
this one. The commands, the demo and the tests that need no sources run there; after the uninstall
nothing is left.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

from tests.launching import ROOT, ended
from zero_topo import __version__

NOT_RELEASED = shutil.ignore_patterns(
    ".*", "build", "dist", "runs", "site", "*.egg-info", "__pycache__"
)
QUICK = (
    "plan",
    "config_parse",
    "config_resolve",
    "cost_volume",
    "cost_memory",
    "quant_reference",
    "units",
    "stock_keys",
)
"""Tests of tests/unit that ask about the package's behaviour and not about its sources."""

BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
EIGHT, TWO = (f'"gpus_per_node": {n}, "gcds_per_gpu": {n}' for n in (2, 1))
"""Of the demo's machine: its ranks on a node, and one."""

DEMO = (
    "-m",
    "deepspeed.launcher.runner",
    "--quiet",
    "--no_local_rank",
    "--num_accelerators",
    "2",
    "--module",
)
TIMEOUT_S = 600


class Fresh:
    """A virtual environment whose own packages are none, with the others of this one behind
    them.
    """

    def __init__(self, folder: Path, checkout: Path) -> None:
        venv.create(folder / "venv", symlinks=True, with_pip=True)
        self.folder, self.checkout = folder, checkout
        self.python = folder / "venv/bin/python"
        # An old one that comes with Python 3.11
        self.run("-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """Output of its Python, which ends well.

        Raises:
            RuntimeError: with what it said if it does not.
        """
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "PIP_"))
        }
        env |= {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
        }
        command = [str(self.python), *words]
        done = ended(command, cwd=cwd or self.folder, env=env, timeout=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        return done.stdout.strip()

    def listing(self) -> set[str]:
        """Everything below the environment."""
        return {str(path.relative_to(self.folder)) for path in (self.folder / "venv").rglob("*")}

    def check(self, package: Path) -> Iterator[str]:
        """Install a package, use it, and take it away; a line for each thing that was found
        well.
        """
        before = self.listing()
        words = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
        self.run("-m", "pip", "install", *words, "--find-links", str(package.parent), str(package))
        yield f"{package.name} installs without an index"
        where = self.run("-P", "-c", "import zero_topo; print(zero_topo.__file__)")
        assert where.startswith(str(self.folder)), f"this is not the installed one: {where}"
        assert self.run("-m", "zero_topo.cli", "--version").startswith(f"zero-topo {__version__} ")
        self.run(
            "-m",
            "zero_topo.cli",
            "plan",
            "--params",
            "20B",
            "--machine",
            "frontier",
            "--nodes",
            "48",
        )
        self.run(
            "-m",
            "zero_topo.cli",
            "check",
            str(self.checkout / "configs/demo.json"),
            "--world-size",
            "8",
        )
        yield "its commands run"
        if package.suffix == ".whl":
            yield from self._use()
        self.run("-m", "pip", "uninstall", "--quiet", "--yes", "zero-topo")
        # The hook's file goes with the first import
        self.run("-c", "import deepspeed.runtime.config")
        left = sorted(self.listing() - before)
        assert not left, f"left behind: {left}"
        yield "its uninstall leaves nothing behind"

    def _use(self) -> Iterator[str]:
        demo = self.folder / "demo.json"
        demo.write_text((self.checkout / "configs/demo.json").read_text().replace(EIGHT, TWO))
        reported = self.run(
            *DEMO, "zero_topo.examples.train_gpt", "--deepspeed_config", str(demo), "--steps", "2"
        )
        assert "Sent by each rank" in reported, reported
        yield "the demo trains on two ranks"
        files = [f"tests/unit/test_{name}.py" for name in QUICK]
        reported = self.run(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=self.checkout
        )
        yield f"quick tests: {reported.splitlines()[-1]}"


def build(what: str, dist: Path, source: Path) -> None:
    """Make an sdist or a wheel; what setuptools says is shown if it fails."""
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(dist)]
    done = ended(command, cwd=source)
    if done.returncode:
        sys.exit(f"the {what} could not be built:\n{done.stdout}\n{done.stderr}")


def main() -> int:
    """Build, install, use, uninstall; the exit status."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copytree(ROOT, folder / "source", ignore=NOT_RELEASED)
        dist = folder / "dist"
        dist.mkdir()
        build("sdist", dist, folder / "source")
        (sdist,) = dist.glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder / "unpacked")
        (unpacked,) = (folder / "unpacked").iterdir()
        build("wheel", dist, unpacked)
        (wheel,) = dist.glob("*.whl")
        shutil.rmtree(folder / "source" / "zero_topo")  # tests must find the installed one
        for package in (wheel, sdist):
            place = folder / package.suffix.strip(".")
            place.mkdir()
            for line in Fresh(place, folder / "source").check(package):
                print(f"ok: {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
