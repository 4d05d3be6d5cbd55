# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What only some users need is not asked of every rank: training, its report and a command that
misses an extra.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, ended, output, rank_alone
from zero_topo.cli import main
from zero_topo.observe.runlog import read_metrics, read_report

pytestmark = pytest.mark.long


def test_a_rank_trains_and_reports_without_any_extra(tmp_path: Path) -> None:
    """No typer or matplotlib; the page is made later, where matplotlib is."""
    folder = tmp_path / "run"
    program = [sys.executable, str(ROOT / "tests/e2e/programs/bare.py"), str(folder)]
    said = output(
        program,
        env={**os.environ, **rank_alone(), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        timeout=300,
    )
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "report.json"}
    steps = [line for line in read_metrics(folder) if "lr" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["loss"] > 0 and line["seconds"] > 0 for line in steps)
    peak = read_report(folder)["zero_topo"]["peak"]
    assert peak["min"] > 10_000_000 and not peak["on_device"] and peak["predicted"] > 0
    assert "3 optimizer steps" in said and "Memory of each rank" in said
    assert max(map(len, said.splitlines())) < 200
    assert main(["report", str(folder)]) == 0 and (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        ("typer", "plan", "cli"),
        ("matplotlib", "plan --plot x.png", "plot"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(
    missing: str, words: str, extra: str, tmp_path: Path
) -> None:
    """In one line."""
    arguments = f"{words} --params 20e9 --machine frontier --world-size 64".split()
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from zero_topo.cli import main; "
        f"sys.exit(main({arguments}))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = ended([sys.executable, "-c", code], env=env, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (
        2,
        f"zero-topo: {missing} is not installed: pip install 'zero_topo[{extra}]'\n",
    )
