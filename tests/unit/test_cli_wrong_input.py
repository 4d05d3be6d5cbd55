# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Wrong input of every command that plans, reports or measures: one line on stderr and
exit status 2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from tests.commands import Run
from tests.launching import ROOT

FRONTIER = "--machine frontier --nodes 48"
ABSENT = f"{'a-folder' * 20}/none.json"
START = '{"train_batch_size": 64, "zero_optimization": {"stage": 3}'
FILES = {
    "broken.json": "{",
    "text.json": "no model",
    "other.json": "{}",
    "plain.json": START + "}",
    "mode.json": START + ', "zero_topo": {"sync": {"mode": {}}}}',
    "modes.json": START + ', "zero_topo": {"sync": {"mode": [1]}}}',
    "long.json": START + f', "zero_topo": {{"topology": "{"x" * 9999}"}}}}',
}

WRONG = {
    "plna": "Did you mean 'plan'",
    "plan": "--params",
    f"plan --params 1e400 {FRONTIER}": "is more than",
    f"plan --params {'9' * 400} {FRONTIER}": "not a positive whole number",
    f"plan --params 1B --micro-batches 1000000000 {FRONTIER}": "--micro-batches",
    "plan --params many": "20e9, 20B or 350M",
    "plan --params 1B --machine frontier --world-size 12": "8 ranks per node",
    "plan --params 1B --micro-batches 0": "--micro-batches",
    f"plan {FRONTIER}": "give --params, such as 20B, or --model",
    "plan --params 1B --machine frontir --nodes 2": "did you mean 'frontier'",
    "plan --params 1B --machine frontier --nodes 0": "--nodes",
    "plan --params 1B --machine frontier --nodes 2 --world-size 8": "give one of the two",
    "plan --params 1B --nodes 2": "of which machine",
    "plan --params 1B --machine single-node --nodes 2": "give --ranks",
    "plan --params 1B --machine {broken} --nodes 2": "not valid JSON",
    f"plan --params 10 {FRONTIER}": "too few",
    f"plan --model gpt-5 {FRONTIER}": "neither a file nor a known name",
    f"plan --model FOLDER/text.json {FRONTIER}": "neither JSON nor YAML",
    f"plan --model gpt2 --params 1B {FRONTIER}": "has a shape of its own",
    "plan --params 1B --machine frontier --ranks 8,16": "--ranks '8,16' is not a positive",
    "plan --params 1B --machine frontier --ranks 1e400": "more than 1,048,576",
    f"plan --params 1B {FRONTIER} --tensor-parallel 3": "3 tensor parallel ranks do not divide",
    f"plan --params 1B {FRONTIER} --recommend": "--recommend",
    "topology --from frontir": "did you mean 'frontier'?",
    "topology --from no/such.json": "no/such.json",
    "topology --from {broken": "not valid JSON",
    "topology --from "
    '{"nodes":9999999,"gpus_per_node":1,"ranks_per_gpu":1}': "more than the 1,048,576 ranks",
    "topology --from frontier --world-size many": "--ranks 'many'",
    "topology --from frontier --jsno": "--jsno",
    "check missing.json": "no such file",
    "check FOLDER": "cannot be read (Is a directory)",
    "check FOLDER/plain.json": 'has no "zero_topo" block',
    "check FOLDER/mode.json": 'zero_topo.sync.mode: "{}"',
    "check FOLDER/modes.json": 'zero_topo.sync.mode: "[1]"',
    "check FOLDER/long.json": "xxx...",
    "report FOLDER": "has no report.json",
}

WRONG_BENCHMARKS = {
    "quantizers --size 10": "too small to measure",
    "quantizers --dtypes int3": "dtype int3 cannot be quantized",
    "quantizers --blocks 100": "block_size 100 is not supported",
    "quantizers --device tpu": "device tpu is not here",
    "cluster --spec t9": "neither one of t8, t16, t32",
    "cluster --schemes topo,topp": "did you mean 'topo'",
    "cluster --schemes topo,topo": "each named once",
    "cluster --micro-batches 1,1": "different numbers",
    "cluster --params many": "not a positive whole number",
    "convergence --steps 3": "greater than or equal to 10",
    "convergence --schemes tpo": "did you mean",
    "convergence --rates 1e-3,fast": "rate 'fast' is not a positive number; write it as 1e-3",
    "convergence --more": "name the record to go on with: --record FILE",
    "convergence --more --record README.md": "record README.md: Expecting value",
    "convergence --more --record "
    "benchmarks/records/cluster-t8.json": "was not written by python -m benchmarks convergence",
    "scale --ranks 12": "12 ranks fill no nodes of 8",
    "scale --schemes stock": "'stock' is measured on real ranks",
    "scale --schemes topoo": "unknown scheme 'topoo'",
    "scale --numel 0": "0",
}


def assert_refused(status: int, out: str, err: str, message: str) -> None:
    """Status 2, nothing printed, and one line that has the message."""
    assert (status, out) == (2, "")
    assert err.startswith("zero-topo: ") and err.count("\n") == 1 and message in err
    assert len(err) < 520, "longer than a person reads"


@pytest.mark.parametrize(
    ("words", "message"), WRONG.items(), ids=[words.replace(str(ROOT), "")[:60] for words in WRONG]
)
def test_wrong_input_is_one_line_on_stderr_and_status_2(
    run: Run, tmp_path: Path, words: str, message: str
) -> None:
    """Nothing is printed, written, timed or started before it."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert_refused(*run(*words.replace("FOLDER", str(tmp_path)).split()), message)


@pytest.mark.parametrize(("words", "message"), WRONG_BENCHMARKS.items(), ids=WRONG_BENCHMARKS)
def test_benchmarks_refuse_wrong_options_alike(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before anything is built, and whatever user asks."""
    for name in ("broken.json", "other.json"):
        (tmp_path / name).write_text(FILES[name])
    status = benchmarks(words.replace("FOLDER", str(tmp_path)).split())
    assert_refused(status, *capsys.readouterr(), message)
