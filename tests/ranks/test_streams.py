# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""On a GPU's streams nothing is read before it was written, nor overwritten or freed before it was
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.bare import fake_world
from tests.marks import late
from tests.ranks.worlds import BLOCKS, COMBINED, Q4, world
from tests.streams import MAIN, Device, symbolic_device
from zero_topo.engine.int8 import Int8
from zero_topo.plan import Phase
from zero_topo.sync import Moment


@dataclass(frozen=True)
class Model:
    """Elements of each parameter, in DeepSpeed's order, those that its optimizer updates at once,
    modules, and which parameters stay whole; which are matrices of Muon, one of its groups.
    """

    numels: tuple[int, ...]
    groups: tuple[range, ...]
    modules: tuple[tuple[int, ...], ...]
    persistent: tuple[int, ...] = ()
    muon: range = range(0)

    @property
    def order(self) -> tuple[int, ...]:
        """Of each parameter, its place in the order in which modules have them."""
        param_indices = [param_index for module in self.modules for param_index in module]
        return tuple(map(param_indices.index, range(len(param_indices))))


MODEL = Model(
    (512, 64, 512, 512, 40, 7),
    (range(4), range(4, 6)),
    ((0, 4), (1,), (2, 5), (3,)),
    persistent=(1, 5),
)
"""Matrices, of which three have codes, and vectors that are updated apart, as where these do not
decay.
"""
CHUNK = 1100
"""Elements of a run: two matrices."""


