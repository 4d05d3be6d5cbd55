# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Wrong input of every command that plans, reports or measures: one line on stderr and
exit status 2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import Run
from tests.launching import ROOT

FRONTIER = "--machine frontier --nodes 48"
START = '{"train_batch_size": 64, "zero_optimization": {"stage": 3}'
FILES = {
    "plain.json": START + "}",
    "mode.json": START + ', "zero_topo": {"sync": {"mode": {}}}}',
    "long.json": START + f', "zero_topo": {{"topology": "{"x" * 9999}"}}}}',
}

WRONG = {
    "plna": "Did you mean 'plan'",
    "plan": "--params",
    f"plan --params 1e400 {FRONTIER}": "is more than",
    f"plan --params 1B --micro-batches 1000000000 {FRONTIER}": "--micro-batches",
    "plan --params many": "20e9, 20B or 350M",
    "plan --params 1B --machine frontier --world-size 12": "8 ranks per node",
    f"plan {FRONTIER}": "give --params, such as 20B, or --model",
    "plan --params 1B --machine frontir --nodes 2": "did you mean 'frontier'",
    "plan --params 1B --machine frontier --nodes 2 --world-size 8": "give one of the two",
    "plan --params 1B --nodes 2": "of which machine",
    "plan --params 1B --machine single-node --nodes 2": "give --ranks",
    "plan --params 1B --machine {broken} --nodes 2": "not valid JSON",
    f"plan --params 10 {FRONTIER}": "too few",
    f"plan --model gpt-5 {FRONTIER}": "neither a file nor a known name",
    f"plan --model gpt2 --params 1B {FRONTIER}": "has a shape of its own",
    "plan --params 1B --machine frontier --ranks 8,16": "--ranks '8,16' is not a positive",
    f"plan --params 1B {FRONTIER} --tensor-parallel 3": "3 tensor parallel ranks do not divide",
    "topology --from no/such.json": "no/such.json",
    "topology --from "
    '{"nodes":9999999,"gpus_per_node":1,"ranks_per_gpu":1}': "more than the 1,048,576 ranks",
    "topology --from frontier --world-size many": "--ranks 'many'",
    "topology --from frontier --jsno": "--jsno",
    "check missing.json": "no such file",
    "check FOLDER": "cannot be read (Is a directory)",
    "check FOLDER/plain.json": 'has no "zero_topo" block',
    "check FOLDER/mode.json": 'zero_topo.sync.mode: "{}"',
    "check FOLDER/long.json": "xxx...",
    "report FOLDER": "has no report.json",
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
