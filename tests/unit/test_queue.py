# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ordered queues on a CPU: without overlap work has ended when it has begun, with overlap when it
is waited for.
"""

from __future__ import annotations

import pytest
import torch

from zero_topo.collectives.queue import Handle, OrderedQueue


@pytest.mark.parametrize("overlap", [False, True])
def test_work_ends_at_once_or_in_the_order_in_which_it_began(overlap: bool) -> None:
    """Waiting for the second of three ends the first as well; `finish` ends the rest."""
    queue, ended = OrderedQueue(torch.device("cpu"), overlap), list[int]()
    handles = [queue.run(lambda n=n: Handle().then(lambda _: ended.append(n))) for n in range(3)]  # type: ignore[misc]
    assert ended == ([] if overlap else [0, 1, 2])
    handles[1].wait()
    assert ended[:2] == [0, 1]
    queue.finish()
    assert ended == [0, 1, 2]


def test_a_handle_of_several_stages_ends_with_the_last() -> None:
    """Each stage may begin another exchange; ``then`` keeps the stages, and waiting runs all that
    are left.
    """
    done = list[str]()

    def stage(name: str, following: Handle[str] | None = None) -> Handle[str]:
        def finish(_: object) -> str | Handle[str]:
            done.append(name)
            return following or name

        return Handle(None, lambda: None).then(finish)

    handle = stage("inside", stage("across")).then(lambda name: f"decoded {name}")
    handle.wait(1)
    assert done == ["inside"]
    ended = [handle.ended]
    assert handle.wait() == "decoded across" == handle.wait()
    ended.append(handle.ended)
    assert ended == [False, True]
    assert done == ["inside", "across"]