class DeepSpeed:
    """What DeepSpeed does around the engine, on which streams: gathers, scatters and the optimizer.

    Args:
        device: symbolic.
        block: of the config.
        overlap_comm: whether gathers and scatters have streams of their own.
        model: what is trained.
    """

    def __init__(
        self,
        device: Device,
        block: dict[str, Any],
        overlap_comm: bool,
        model: Model = MODEL,
    ) -> None:
        self.device, self.model = device, model
        self.main = device.stream(MAIN)
        self.gathers = device.stream("all-gather") if overlap_comm else self.main
        self.scatters = device.stream("reduce") if overlap_comm else self.main
        w, self.moments = world(block, numels=model.numels), list[Moment]()
        self.engine = engine = w.engine(
            torch.bfloat16,
            CHUNK,
            moments=lambda: self.moments,
            persistent=model.persistent,
            order=model.order,
            whole=model.muon,
        )
        engine.weights.publish_world()
        intervals = [engine.layout.shard_ranges(param_indices) for param_indices in model.groups]
        self.columns = [(interval[0][0], interval[-1][1]) for interval in intervals]
        self.masters = [engine.weights.own[:, a:b].float() for a, b in self.columns]

    def fetch(self, param_indices: Sequence[int], phase: Phase) -> list[Tensor]:
        """As its coordinator does for one module."""
        with self.gathers:
            handle = self.engine.weights.gather(param_indices, phase)
        with self.gathers:
            whole = handle.wait()
        self.main.wait_stream(self.gathers)
        return whole

    def release(self, whole: list[Tensor]) -> None:
        """As it frees parameters: the computation may still use them."""
        for tensor in whole:
            tensor.record_stream(self.main)  # type: ignore[arg-type]

    def forward(self) -> None:
        """A forward pass, which is all of an evaluation."""
        for param_indices in self.model.modules:
            whole = self.fetch(param_indices, "gather_forward")
            assert torch.stack([tensor.float().sum() for tensor in whole]).isfinite().all()
            self.release(whole)

    def micro_batch(self, last: bool) -> None:
        """Forward and backward; autograd calls hooks in a thread of its own."""
        self.forward()
        self.device.in_autograds_thread(lambda: self.backward(last))
        self.main.wait_stream(self.scatters)

    def backward(self, last: bool) -> None:
        """Gradients wait in a bucket for those of the next module; the first of a module arrives in
        two parts.
        """
        bucket: dict[int, Tensor] = {}
        for number, param_indices in enumerate(reversed(self.model.modules)):
            whole = self.fetch(param_indices, "gather_backward")
            for param_index, weight in zip(param_indices, whole, strict=True):
                bucket[param_index] = weight * 0.01
                self.scatters.wait_stream(self.main)
            bucket[param_indices[0]] += whole[0] * 0.02
            self.scatters.wait_stream(self.main)
            self.release(whole)
            del whole, weight
            if number % 2:
                self.scatter(bucket, last)
        self.scatter(bucket, last)

    def scatter(self, bucket: dict[int, Tensor], last: bool) -> None:
        """Empty a bucket, on the stream on which DeepSpeed reduces."""
        with self.scatters:
            if bucket:
                self.engine.gradients.scatter([*bucket], [*bucket.values()], last)
        for grad in bucket.values():
            grad.record_stream(self.scatters)  # type: ignore[arg-type]
        bucket.clear()

    def orthogonalize(self) -> None:
        """Muon's exchange of matrices, with a function that takes memory."""
        param_indices, (begin, end) = self.model.muon, self.columns[0]
        rows = self.engine.gradients.optimizer_rows()[:, begin:end]
        parts = {
            param_index: self.engine.layout.parameter(rows, param_index)
            for param_index in param_indices
        }
        shapes = {
            param_index: (8, self.model.numels[param_index] // 8) for param_index in param_indices
        }
        self.engine.matrices.apply(
            parts, shapes, lambda owned, found: found / found.norm(dim=(1, 2), keepdim=True)
        )

    def step(self, skipped: bool = False) -> None:
        """The optimizer's step, one sub-group after the other."""
        self.engine.gradients.sync()
        if self.model.muon:
            self.orthogonalize()
        if not skipped:
            for group in range(len(self.model.groups)):
                self.update(group)
            begins = [begin for begin, _ in self.columns]
            means = [torch.zeros_like(master) for master in self.masters]
            self.moments[:] = self.moments or [
                Moment(*of, 0.9) for of in zip(begins, means, strict=True)
            ]
        if self.model.persistent:
            weights = self.engine.weights.gather(self.model.persistent, "gather_exact")
            self.release(weights.wait())
        self.engine.end_step(skipped)

    def finish(self, phase: Phase) -> None:
        """The sync of gradients that have arrived, or a publish of all weights."""
        weights = self.engine.weights
        if phase == "sync":
            self.engine.gradients.sync()
        else:
            weights.update(weights.own.float())
            weights.wait_for_publish()

    def update(self, group: int) -> None:
        """One sub-group's masters, and the weights that become of them; of the first as where
        masters are on the host: from a temporary copy.
        """
        (begin, end), new = self.columns[group], self.masters[group]
        with self.engine.watched(new.view(-1), begin, 0.1):
            new -= self.engine.gradients.optimizer_rows()[:, begin:end]
        masters = new if group else new.clone()
        self.engine.weights.update(masters, self.model.groups[group])


@contextmanager
def job(block: dict[str, Any], overlap_comm: bool, **options: Any) -> Iterator[DeepSpeed]:
    """Rank 0 of 8, pretended."""
    with fake_world(8), symbolic_device() as device:
        yield DeepSpeed(device, block, overlap_comm, **options)


def ways() -> Iterator[Any]:
    """Every block; whether its work overlaps, and whether DeepSpeed's does, often for some blocks
    alone.
    """
    for name, *overlaps in product(BLOCKS, (True, False), (True, False)):
        often = all(overlaps) and name not in COMBINED
        often = often or name in ("zero++ quantized", "codes")
        yield (name, *overlaps) if often else late(name, *overlaps)


@pytest.mark.parametrize(("name", "overlap", "overlap_comm"), list(ways()))
def test_no_race(name: str, overlap: bool, overlap_comm: bool) -> None:
    """Gathers, scatters, sync and publish of every scheme, whichever of them have streams of their
    own: steps of two micro-batches or one, with one that is skipped, and an edit; with persistent
    parameters, for which the step waits, and without.
    """
    model = MODEL if overlap else replace(MODEL, persistent=())
    with job({**BLOCKS[name], "overlap": overlap}, overlap_comm, model=model) as deepspeed:
        weights = deepspeed.engine.weights
        for step in range(3):
            if step != 1:
                deepspeed.micro_batch(last=False)
            deepspeed.micro_batch(last=True)
            deepspeed.step(skipped=step == 1)
        weights.write_back(2, torch.ones(512, dtype=torch.bfloat16))
        deepspeed.micro_batch(last=True)
        deepspeed.step()
        weights.wait_for_publish()
        for copy in weights.replicas():
            copy.sum()


@pytest.mark.parametrize("phase", ["sync", "publish"])
def test_a_run_is_sent_before_the_one_before_it_is_decoded(phase: Phase) -> None:
    """The network carries the second run while the device decodes the first."""
    with job(BLOCKS["topo"], overlap_comm=True) as deepspeed:
        deepspeed.micro_batch(last=False)
        deepspeed.device.log.clear()
        deepspeed.finish(phase)
        done = [name for _, name, *_ in deepspeed.device.log]
    assert done.index("exchange", done.index("exchange") + 1) < done.index("decode")


STAGED: dict[str, dict[str, Any]] = {
    "dense": BLOCKS["two groups"],
    "quantized": {**BLOCKS["two groups"], "sync": Q4},
}
"""Blocks whose sync and publish use two groups."""


@pytest.mark.parametrize(
    ("name", "phase"), [("dense", "sync"), ("quantized", "sync"), ("dense", "publish")]
)
def test_one_run_crosses_nodes_while_the_next_is_exchanged_inside(name: str, phase: Phase) -> None:
    """The third run's first exchange waits for no second exchange, not even the first run's, which
    is queued before.
    """
    with job(STAGED[name], overlap_comm=True, model=ONE_GROUP) as deepspeed:
        deepspeed.micro_batch(last=False)
        deepspeed.engine.weights.wait_for_publish()
        deepspeed.device.log.clear()
        deepspeed.finish(phase)
    exchanges = [entry for entry in deepspeed.device.log if entry[1] == "exchange"]
    first, second = ("nccl 2-4", "nccl 4-8") if phase == "sync" else ("nccl 4-8", "nccl 2-4")
    assert [stream for stream, *_ in exchanges[:5]] == [first, first, second, first, second]
    (_, _, number, _), (_, _, _, clock) = exchanges[2:4]
    assert clock.get(second, 0) < number


def test_both_groups_of_a_gather_are_queued_when_it_is_started() -> None:
    """A prefetch is under way as a whole, and in the order of the starts, whoever needs which
    first.
    """
    with job(BLOCKS["zero3"], overlap_comm=True) as deepspeed:
        weights = deepspeed.engine.weights
        weights.wait_for_publish()
        deepspeed.device.log.clear()
        first = [weights.gather([param_index], "gather_forward") for param_index in (0, 2)]
        begun = [stream for stream, name, *_ in deepspeed.device.log if name == "exchange"]
        for handle in reversed(first):
            handle.wait()
    assert begun == ["nccl 4-8", "nccl 1-4"] * 2


def test_gathers_alone_have_a_stream_of_high_priority() -> None:
    """The next module waits for their kernels, which would else start after all that the
    computation has queued.
    """
    with job(BLOCKS["codes"], overlap_comm=True) as deepspeed:
        deepspeed.micro_batch(last=True)
        deepspeed.engine.gradients.sync()
        deepspeed.device.log.clear()
        deepspeed.fetch([0], "gather_forward")
        gathers = {stream for stream, name, *_ in deepspeed.device.log if name == "decode"}
        deepspeed.device.log.clear()
        deepspeed.step()
        publish = {stream for stream, name, *_ in deepspeed.device.log if name == "emit"}
    assert [stream.partition(", ")[2] for stream in (*gathers, *publish)] == [
        "priority -1",
        "priority 0",
    ]


LAYERS = 5
ONE_GROUP = Model(
    (512, 7) * LAYERS, (range(2 * LAYERS),), tuple((2 * i, 2 * i + 1) for i in range(LAYERS))
)
TWO_GROUPS = Model(
    (512,) * LAYERS + (7,) * LAYERS,
    (range(LAYERS), range(LAYERS, 2 * LAYERS)),
    tuple((i, LAYERS + i) for i in range(LAYERS)),
)
"""The same, but that vectors do not decay."""


@pytest.mark.parametrize("name", ["codes", "topo", "q4"])
def test_publish_goes_on_under_the_forward_pass(name: str) -> None:
    """The first module waits for the runs that it needs, also if its vectors are a parameter group
    of their own.
    """
    waited = []
    for model in (ONE_GROUP, TWO_GROUPS):
        with job(BLOCKS[name], overlap_comm=True, model=model) as deepspeed:
            deepspeed.micro_batch(last=True)
            deepspeed.engine.gradients.sync()
            deepspeed.device.log.clear()
            deepspeed.step()
            ends = [
                (stream, number)
                for stream, name, number, _ in deepspeed.device.log
                if name == "exchange"
            ]
            deepspeed.fetch(model.modules[0], "gather_forward")
            clock = deepspeed.device.clocks[MAIN]
            waited.append(sum(number <= clock.get(stream, 0) for stream, number in ends))
            assert waited[-1] < len(ends)
    run_of_vectors = 2  # exchanges: one for each group
    assert waited[1] <= waited[0] + run_of_vectors


def test_all_of_publish_is_queued_when_a_step_ends() -> None:
    """Its last run too: whoever reads it first only waits."""
    with job(BLOCKS["topo"], overlap_comm=True) as deepspeed:
        deepspeed.micro_batch(last=True)
        deepspeed.step()
        deepspeed.device.log.clear()
        deepspeed.engine.weights.wait_for_publish()
    assert not deepspeed.device.log


def test_the_host_waits_once_in_a_step() -> None:
    """However many sub-groups with INT8 weights there are: their sizes are agreed together."""
    model = replace(MODEL, groups=(range(2), range(2, 3), range(3, 6)))
    with job(BLOCKS["codes"], overlap_comm=True, model=model) as deepspeed:
        deepspeed.micro_batch(last=True)
        with patch.object(
            Int8, "_agreed_sizes", autospec=True, side_effect=Int8._agreed_sizes
        ) as agreed:
            deepspeed.step()
    assert agreed.call_count == 1


@pytest.mark.parametrize("model", [ONE_GROUP, TWO_GROUPS])
def test_a_mask_outlives_its_gather(model: Model) -> None:
    """SCAPE sends the next mask under the next backward pass, which takes memory that was freed."""
    with job(BLOCKS["scape, by parameter"], overlap_comm=True, model=model) as deepspeed:
        for _ in range(3):
            deepspeed.micro_batch(last=True)
            deepspeed.step()


@pytest.mark.parametrize("name", ["topo", "codes", "hsdp", "q4"])
def test_matrices_are_whole_when_they_are_updated(name: str) -> None:
    """Muon sends gradients to the matrices' owners and updates back, between sync and the
    optimizer.
    """
    model = replace(MODEL, groups=(range(4), range(4, 6)), muon=range(4))
    with job(BLOCKS[name], overlap_comm=True, model=model) as deepspeed:
        for _ in range(2):
            deepspeed.micro_batch(last=True)
            deepspeed.step()
