# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused in one line, on every rank alike, before any process group exists,
and nothing hangs.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launch, LaunchSettings, launch

Refused = tuple[Launch, list[dict[str, Any]]]
RANKS = 2
TIMEOUT_S = 240.0
PROGRAMS = Path(__file__).parent / "programs"

TREE = {"emulated": {"nodes": 1, "gpus_per_node": 1, "gcds_per_gpu": RANKS}}
GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "zero_topo": {"topology": TREE},
}


def topo(**keys: Any) -> dict[str, Any]:
    """GOOD with keys of the block."""
    return {**GOOD, "zero_topo": {"topology": TREE, **keys}}


# name -> (config, what the line names); one for each check, whose cases units try
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "deepspeed_key": ({**GOOD, "zero_optimization": {"stage": 2}}, "zero_optimization.stage = 2"),
    "misspelt_block": ({**GOOD, "zero-topo": {}}, "zero-topo"),
    "block_key": (topo(wieghts=2), "zero_topo.wieghts"),
    "plan": (topo(weights=2, gradients=1, optimizer=2), "gradients"),
    "world_size": (
        topo(topology={"emulated": {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}}),
        "8 ranks",
    ),
    "preset": (topo(topology="fronteer"), "fronteer"),
}
ARGUMENTS = ("mpu", "mesh_param", "remote_device")
ODD = {
    "block": ("rank 1 of host ", 'zero_topo.accumulation_dtype "bf16" in place of "fp32"'),
    "model": (
        "rank 1 of host ",
        'model.bias ["torch.float32", true, 5] in place of ["torch.float32", true, 4]',
    ),
    "machine": ("weights degree 3 does not divide the world of 2 ranks",),
    "hosts": ("topology 'custom' has ",),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Refused:
    """One launch that tries every case in every way; what each rank got."""
    path = tmp_path_factory.mktemp("refused")
    (path / "cases.json").write_text(
        json.dumps({"good": GOOD, **{name: case[0] for name, case in CASES.items()}})
    )
    command = [str(PROGRAMS / "refused.py"), str(path / "cases.json"), str(path)]
    done = launch(command, LaunchSettings(path / "logs", RANKS, TIMEOUT_S, forked=True))
    files = [path / f"{rank}.json" for rank in range(RANKS)]
    assert all(file.is_file() for file in files), done.tails()
    return done, [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_refused_in_one_line_everywhere(name: str, refused: Refused) -> None:
    """Whichever call gets the config and in whichever form, on whichever rank: one line, and no
    process group yet.
    """
    said = [*chain.from_iterable(ways[name].values() for ways in refused[1])]
    assert len(said) == 6 * RANKS
    assert_refused(said, CASES[name][1])


def assert_refused(said: list[dict[str, Any]], *words: str, group: bool = False) -> None:
    """Everywhere the same ValueError, in one line with these words; whether there is a process
    group by then.
    """
    first = said[0]
    assert [other for other in said if other != first] == []
    assert (first["type"], first["group"]) == ("ValueError", group), first
    assert "\n" not in first["text"] and all(word in first["text"] for word in words)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_refused_in_one_line_everywhere(name: str, refused: Refused) -> None:
    """What contradicts zero_topo in a call's arguments rather than in the JSON is refused as
    early.
    """
    assert_refused([ways["arguments"][name] for ways in refused[1]], name)


def test_an_engine_without_a_block_is_stocks_own(refused: Refused) -> None:
    """The hook alone changes nothing."""
    stock = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
    assert [ways["without_block"] for ways in refused[1]] == [stock] * RANKS


@pytest.mark.parametrize("name", ODD)
def test_what_only_the_ranks_together_find_ends_each_with_one_line(
    name: str, refused: Refused
) -> None:
    """A rank with another config or model is named on every rank, and none waits for it; a plan
    that does not fit the machine that they found, and a machine that they did not find.

    All else that ranks agree on is in ``tests/ranks/test_agreement.py``.
    """
    assert_refused([ways["odd"][name] for ways in refused[1]], *ODD[name], group=True)


def test_ranks_may_log_and_measure_differently(refused: Refused) -> None:
    """They train on."""
    assert [ways["odd"]["nothing"]["text"] for ways in refused[1]] == ["returned 1.0"] * RANKS


def test_a_machine_that_is_not_there_ends_the_launch(refused: Refused) -> None:
    """Two nodes are declared, all ranks see one host: that is said once, and the launch ends by
    itself.
    """
    assert_ended_with(refused[0], "topology 'custom' has ", "or pretend the nodes with")


def test_a_rank_without_the_block_does_not_hang_the_others(tmp_path: Path) -> None:
    """It goes on with stock DeepSpeed; the rank with the block names it in one line and ends, so
    the launch does.

    The script may not be edited: `zero_topo.run` runs it, and the line names the script's own.
    """
    stock = {key: value for key, value in GOOD.items() if key != "zero_topo"}
    for rank, config in enumerate([GOOD, stock]):
        (tmp_path / f"{rank}.json").write_text(json.dumps(config))
    script = str(PROGRAMS / "plain.py")
    command = ["zero_topo.run", script, str(tmp_path / "{rank}.json"), str(tmp_path / "meeting")]
    settings = LaunchSettings(tmp_path / "logs", RANKS, TIMEOUT_S, module=True, forked=True)
    done = launch(command, settings)
    assert_ended_with(done, "", '1 of 2 ranks have no "zero_topo" block in their DeepSpeed config')
    assert " (plain.py:" in done.log(0)


def assert_ended_with(done: Launch, begin: str, part: str) -> None:
    """The launch failed by itself, in time; rank 0 printed the error in one line, the others
    nothing of it.
    """
    assert not done.timed_out, done.tails()
    assert done.returncode != 0
    assert done.seconds < TIMEOUT_S
    lines = [line for log in done.logs() for line in log.splitlines() if "zero_topo, rank " in line]
    assert len(lines) == 1, done.tails()
    assert re.match(rf"(\[rank0\]: )?zero_topo, rank 0: {begin}", lines[0]) and part in lines[0]
    assert "Traceback" not in "".join(done.logs()), done.tails()
