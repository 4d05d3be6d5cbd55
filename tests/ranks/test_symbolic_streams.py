# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The symbolic device finds what it is there for, and lets pass what is ordered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.streams import MAIN, Device, RaceError, symbolic_device


def reads_on_the_host(device: Device, ordered: bool) -> None:
    """A copy to page-locked memory, which the host reads."""
    there, here = torch.ones(4), torch.zeros(4)
    device.host(here)
    here.copy_(there, non_blocking=True)
    if ordered:
        device.current_stream().synchronize()
    here.sum()


def writes_on_the_host(device: Device, ordered: bool) -> None:
    """A copy from page-locked memory, which the host then writes."""
    there, here = torch.zeros(4), torch.ones(4)
    device.host(here)
    there.copy_(here, non_blocking=not ordered)
    here.zero_()


def adds_in_place(device: Device, ordered: bool) -> None:
    """Autograd adds to a gradient that another stream copies."""
    grad, side = torch.ones(4), device.stream("side")
    side.wait_stream(device.current_stream())
    with side:
        grad.clone()
    if ordered:
        device.current_stream().wait_stream(side)
    grad += 1


def frees(device: Device, ordered: bool) -> None:
    """Memory that another stream still reads is taken again."""
    sent, side = torch.ones(4), device.stream("side")
    side.wait_stream(device.current_stream())
    with side:
        sent.clone()
    if ordered:
        device.record(sent, side)
    del sent
    torch.ones(4)


def hooks(device: Device, ordered: bool) -> None:
    """A hook runs on the computation's stream, whatever the main thread has entered."""
    side, written = device.stream("side"), []
    with side:
        written.append(torch.ones(4))
        if ordered:
            device.stream(MAIN).wait_stream(side)
        device.in_autograds_thread(lambda: written[0].clone())


@pytest.mark.parametrize(
    "work",
    [reads_on_the_host, writes_on_the_host, adds_in_place, frees, hooks],
    ids=lambda work: work.__name__,
)
def test_what_is_not_ordered_is_found(work: Callable[[Device, bool], None]) -> None:
    """And nothing else."""
    with symbolic_device() as device:
        work(device, True)
    with pytest.raises(RaceError, match="is not ordered after"), symbolic_device() as device:
        work(device, False)
