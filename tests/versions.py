# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``make test-versions``: the supported releases of torch and DeepSpeed, each where it is
installed.

The oldest of both and the newest of both get an environment of their own, of pip's making, that
goes away again (some 10 GB where torch comes with CUDA; PIP_EXTRA_INDEX_URL may name an index of
CPU builds). The pinned ones are this environment's; there DeepSpeed's releases on both sides of
each difference between them follow, which are Python alone here: an sdist is unpacked and named on
PYTHONPATH.

Of each: the import, which checks the seam; the names of torch; units, ranks of one process, and
four real ranks that train as under stock ZeRO-3. ``K="oldest 0.18.3"`` asks for some.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import deepspeed  # noqa: F401  (the hook comes with it, and imports the seam)

from tests.launching import ROOT
from zero_topo.hook.seam import SINCE
from zero_topo.versions import SUPPORTED

TORCH, DEEPSPEED = SUPPORTED["torch"], SUPPORTED["deepspeed"]
PAIRS = {end: (getattr(TORCH, end), getattr(DEEPSPEED, end)) for end in ("oldest", "newest")}
BETWEEN = ("0.18.2", "0.18.8", "0.19.0", "0.19.4", *dict.fromkeys(SINCE.values()))
"""Of DeepSpeed: both sides of each difference, and the first of 0.19."""

SEAM = """
import zero_topo, deepspeed, torch
from tests.torch_names import missing
assert not missing(), missing()
print(torch.__version__, deepspeed.__version__)
"""
UNITS = (
    "versions",
    "torch_names",
    "quant_operators",
    "quant_reference",
    "adams",
    "op_builder",
    "sparse_selection",
)
RANKS = ("hook_check", "start_up", "hook_streams", "weights", "gradients")
PARITY = (
    "test_access_to_gradients or (test_feature_under_scheme and topo and (overflows or evaluation))"
)
"""Of tests/launcher: losses, gradients, masters and states as stock ZeRO-3's, on four ranks."""

TOOLS = (
    "setuptools>=77",
    "wheel",
    "ninja",
    "pytest>=9",
    "pytest-xdist",
    "hypothesis",
    "expecttest",
    "pyyaml",
)


def environment(folder: Path, torch: str, release: str) -> Path:
    """A Python with a release of each, and this checkout."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    # first: DeepSpeed's setup imports them
    subprocess.run([*pip, f"torch=={torch}.*", *TOOLS], check=True)
    words = [
        "--no-build-isolation",
        f"torch=={torch}.*",
        f"deepspeed=={release}",
        "--editable",
        str(ROOT),
    ]
    subprocess.run([*pip, *words], env={**os.environ, "DS_BUILD_OPS": "0"}, check=True)
    return python


def sources(version: str, folder: Path) -> Path:
    """The unpacked sdist of a release of DeepSpeed."""
    words = [
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    env = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run(
        [sys.executable, "-m", "pip", *words, f"deepspeed=={version}"], env=env, check=True
    )
    subprocess.run(["tar", "-xzf", f"deepspeed-{version}.tar.gz"], cwd=folder, check=True)
    return folder / f"deepspeed-{version}"


def tell(what: str, python: Path, release: str, env: dict[str, str]) -> None:
    """Print what an environment does; the first thing that fails ends it.

    Raises:
        subprocess.CalledProcessError: for a failure, whose output is there.
    """
    env = {**os.environ, **env, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(python), "-c", SEAM], cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    versions = done.stdout.splitlines()[-1]
    assert versions.split()[1] == release, versions
    # Ahead of tests, which have time limits. Its Python is not this one, nor may its kernels be.
    subprocess.run([str(python), "-m", "zero_topo.cli", "build"], cwd=ROOT, env=env, check=True)
    pytest = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    files = [
        *(f"tests/unit/test_{name}.py" for name in UNITS),
        *(f"tests/ranks/test_{name}.py" for name in RANKS),
    ]
    subprocess.run([*pytest, *files], cwd=ROOT, env=env, check=True)
    # Not forked: importing torch 2.6 leaves a thread.
    words = [
        "tests/e2e/test_launcher_suite.py",
        "--launcher-ranks=4",
        "--launcher-real",
        f"--launcher-k={PARITY}",
    ]
    subprocess.run([*pytest, *words], cwd=ROOT, env=env, check=True)
    print(
        f"ok: {what}, torch and DeepSpeed {versions}: the seam, units, ranks of one process, four "
        "ranks",
        flush=True,
    )


def tried(wanted: list[str], folder: Path) -> Iterator[tuple[str, Path, str, dict[str, str]]]:
    """What to try, made when its turn comes: its name, its Python, DeepSpeed's release,
    variables.
    """
    for what in wanted:
        if what in PAIRS:
            with tempfile.TemporaryDirectory(dir=folder) as made:
                python = environment(Path(made), *PAIRS[what])
                yield (
                    what,
                    python,
                    PAIRS[what][1],
                    {"TORCH_EXTENSIONS_DIR": f"{made}/torch_extensions"},
                )
        elif what == "pinned":
            yield what, Path(sys.executable), DEEPSPEED.pinned, {}
        else:
            yield what, Path(sys.executable), what, {"PYTHONPATH": str(sources(what, folder))}


def main(wanted: list[str]) -> int:
    """What was asked for, or all; the exit status."""
    with tempfile.TemporaryDirectory() as made:
        for each in tried(wanted or [*PAIRS, "pinned", *BETWEEN], Path(made)):
            tell(*each)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
