# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Records for DeepSpeed's comms logger: its definitions, each group's own size."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.observe.monitor import NAMES, comms_timing, record

GATHER: tuple[Any, int, bool] = ("all_gather", 300, True)
SCATTER: tuple[Any, int, bool] = ("all_to_all", 300, True)


def group(phase: str, meter: Meter | None = None, members: int = 4) -> Group:
    """A metered group of a node."""
    return Group(1, members, 0, tuple(range(members)), "node", None, meter or Meter()).metered(
        phase
    )


def begun(group: Group, exchange: tuple[Any, int, bool], handle: Handle[Tensor]) -> Handle[Tensor]:
    """An exchange in which this rank sends as many bytes, and its given handle."""
    op, nbytes, _ = exchange
    table = torch.zeros(group.size, nbytes // (group.size - 1), dtype=torch.uint8)
    with patch.object(group, f"_{op}", lambda _: handle):
        return group.begin(op, table[0] if op == "all_gather" else table)


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
    even=st.booleans(),
    milliseconds=st.floats(1e-3, 1e5),
)
def test_sizes_and_rates_are_those_deepspeed_would_log_in_a_world_of_that_size(
    op: str, members: int, part: int, even: bool, milliseconds: float
) -> None:
    """DeepSpeed's own function, which assumes that the group is the world.

    Where messages differ between ranks, the size is one for all: DeepSpeed compares stragglers size
    by size in collectives, and other sizes on each rank would end in a hang.
    """
    import deepspeed.comm
    from deepspeed.utils.comms_logging import calc_bw_log

    _, size, ours = record(
        group("sync", members=members), op, (members - 1) * part, even, milliseconds / 1e3
    )
    passed = part if op == "all_gather" else members * part
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(deepspeed.comm, "get_world_size", lambda: members)
        algorithm, bus = calc_bw_log(NAMES[op], passed, milliseconds)
    assert size == (passed if even else 0)
    assert ours == pytest.approx((milliseconds, algorithm, bus))


def test_messages_that_may_differ_between_ranks_say_so() -> None:
    """Those of known sizes do; what all send alike does not."""
    exchanges: list[tuple[str, bool, int]] = []
    meter, table = Meter(), torch.zeros(2, 3)
    meter.listener = lambda _, op, nbytes, even: exchanges.append((op, even, nbytes))
    with pytest.MonkeyPatch.context() as patches:
        for name in ("_all_gather", "_all_to_all"):
            patches.setattr(Group, name, lambda *_: Handle(table))
        peers = group("sync", meter, members=2)
        peers.all_to_all(table)
        peers.gather(table[0])
        peers.begin("all_to_all", table, [1, 1], [1, 1])
    assert exchanges == [
        ("all_to_all", True, 12),
        ("all_gather", True, 12),
        ("all_to_all", False, 12),
    ]


@pytest.mark.parametrize(
    ("switches", "listens"),
    [
        ({"enabled": True, "prof_all": True}, (True, True)),
        ({"enabled": False, "prof_all": True}, (False, False)),
        ({"enabled": True, "prof_all": False}, (False, False)),
        ({"enabled": True, "prof_all": False, "prof_ops": ["all_to_all_single"]}, (False, True)),
    ],
)
def test_deepspeeds_switches_decide(
    logger: Any, switches: dict[str, Any], listens: tuple[bool, bool]
) -> None:
    """They may be turned while training."""
    timing = partial(comms_timing, logger, lambda line, ranks: None)
    for name, value in switches.items():
        setattr(logger, name, value)
    assert (
        tuple(timing(group("scatter"), *exchange) is not None for exchange in (GATHER, SCATTER))
        == listens
    )


def test_what_nobody_listens_to_is_not_waited_for() -> None:
    """Timing an exchange ends its overlap."""
    meter, work = Meter(), MagicMock()
    begun(group("gather_forward", meter), GATHER, Handle(MagicMock(), work))
    meter.end_step()
    assert meter.last_step == {("gather_forward", "node"): 300} and not work.wait.called
