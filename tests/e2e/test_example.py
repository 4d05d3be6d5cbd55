# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The example as a program: mistakes, training, checkpoint, report, with and without zero_topo, on
two ranks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import ROOT, Launch, LaunchSettings, launch, rank_alone
from zero_topo.examples.train_gpt import main
from zero_topo.observe.runlog import read_metrics

Runs = tuple[Path, Launch, Launch]
SCRIPT = "zero_topo/examples/train_gpt.py"
SMALL = ["--layers", "1", "--width", "32", "--context", "16", "--warmup", "2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Six steps under topo with a checkpoint, by DeepSpeed's own launcher, then two more from it
    under stock ZeRO-3: a folder and both launches.
    """
    folder = tmp_path_factory.mktemp("example")
    (folder / "text").write_bytes((ROOT / "LICENSE").read_bytes() * 5)
    block = {
        "topology": {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 1}},
        "scheme": "topo",
        "weights": "world",  # with one rank a node nothing would be gathered
        "gradients": "world",
    }
    common = [SCRIPT, *SMALL, "--data", str(folder / "text"), "--deepspeed_config"]
    config = json.loads((ROOT / "configs/demo.json").read_text())
    del config["zero_topo"]

    def run(name: str, more: dict[str, Any], *words: str) -> Launch:
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**config, "gradient_accumulation_steps": 2, **more}))
        settings = LaunchSettings(folder / f"log-{name}", 2, 600, forked=not more)
        return launch([*common, str(path), "--run-dir", str(folder / name), *words], settings)

    saved = str(folder / "saved")
    topo = run("topo", {"zero_topo": block}, "--steps", "6", "--save", saved)
    return folder, topo, run("stock", {}, "--steps", "8", "--resume", saved)


def test_the_example_learns_and_writes_its_report(runs: Runs) -> None:
    """Loss falls, and the report's files lie in the run's folder."""
    folder, topo, _ = runs
    assert topo.returncode == 0, topo.tails()
    report = json.loads((folder / "topo" / "report.json").read_text())
    assert report["steps"] == 6 and report["last_loss"] < report["first_loss"] - 0.1
    names = {path.name for path in (folder / "topo").iterdir()}
    pictures = {f"{name}.png" for name in ("loss", "bytes", "memory")}
    assert names == {"metrics.jsonl", "report.json", "report.html"} | pictures
    log = topo.log(0)
    assert (
        "Sent by each rank" in log
        and "Between nodes: a rank sends" in log
        and re.search(r"step 3/6  loss [\d.]+ ", log)
    )


def test_rank_0_alone_says_what_was_chosen_for_a_run(runs: Runs) -> None:
    """With nobody's logging set up, under a DeepSpeed whose own log shows only warnings; each line
    once.
    """
    _, topo, stock = runs
    said = [line for line in topo.log(0).splitlines() if "[INFO] zero_topo: " in line]
    for choice in ("zero_topo: kernels on cpu: ", "zero_topo: machine: "):
        assert len([line for line in said if choice in line]) == 1, topo.tails()
    words = ("loss", "Sent by", "zero_topo: ")
    assert not [word for word in words if word in topo.log(1)]
    assert "zero_topo: " not in stock.log(0)


def test_a_run_goes_on_from_a_checkpoint_under_stock_zero3(
    runs: Runs,
) -> None:
    """The example resumes at the step where it stopped, with the loss it had, and says that nothing
    is metered.
    """
    folder, _, stock = runs
    assert stock.returncode == 0, stock.tails()
    before = json.loads((folder / "topo" / "report.json").read_text())
    lines = read_metrics(folder / "stock")
    assert [line["step"] for line in lines if "loss" in line] == [7, 8]
    assert lines[0]["loss"] < before["first_loss"] - 0.1
    assert "This run used stock ZeRO-3" in stock.log(0)


@pytest.mark.parametrize(
    ("config", "words", "expected"),
    [
        ("missing.json", [], "missing.json"),
        ("configs/demo.json", ["--data", "nowhere"], "--data nowhere does not exist"),
        ("configs/demo.json", [], "8 ranks but the job has 3"),
    ],
)
def test_mistakes_end_in_one_line_before_any_group(
    config: str, words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing config, missing data and a machine that does not fit the ranks: exit status not 0,
    no traceback.
    """
    monkeypatch.chdir(ROOT)
    for name, value in {**rank_alone(), "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--deepspeed_config", config, *words])
    with pytest.raises(SystemExit, match=f"^train_gpt: .*{expected}") as caught:
        main()
    assert "\n" not in str(caught.value) and not torch.distributed.is_initialized()
