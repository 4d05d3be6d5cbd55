# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""On a GPU's streams nothing is read before it was written, nor overwritten or freed before it was read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.worlds import PLAIN, SCHEMES, World, world
from tests.streams import MAIN, Device, symbolic_device
from zero_topo.bench.bare import fake_world
from zero_topo.engine.stage3 import Stage3
from zero_topo.topology.presets import emulated

NUMELS = (40, 7, 64, 96)
SMALL = {"block_size": 64}


class DeepSpeed:
    """What DeepSpeed does around the engine, on which streams: gathers, scatters and the optimizer.

    Args:
        device: symbolic.
        engine: of one rank.
        overlap_comm: whether gathers and scatters have streams of their own.
        offload: masters on the host: what is published from them is a temporary copy.
    """

    def __init__(self, device: Device, engine: Stage3, overlap_comm: bool, offload: bool = False) -> None:
        self.device, self.engine, self.offload = device, engine, offload
        self.main = device.stream(MAIN)
        self.gathers = device.stream("all-gather") if overlap_comm else self.main
        self.scatters = device.stream("reduce") if overlap_comm else self.main
        rows = engine.weights.optimizer_rows()
        self.masters = rows.to(torch.float32, copy=True)

    def fetch(self, slots: list[int], phase: str) -> list[Tensor]:
        """As its coordinator does for one module."""
        with self.gathers:
            handle = self.engine.weights.gather(slots, phase)
        with self.gathers:
            whole = handle.wait()
        self.main.wait_stream(self.gathers)
        return whole

    def release(self, whole: list[Tensor]) -> None:
        """As it frees parameters: the computation may still use them."""
        for tensor in whole:
            tensor.record_stream(self.main)  # type: ignore[arg-type]

    def micro_batch(self, last: bool) -> None:
        """Forward, backward, and a bucket of gradients for each module."""
        modules = [[0, 1], [2], [3]]
        for slots in modules:
            whole = self.fetch(slots, "gather_forward")
            assert all(bool(w.sum() == w.sum()) or True for w in whole)
            self.release(whole)
        for slots in reversed(modules):
            whole = self.fetch(slots, "gather_backward")
            grads = [w * 0.01 for w in whole]
            self.release(whole)
            self.scatters.wait_stream(self.main)
            with self.scatters:
                self.engine.gradients.scatter(slots, grads, last)
            for grad in grads:
                grad.record_stream(self.scatters)  # type: ignore[arg-type]
            del grads, whole
        self.main.wait_stream(self.scatters)

    def step(self, skipped: bool = False) -> None:
        """The optimizer's step, in two sub-groups."""
        engine, layout = self.engine, self.engine.layout
        engine.gradients.sync()
        for first, past in ((0, 2), (2, 4)):
            begin, end = layout.spans(range(first, past))[0][0], layout.spans(range(first, past))[-1][1]
            if not skipped:
                self.masters[:, begin:end] -= engine.gradients.optimizer_rows()[:, begin:end]
                slots, new = range(first, past), self.masters[:, begin:end]
                if engine.weights.publishes_differences:
                    engine.weights.publish(slots, new.clone() if self.offload else new)
                else:
                    engine.weights.optimizer_rows()[:, begin:end].copy_(new)
                    engine.weights.publish(slots)
        engine.end_step(skipped)


def trained(w: World, overlap_comm: bool, offload: bool = False, **also: Any) -> None:
    """Three steps of two micro-batches each, with an edit and a skipped step, on rank 0 of a pretended world."""
    with fake_world(w.size), symbolic_device() as device:
        engine = w.engine(torch.bfloat16, chunk=200)
        engine.weights.publish_world()
        job = DeepSpeed(device, engine, overlap_comm, offload)
        for step in range(3):
            job.micro_batch(last=False)
            job.micro_batch(last=True)
            job.step(skipped=step == 1)
        engine.weights.write_back(2, torch.ones(NUMELS[2], dtype=torch.bfloat16))
        job.micro_batch(last=True)
        job.step()
        engine.weights.finish()
        engine.weights.primary.sum()


BLOCKS: dict[str, dict[str, object]] = {
    **{scheme: {"scheme": scheme, "quantize": PLAIN} for scheme in SCHEMES},
    "quantized": {"scheme": "topo", "quantize": {"weights": "int8", "secondary": "int8", **SMALL}},
    "zero++ quantized": {"scheme": "zero++", "quantize": {"weights": "int8", "gradients": "int4", **SMALL}},
    "q4": {
        "scheme": "topo",
        "sync": {"mode": "quantized", "bits": 4, **SMALL},
        "publish": {"delta": "int4", **SMALL},
    },
}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("overlap_comm", [True, False], ids=["overlap_comm", "one stream"])
@pytest.mark.parametrize("name", BLOCKS)
def test_no_race(name: str, overlap: bool, overlap_comm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers, scatters, sync and publish of every scheme, whichever of them have streams of their own."""
    monkeypatch.setenv("ZERO_TOPO_QUANT", "reference")
    trained(world({**BLOCKS[name], "overlap": overlap}, emulated(2, 2, 2), NUMELS), overlap_comm)


def test_an_offloaded_masters_copy_outlives_its_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane reads it after the caller has let it go."""
    monkeypatch.setenv("ZERO_TOPO_QUANT", "reference")
    trained(world(BLOCKS["q4"], emulated(2, 2, 2), NUMELS), overlap_comm=True, offload=True)
