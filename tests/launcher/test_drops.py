# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A step that the engine forgets is seen by the comparison with stock ZeRO-3, on which all tests of parity rely.

Untouched the engine equals stock (`test_parity.py`); with one step taken out it must differ. What other steps are for,
threads show (`tests/hazards.md`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launcher.test_parity import STEPS, stock
from tests.launcher.training import Job, advance, block, largest_difference, running
from tests.ranks.worlds import whole_weights
from zero_topo.collectives.queue import Handle
from zero_topo.engine.stage3 import Stage3

pytestmark = pytest.mark.eight_ranks
JOB = Job(zero_topo=block("topo", debug_checks=False), steps=STEPS)


def cross_node_sync(topo: Stage3) -> None:
    topo.gradients.mode.start = lambda *_: Handle(None, (), lambda: None)  # type: ignore[method-assign]


def publish(topo: Stage3) -> None:
    topo.weights.publish = lambda *_: whole_weights(topo)._renew(topo.weights.trained)  # type: ignore[method-assign]


def zeroing_of_gradients(topo: Stage3) -> None:
    end_step = topo.gradients.end_step

    def kept(skipped: bool) -> None:
        held = topo.gradients.buffer.clone()
        end_step(skipped)
        topo.gradients.buffer.copy_(held)

    topo.gradients.end_step = kept  # type: ignore[method-assign]


@pytest.mark.parametrize("drop", [cross_node_sync, publish, zeroing_of_gradients], ids=lambda drop: drop.__name__)
def test_what_the_engine_forgets_is_seen(drop: Callable[[Stage3], None]) -> None:
    with running(JOB) as engine:
        drop(engine.optimizer.topo)
        assert largest_difference(advance(JOB, engine, 0, STEPS), list(stock("fp32", 1))) > 1e-3
