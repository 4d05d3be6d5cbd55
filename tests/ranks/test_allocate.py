# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A transport may own the memory of what it sends and receives: dense and quantized phases ask their group for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.bare import BareStep, fake_world
from tests.plans import resolve
from tests.ranks.worlds import shuffled
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.topology.presets import emulated

CODED: dict[str, Any] = {"scheme": "topo", "quantize": {"resident": "int8", "block_size": 64}}
SCHEMES: dict[str, dict[str, Any]] = {
    "zero3": {"scheme": "zero3"},
    "zero++": {"scheme": "zero++"},
    "codes": CODED,
    "q4": {"scheme": "topo", "sync": {"mode": "quantized", "bits": 4}, "publish": {"delta": "int4"}},
}


@pytest.mark.parametrize("placed", ["block", "shuffled"])
@pytest.mark.parametrize("name", SCHEMES)
def test_groups_allocate_what_they_exchange(name: str, placed: str) -> None:
    """All that is received, and all packed buffers; what is not encoded may be sent from the weights themselves."""
    machine = emulated(2, 4, 2)
    config = resolve(shuffled(machine) if placed == "shuffled" else machine, **SCHEMES[name], overlap=False)
    owned: list[Tensor] = []
    exchanges: list[tuple[Tensor, Tensor]] = []

    def allocate(group: Group, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        owned.append(torch.empty(size, dtype=dtype, device=device))
        return owned[-1]

    def ended(group: Group, work: Any, sent: Tensor, received: Tensor) -> Handle[Tensor]:
        exchanges.append((sent, received))
        return wait(group, work, sent, received)

    wait = Group._ended
    with fake_world(16):
        step = BareStep(config, [1024] * 4)
        with patch.object(Group, "allocate", allocate), patch.object(Group, "_ended", ended):
            for phase in ("gather_forward", "gather_backward", "scatter", "publish"):
                step.phases()[phase]()
        stored = {tensor.untyped_storage().data_ptr() for tensor in step.engine.weights.tensors()}
    own = {tensor.untyped_storage().data_ptr() for tensor in owned}
    large = [pair for pair in exchanges if pair[0].nbytes > 256]  # not the agreed sizes
    assert len(large) >= 6
    assert {received.untyped_storage().data_ptr() for _, received in large} <= own
    assert {sent.untyped_storage().data_ptr() for sent, _ in large} <= own | stored
