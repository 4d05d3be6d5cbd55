# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The pytest plugin of a launch: every rank runs the same tests in step, in one process group.

`tests/suite.py` names it to pytest. Then

- the process group is initialised once (gloo, or NCCL on a GPU, through DeepSpeed) and destroyed at
  the end;
- each phase of each test passes on all ranks or fails on all of them (`tests/verdict.py`);
- tests get the fixtures `rank`, `world_size` and `shared_path`;
- rank 0 writes one JSON line per finished phase to the file named by ZERO_TOPO_LAUNCH_REPORT.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import re
import signal
import traceback
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist

from tests.device import ON_GPU
from tests.verdict import Outcome, Outcomes, Verdict

REPORT_VARIABLE = "ZERO_TOPO_LAUNCH_REPORT"
GRACE_S = 20.0  # that a failed rank waits for the others
DIRECTORY_VARIABLE = "ZERO_TOPO_LAUNCH_DIR"

_VERDICT = pytest.StashKey[Verdict]()


def pytest_configure(config: pytest.Config) -> None:
    """Makes hypothesis draw the same examples on every rank."""
    log = os.fdopen(os.dup(2), "w")  # capturing is suspended here: this is the rank's log
    faulthandler.register(signal.SIGTERM, log, chain=True)  # where a rank is that the launcher ends
    hypothesis.settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("ranks")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Initialises the process group and joins the agreement."""
    import deepspeed

    # tmp_path without races
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_directory(f"rank{os.environ['RANK']}"))
    if ON_GPU:  # all ranks on the one there is: NCCL takes them for different machines
        os.environ.update(
            {"LOCAL_RANK": "0", "NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo"}
        )
    backend = "nccl" if ON_GPU else "gloo"
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, timeout=timedelta(minutes=10)
    )
    session.config.stash[_VERDICT] = Verdict(GRACE_S)


def pytest_unconfigure(config: pytest.Config) -> None:
    """After the summary: leaves together with the other ranks."""
    if verdict := config.stash.get(_VERDICT, None):
        verdict.farewell(2.0 if verdict.broken else 10.0)
        if not verdict.broken:
            dist.destroy_process_group()


def pytest_collection_finish(session: pytest.Session) -> None:
    """All ranks must have collected the same tests, or the agreement would compare different
    ones.
    """
    verdict = session.config.stash[_VERDICT]
    names = "\n".join(item.nodeid for item in session.items)
    outcomes = verdict.agree(Outcome("passed", hashlib.sha256(names.encode()).hexdigest()))
    if len({outcome.detail for outcome in outcomes.values()}) > 1:
        pytest.exit("the ranks have collected different tests", returncode=3)
    _report({"event": "collected", "tests": [item.nodeid for item in session.items]})


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Setup passes on all ranks or on none."""
    return (yield from _together(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """The test passes on all ranks or on none."""
    return (yield from _together(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Teardown passes on all ranks or on none."""
    return (yield from _together(item, "teardown"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Rank 0 tells whoever started the launch how each phase ended."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    _report(
        {
            "event": "phase",
            "test": report.nodeid,
            "phase": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
            "text": text,
        }
    )


@pytest.fixture(scope="session")
def rank() -> int:
    """This process's rank in the launch."""
    return dist.get_rank()


@pytest.fixture(scope="session")
def world_size() -> int:
    """Number of ranks in the launch."""
    return dist.get_world_size()


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """An empty directory that all ranks of this test share."""
    return _directory("shared", re.sub(r"[^\w.-]+", "_", request.node.nodeid))


@pytest.fixture(autouse=True)
def a_clean_start() -> Iterator[None]:
    """Every test starts from the same random state, and leaves no garbage to the next."""
    torch.manual_seed(20)
    # What is alive now, such as torch's modules, will stay: collections (two per engine) skip it
    gc.freeze()
    yield
    gc.collect()


def _directory(*parts: str) -> Path:
    path = Path(os.environ[DIRECTORY_VARIABLE], *parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _report(record: dict[str, Any]) -> None:
    path = os.environ.get(REPORT_VARIABLE)
    if path and os.environ["RANK"] == "0":
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")


def _together(item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
    """Runs one phase of a test, then agrees with the other ranks on how it ended."""
    verdict = item.config.stash[_VERDICT]
    error: BaseException | None = None
    result = None
    try:
        result = yield
    except (KeyboardInterrupt, pytest.exit.Exception):
        raise
    except BaseException as caught:
        error = caught
    outcomes = verdict.agree(_outcome(error))
    if verdict.broken:
        item.session.shouldstop = "a rank is stuck, the process group cannot be used any more"
    if error is not None:
        if isinstance(error, Exception):
            error.add_note(_summary(outcomes))
        raise error
    if {outcome.kind for outcome in outcomes.values()} != {"passed"}:
        pytest.fail(
            f"{phase} passed on this rank, but: {_summary(outcomes)}\n{_first_reason(outcomes)}",
            pytrace=False,
        )
    return result


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return Outcome("passed")
    kind = "skipped" if isinstance(error, pytest.skip.Exception) else "failed"
    return Outcome(kind, "".join(traceback.format_exception(error))[-6000:])


def _summary(outcomes: Outcomes) -> str:
    kinds = sorted({outcome.kind for outcome in outcomes.values()})
    ranks = {
        kind: [rank for rank, outcome in outcomes.items() if outcome.kind == kind] for kind in kinds
    }
    return ", ".join(f"{kind} on ranks {ranks[kind]}" for kind in kinds)


def _first_reason(outcomes: Outcomes) -> str:
    """The detail of the lowest rank that says why."""
    for rank, outcome in outcomes.items():
        if outcome.detail:
            return f"rank {rank}:\n{outcome.detail}"
    return "no rank says why; see the ranks' logs"
