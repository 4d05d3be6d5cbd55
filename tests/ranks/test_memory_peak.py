# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a step holds at its peak, tensor by tensor, is what ``predict_memory`` says, within 5%."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bare import bare_engine, fake_world, matrices
from benchmarks.counting import Allocations
from tests.marks import late, often
from tests.plans import resolve
from tests.ranks.test_launch_budget import CASES, OFTEN, SPARSE
from tests.ranks.test_nccl import queues_of_a_gpu
from zero_topo.config import ResolvedConfig
from zero_topo.cost.job import Job
from zero_topo.cost.memory import predict_memory
from zero_topo.cost.transformer import Transformer
from zero_topo.cost.volume import Workload
from zero_topo.engine.stage3 import Stage3
from zero_topo.topology.presets import emulated

MODEL = Transformer("small", 4, hidden=512, heads=8, vocab=2048, sequence=16, intermediate=2048)
ENDS = [len(numels) for numels in MODEL.modules()]
MODULES = [range(end - size, end) for size, end in zip(ENDS, accumulate(ENDS), strict=True)]
LAYER = sum(MODEL.modules()[1])


def step(engine: Stage3, masters: Tensor, bucket: int) -> None:
    """A step as DeepSpeed takes it: a layer is whole, the next on its way, while a bucket of whole
    layers is scattered.

    Gradients are new tensors and live until they are scattered.

    There are no activations.
    """
    for module in MODULES:
        engine.weights.gather(module, "gather_forward").wait()
    coming = engine.weights.gather(MODULES[-1], "gather_backward")
    ready: dict[int, Tensor] = {}
    for index, module in reversed(list(enumerate(MODULES))):
        whole = coming.wait()
        coming = engine.weights.gather(MODULES[max(0, index - 1)], "gather_backward")
        ready |= {
            param_index: torch.zeros(engine.layout.numels[param_index], dtype=torch.bfloat16)
            for param_index in module
        }
        filled = sum(gradient.numel() for gradient in ready.values())
        if not index or filled + LAYER > bucket or index == len(MODULES) - 1:
            engine.gradients.scatter([*ready], [*ready.values()], last=not index)
            ready = {}
        del whole
    del coming
    engine.gradients.sync()
    gradient = engine.gradients.optimizer_rows().to(torch.float32, copy=True)
    masters.sub_(gradient)
    del gradient
    engine.weights.update(masters)
    engine.weights.wait_for_publish()
    engine.end_step(skipped=False)


def peak(config: ResolvedConfig, bucket: int) -> int:
    """Bytes that a rank stores at once in two steps."""
    allocations = Allocations()
    with fake_world(config.plan.world_size), allocations:
        engine = bare_engine(config, matrices(Job(MODEL).work.numels), torch.bfloat16, bucket)
        masters, *_moments = (
            torch.zeros(engine.gradients.optimizer_rows().shape) for _ in range(3)
        )
        engine.weights.publish_world()
        allocations.reset()
        for _ in range(2):
            step(engine, masters, bucket)
    return allocations.peak


def predicted(config: ResolvedConfig, bucket: int) -> int:
    """The formula's sum for the smallest micro-batch there is, less its activations."""
    work = Workload.uniform(Job(MODEL).work.numels)
    stored = predict_memory(config, work, Job(MODEL, prefetch=0, live=0, bucket=bucket))
    return sum(stored.values()) - stored.get("activations", 0)


@pytest.fixture(autouse=True)
def small_blocks() -> None:
    """Blocks have the size of real runs, as these parameters are large."""


STAGED: dict[str, dict[str, Any]] = {
    "one group": {"scheme": "topo"},
    "two groups": {"scheme": "topo", "gradients": "gpu"},
    "weights and gradients on the rank": {
        "weights": "rank",
        "gradients": "rank",
        "optimizer": "world",
    },
    "quantized": {"scheme": "topo", "gradients": "gpu", "sync": {"mode": "quantized"}},
}


@pytest.mark.parametrize("name", STAGED)
def test_runs_in_flight_need_no_more_than_predicted(name: str) -> None:
    """On a GPU's queue up to three runs of sync and publish have buffers at a time."""
    config = resolve(emulated(2, 4, 2), **STAGED[name])
    with queues_of_a_gpu():
        found = peak(config, LAYER)
    assert 0.9 * predicted(config, LAYER) < found <= 1.01 * predicted(config, LAYER)


@pytest.mark.parametrize("bits", [None, "int4"])
def test_a_bucket_between_nodes_needs_what_is_predicted(bits: str | None) -> None:
    """While the next one is sent inside the node."""
    block = {"scheme": "zero3", "quantize": {"gradients": bits}}
    staged, plain = (resolve(emulated(2, 4, 2), **block, overlap=on) for on in (True, False))
    with queues_of_a_gpu():
        found = peak(staged, LAYER) - peak(plain, LAYER)
    wanted = predicted(staged, LAYER) - predicted(plain, LAYER)
    assert wanted > 0
    assert found == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("layers", [2, late(1), late(3)])
@pytest.mark.parametrize(
    "name", often(OFTEN, (name for name in CASES if name.partition("+")[2] not in SPARSE))
)
def test_the_peak_is_as_predicted(name: str, layers: int) -> None:
    """Of all schemes and of dense and quantized modes, in one collective or in several."""
    block: dict[str, Any] = CASES[name]
    config = resolve(emulated(2, 4, 2), **block, overlap=False)
    assert peak(config, layers * LAYER) == pytest.approx(
        predicted(config, layers * LAYER), rel=0.05
    )
