# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""README and docs keep their word: every command that they show runs, or the tests say by what it
is run.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import shlex
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmarks_command
from tests.documents import commands, starting
from tests.launching import ROOT, output
from zero_topo.cli.app import run as zero_topo_command
from zero_topo.config import ZeroTopoConfig, load_deepspeed_config
from zero_topo.examples.train_gpt import parse_arguments

OF_ZERO_TOPO = starting("zero-topo ")
OF_BENCHMARKS = starting("python -m benchmarks ")
OF_PYTHON = starting("python -m zero_topo.")
OF_MAKE = starting("make ")
OF_PIP = starting("pip ")
OF_SHELL = starting("echo ")
TINY = "--layers 1 --width 32 --context 16 --steps 2"


def test_every_command_is_of_a_kind_that_is_run() -> None:
    """A command in a shell block that none of the tests below would run does not slip in."""
    known = {*OF_ZERO_TOPO, *OF_BENCHMARKS, *OF_MAKE, *OF_PYTHON, *OF_PIP, *OF_SHELL}
    assert known and set(commands()) == known
    assert {"make demo", "make test"} <= set(OF_MAKE)
    assert len(OF_PIP) == 2  # run by test_packaging.py
    assert len(OF_SHELL) == 1  # run by test_hook_file.py


# Added to a benchmark's command, so that it takes seconds.
SMALLER = {
    "python -m benchmarks quantizers": "--size 65536 --repeats 1 --threads 1 --dtypes fp32 "
    "--blocks 256",
    "python -m benchmarks cluster": "--schemes topo --micro-batches 1 --warmup 1 --steps 2 "
    "--params 1e5 --layers 1",
    "python -m benchmarks convergence --one-process": "--steps 10 --seeds 1 --params 5e4 --layers "
    "1",
    "python -m benchmarks convergence": "--schemes topo --steps 10 --seeds 1 --params 5e4 --layers "
    "1",
}


def smaller(line: str, folder: Path) -> str:
    """The command as shown, its config in a folder of ours; of a benchmark, with less to
    measure.
    """
    if "ds_config.json" in line:  # a reader's own
        zeropp = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zeropp,
            "zero_topo": {},
        }
        (folder / "ds_config.json").write_text(json.dumps(config))
        return line.replace("ds_config", f"{folder}/ds_config")
    found = [more for start, more in SMALLER.items() if line.startswith(start)]
    return f"{line} {found[0]} --record {folder}/record.json" if found else line


def marked(line: str) -> Any:
    """A benchmark that trains takes long, made smaller too."""
    return pytest.param(line, marks=[pytest.mark.long] * line.startswith(tuple(SMALLER)))


@pytest.mark.parametrize("line", [marked(line) for line in (*OF_ZERO_TOPO, *OF_BENCHMARKS)])
def test_zero_topo_commands_run(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each `zero-topo` command and each benchmark succeeds in the checkout and prints something."""
    if line.startswith("python -m benchmarks cluster") and (os.geteuid() or not shutil.which("tc")):
        pytest.skip("the emulated cluster needs root and tc")
    monkeypatch.chdir(ROOT)
    line = smaller(line, tmp_path)
    out = io.StringIO()
    with redirect_stdout(out):
        program, words = (
            (benchmarks_command, 3) if line.startswith("python") else (zero_topo_command, 1)
        )
        assert program(shlex.split(line)[words:]) == 0
    assert len(out.getvalue().splitlines()) > (0 if "--dry-run" in line else 2)


@pytest.mark.parametrize("line", OF_PYTHON)
def test_python_lines_run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are run by themselves succeed in the checkout and print something."""
    _, _, module, *words = shlex.split(line)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not end.value.code and out.getvalue()


def dry_run(line: str) -> list[str]:
    """The commands that a `make` line would execute, but for setting up."""
    command = [*shlex.split(line), "--dry-run", f"--old-file={ROOT}/.venv/.set-up"]
    return output(command, cwd=ROOT).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("line", [line for line in OF_MAKE if "demo" in line])
def test_demo_lines_start_the_example_with_a_config_that_loads(line: str) -> None:
    """Each `make demo` gives the example arguments it understands, and a config with a zero_topo
    block.
    """
    (launch,) = [text for text in dry_run(line) if "train_gpt.py" in text]
    args = parse_arguments(shlex.split(launch.partition("train_gpt.py")[2]))
    assert ZeroTopoConfig.from_ds_config(load_deepspeed_config(ROOT / args.deepspeed_config))


def test_make_test_and_test_long_run_every_test_once() -> None:
    """`make test` itself cannot run inside a test: it is what CI runs, and it leaves nothing out
    but the long tests.
    """
    with_tests = {path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {
        ROOT / "tests" / "launcher"
    }
    for folder in with_tests:  # tests/e2e starts tests/launcher
        usual, late = (
            marks(line, str(folder.relative_to(ROOT))) for line in ("make test", "make test-long")
        )
        assert [eval(mark, {"long": False}) for mark in usual].count(True) == 1, folder
        assert not any(eval(mark, {"long": True}) for mark in usual), folder
        assert any(eval(mark, {"long": True}) for mark in late), folder


def marks(line: str, folder: str) -> list[str]:
    """What the `pytest` lines of a target say of a folder after `-m`; True where they say
    nothing.
    """
    of_folder = [
        words
        for text in dry_run(line)
        if text.startswith("pytest") and folder in (words := shlex.split(text))
    ]
    return [words[words.index("-m") + 1] if "-m" in words else "True" for words in of_folder]


@pytest.mark.long
def test_make_demo_trains_and_reports(tmp_path: Path) -> None:
    """The first command a stranger types works, here with a small model and two steps on the demo's
    eight ranks.
    """
    words = f"{TINY} --run-dir {tmp_path / 'run'}"
    command = ["make", "demo", f"--old-file={ROOT}/.venv/.set-up", f"ARGS={words}"]
    said = output(command, cwd=ROOT, timeout=300)
    assert "2 steps on 8 ranks" in said and "Sent by each rank" in said
    assert (tmp_path / "run" / "bytes.png").exists()
