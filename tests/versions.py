# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``make test-versions``: the releases of DeepSpeed that are supported, each put before the installed one.

Of each: the import checks what the seam relies on, the ranks of one process do what they should, and two real ranks
train the example. DeepSpeed is Python alone here, so its sdist is unpacked and named on PYTHONPATH; it is downloaded,
without what it depends on. ``K=0.18.0`` asks for one release.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import deepspeed  # noqa: F401  (the hook comes with it, and imports the seam)

from tests.launching import ROOT
from tests.release import EIGHT, TWO
from zero_topo.engine.seam import OLDEST, VERSION

RELEASES = (OLDEST, "0.18.9", "0.19.0", "0.19.4", "0.19.5", VERSION)
"""The oldest, the newest, and both sides of what changed between them."""

SEAM = "import zero_topo, deepspeed; print(deepspeed.__version__)"
RANKS = ("tests/ranks/test_hook_check.py", "tests/ranks/test_start_up.py", "tests/ranks/test_hook_streams.py")
LAUNCH = ("-m", "deepspeed.launcher.runner", "--quiet", "--no_local_rank", "--num_accelerators", "2", "--master_port")


def sources(version: str, folder: Path) -> Path:
    """The unpacked sdist of a release of DeepSpeed."""
    words = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(folder)]
    env = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([sys.executable, "-m", "pip", *words, f"deepspeed=={version}"], env=env, check=True)
    subprocess.run(["tar", "-xzf", f"deepspeed-{version}.tar.gz"], cwd=folder, check=True)
    return folder / f"deepspeed-{version}"


def tell(version: str, path: Path) -> None:
    """Print what a release does; the first thing that fails ends it.

    Raises:
        subprocess.CalledProcessError: for a failure, whose output is there.
    """
    env = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", SEAM], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split()[-1] == version, done.stdout
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *RANKS], cwd=ROOT, env=env, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (path / "demo.json").write_text((ROOT / "configs/demo.json").read_text().replace(EIGHT, TWO))
    words = [*LAUNCH, port, "--module", "zero_topo.examples.train_gpt", "--deepspeed_config", str(path / "demo.json")]
    subprocess.run([sys.executable, *words, "--steps", "2"], env=env, check=True, stdout=subprocess.DEVNULL)
    print(f"ok: DeepSpeed {version}: the seam, ranks of one process, two real ranks", flush=True)


def main(wanted: list[str]) -> int:
    """Each release that was asked for, or all; the exit status."""
    with tempfile.TemporaryDirectory() as made:
        for version in wanted or RELEASES:
            tell(version, sources(version, Path(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
