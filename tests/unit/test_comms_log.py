# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Records for DeepSpeed's comms logger: its definitions, each group's own size."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.collectives.meter import Counted, Exchange, Meter
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Torch, as_bytes
from zero_topo.hook.monitor import NAMES, CommsLog, row

GATHER = Exchange("all_gather", "gather_forward", "node", 4, 300, True)
SCATTER = Exchange("all_to_all", "scatter", "node", 4, 300, True)


@pytest.fixture
def logger() -> Any:
    """One of DeepSpeed's, of this test alone."""
    from deepspeed.utils.comms_logging import CommsLogger

    logger = CommsLogger()
    logger.enabled, logger.prof_all, logger.prof_ops = True, True, []
    return logger


@given(
    op=st.sampled_from(["all_gather", "all_to_all"]),
    members=st.integers(2, 64),
    part=st.integers(1, 10**9),
    milliseconds=st.floats(1e-3, 1e5),
)
def test_sizes_and_rates_are_those_deepspeed_would_log_in_a_world_of_that_size(
    op: Literal["all_gather", "all_to_all"], members: int, part: int, milliseconds: float
) -> None:
    """DeepSpeed's own function, told that the group is the world."""
    import deepspeed.comm
    from deepspeed.utils.comms_logging import calc_bw_log

    ours = row(Exchange(op, "sync", "world", members, (members - 1) * part, True), milliseconds / 1e3)
    passed = part if op == "all_gather" else members * part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.comm, "get_world_size", lambda: members)
        algorithm, bus = calc_bw_log(NAMES[op], passed, milliseconds)
    assert ours.size == passed
    assert [ours.milliseconds, ours.algorithm, ours.bus] == pytest.approx([milliseconds, algorithm, bus])


def test_messages_that_may_differ_between_ranks_say_so() -> None:
    """Those of known sizes do; what all send alike does not."""
    told: list[Exchange] = []
    meter, table = Meter(), torch.zeros(2, 3)
    meter.listener = SimpleNamespace(listens=told.append)
    sent = Handle(None, (), lambda: as_bytes(table).view(2, -1))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_all_gather", "_all_to_all", "_all_to_all_uneven"):
            patch.setattr(Torch, name, lambda *_: sent)
        peers = Torch(1, 2, 0, (0, 1), "world", None).metered(Counted(meter, "sync"))
        peers.scatter(table)
        peers.gather(table[0])
        peers.scatter_known(table, [1, 1], [1, 1])
    assert [(exchange.op, exchange.even, exchange.nbytes) for exchange in told] == [
        ("all_to_all", True, 12),
        ("all_gather", True, 12),
        ("all_to_all", False, 12),
    ]


def test_messages_that_differ_between_ranks_share_one_size() -> None:
    """DeepSpeed compares stragglers size by size in collectives: other sizes on each rank would end in a hang."""
    rows = [row(Exchange("all_to_all", "sync", "world", 4, sent, even=False), 1.0) for sent in (0, 10, 999)]
    assert {(row.name, row.size) for row in rows} == {("all_to_all_single | zero_topo sync | world", 0)}
    assert [row.bus for row in rows] == pytest.approx([0.0, 8e-8, 7.992e-6])


def test_deepspeeds_summary_counts_each_exchange(logger: Any) -> None:
    """And its work has been waited for before the clock stops."""
    waited: list[str] = []
    wait = partial(waited.append, "waited")
    meter, lines = Meter(enabled=False), []
    meter.listener = CommsLog(logger, lambda line, ranks: lines.append(line))
    for _ in range(3):
        assert meter.exchange(GATHER, lambda: Handle(wait, (), lambda: "came")).wait() == "came"
    logger.verbose = True
    meter.exchange(SCATTER, lambda: Handle(None, (), list))
    told = logger.get_operation_summary("all_gather_into_tensor | zero_topo gather_forward | node")
    assert list(told) == [100] and told[100]["count"] == 3 == len(waited)
    assert told[100]["tput_avg_gbps"] == pytest.approx(told[100]["busbw_avg_gbps"] * 4 / 3)
    assert logger.get_total_operations() == 4
    assert len(lines) == 1 and lines[0].startswith(
        "comm op: all_to_all_single | zero_topo scatter | node | time (ms): "
    )


@pytest.mark.parametrize(
    ("switches", "listens"),
    [
        ({"enabled": True, "prof_all": True}, (True, True)),
        ({"enabled": False, "prof_all": True}, (False, False)),
        ({"enabled": True, "prof_all": False}, (False, False)),
        ({"enabled": True, "prof_all": False, "prof_ops": ["all_to_all_single"]}, (False, True)),
    ],
)
def test_deepspeeds_switches_decide(logger: Any, switches: dict[str, Any], listens: tuple[bool, bool]) -> None:
    """They may be turned while training."""
    log = CommsLog(logger, lambda line, ranks: None)
    for name, value in switches.items():
        setattr(logger, name, value)
    assert (log.listens(GATHER), log.listens(SCATTER)) == listens


def test_what_nobody_listens_to_is_not_waited_for() -> None:
    """Timing an exchange ends its overlap."""
    meter, work = Meter(), MagicMock()
    meter.exchange(GATHER, lambda: Handle(work, (), list))
    meter.end_step()
    assert meter.last_step() == {("gather_forward", "node"): 300} and not work.wait.called
