# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a run chose is seen where nobody set up logging, once, and what a user has set up is left
alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zero_topo.observe import log
from zero_topo.observe.log import OTHERS_WAIT_S


@contextmanager
def a_script() -> Iterator[logging.Logger]:
    """Logging as nobody has set it up, neither pytest nor another test; our logger."""
    ours = logging.getLogger("zero_topo")
    handlers, own, level = logging.root.handlers, ours.handlers, ours.level
    logging.root.handlers, ours.handlers = [], []
    try:
        yield ours
    finally:
        logging.root.handlers, ours.handlers = handlers, own
        ours.setLevel(level)


@pytest.mark.parametrize(
    ("before", "rank", "expected"),
    [
        ("", 0, ["[INFO] zero_topo: choice 0", "[INFO] zero_topo: choice 1", "[WARNING] trouble"]),
        ("", 1, ["[WARNING] trouble"]),
        ("quiet", 0, ["[WARNING] trouble"]),
        ("own", 0, ["mine zero_topo: choice 0", "mine zero_topo: choice 1", "mine trouble"]),
    ],
)
def test_choices_are_seen_once(
    before: str, rank: int, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two engines' on rank 0, warnings on all; the user's level and handlers are used."""
    with a_script() as ours:
        if before == "own":
            logging.basicConfig(format="mine %(message)s", stream=sys.stderr)
        ours.setLevel(logging.WARNING if before == "quiet" else logging.NOTSET)
        for engine in range(2):
            log.show_log(rank)
            log.log_notes(rank, [f"choice {engine}"])
        logging.getLogger("zero_topo.sync.of_its_own").warning("trouble")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(expected)
    assert all(line.endswith(end) for line, end in zip(lines, expected, strict=True)), lines


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("3", [OTHERS_WAIT_S])])
def test_a_refusal_that_nobody_catches_is_one_line(
    rank: str,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 says it at once; a rank that still runs later was refused alone. Other errors keep
    their traceback.
    """
    slept: list[float] = []
    shown: list[BaseException] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(log.time, "sleep", slept.append)
    hook = log.one_line(lambda kind, error, trace: shown.append(error))
    with pytest.raises(ValueError, match="a typo") as mistake, log.refusals():
        raise ValueError("a typo; mend it")
    hook(mistake.type, mistake.value, mistake.tb)
    line = f"(test_log.py:{mistake.tb.tb_lineno})"
    assert capsys.readouterr().err == f"zero_topo, rank {rank}: a typo; mend it {line}\n"
    assert slept == waits and not shown
    hook(KeyError, KeyError("ours"), None)
    assert len(shown) == 1
