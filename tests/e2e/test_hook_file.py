# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The hook without an import in the script: a line in site-packages, and what DeepSpeed's launcher
passes on.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.launching import ROOT, ended

pytestmark = pytest.mark.long
HOOKED = """
import sys
from importlib.util import find_spec
assert "torch" not in sys.modules, "a start must cost next to nothing"
assert find_spec("deepspeed"), "as transformers asks"
if find_spec("transformers"):
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
from deepspeed.runtime.engine import DeepSpeedEngine
print("hooked" if getattr(DeepSpeedEngine, "_zero_topo_hook", False) else "stock")
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Those of a virtual environment that sees this one's packages and zero_topo."""
    venv.create(tmp_path / "venv", symlinks=True)
    folder = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (folder / "paths.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    return folder


def printed(packages: Path, code: str) -> str:
    """What code prints in the Python of the environment, which must not complain about a .pth
    file.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    python = packages.parents[2] / "bin/python"
    done = ended([python, "-c", code], cwd=packages, env=env, timeout=300)
    assert done.returncode == 0 and "Error processing line" not in done.stderr, done.stderr
    return done.stdout.strip()


def test_a_line_in_site_packages_hooks_any_program(packages: Path) -> None:
    """The line of docs/launch.md. The program imports DeepSpeed and nothing of zero_topo."""
    assert printed(packages, HOOKED).splitlines()[-1] == "stock"
    (packages / "zero_topo.pth").write_text("import zero_topo\n")
    assert printed(packages, HOOKED).splitlines()[-1] == "hooked"


def test_a_checkout_on_the_path_has_its_kernels(packages: Path) -> None:
    """As in GPT-NeoX jobs: nothing is installed, and the kernels' builder stands next to the
    package.
    """
    code = "from zero_topo.op_builder import jit; print(jit.__file__)"
    assert printed(packages, code) == str(ROOT / "op_builder/jit.py")


@pytest.mark.parametrize("value", ["/shared/block.json", '{"scheme": "topo"}'])
def test_deepspeeds_launcher_passes_our_variables_to_other_nodes(
    tmp_path: Path, value: str
) -> None:
    """With the hook in the launcher's process, pdsh is asked to export them; quotes, which get
    lost, are refused.
    """
    for name, body in (("pdsh", 'for word; do echo "word: $word"; done'), ("ssh", "echo host")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hostfile").write_text("n0 slots=4\nn1 slots=4\n")
    start = "import zero_topo; from deepspeed.launcher.runner import main; main()"
    words = [sys.executable, "-c", start, "--hostfile", "hostfile", "train.py"]
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
    }
    env |= {"ZERO_TOPO_BLOCK": value, "HOME": str(tmp_path)}
    done = ended(words, env=env, cwd=tmp_path, timeout=120)
    if '"' in value:
        said = [line for line in done.stderr.splitlines() if "ZERO_TOPO_BLOCK" in line]
        assert (
            done.returncode != 0 and "Traceback" not in done.stderr and "word:" not in done.stdout
        )
        assert len(said) == 1 and "set ZERO_TOPO_BLOCK=FILE.json" in said[0], done.stderr
    else:
        assert f"export ZERO_TOPO_BLOCK={value};" in done.stdout, done.stderr
