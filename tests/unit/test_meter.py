# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The meter's clock: each second belongs to one phase, the innermost, and to one optimizer step;
its profiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from zero_topo.collectives import meter as module
from zero_topo.collectives.meter import Meter
from zero_topo.plan import PHASES

Wait = Callable[[float], None]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Lets time pass, which otherwise stands still."""
    passed = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: sum(passed))
    return passed.append


def test_collectives_that_send_are_counted() -> None:
    """One by one, by their phase, as long as the meter lives; those without a byte are none."""
    meter = Meter()
    for nbytes in (5, 0, 7):
        meter.record("sync", "world", nbytes)
        meter.end_step()
    meter.record("publish", "world", 1)
    assert meter.calls == {"sync": 2, "publish": 1}


def test_a_second_belongs_to_the_innermost_phase(wait: Wait) -> None:
    """A phase inside another stops the outer one's clock; outside of all it is lost."""
    meter = Meter()
    wait(1)
    with meter.timing("sync"):
        wait(2)
        with meter.timing("publish"):
            wait(4)
        wait(8)
    wait(16)
    with meter.timing("sync"):
        wait(32)
    meter.end_step()
    assert meter.last_seconds == {"sync": 42.0, "publish": 4.0}


def test_seconds_belong_to_their_step(wait: Wait) -> None:
    """The end of a step closes them; what evaluation took since is forgotten; an error stops the
    clock.
    """
    meter = Meter()
    with pytest.raises(ZeroDivisionError), meter.timing("scatter"):
        wait(1)
        raise ZeroDivisionError
    meter.end_step()
    with meter.timing("gather_forward"):
        wait(2)
    meter.reset_step()
    assert meter.last_seconds == {"scatter": 1.0}
    meter.end_step()
    assert meter.last_seconds == {}


def test_a_profiler_sees_each_phase() -> None:
    """Once for each time it runs, by its name."""
    meter = Meter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for phase in (*PHASES, "sync"):
            with meter.timing(phase):
                torch.zeros(1)
    seen = Counter(event.name for event in profile.events() if event.name.startswith("zero_topo."))
    assert seen == Counter(f"zero_topo.{phase}" for phase in (*PHASES, "sync"))
