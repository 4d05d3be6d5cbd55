# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One property for each phase of the engine, over random machines, plans, formats and models.

A walk is a random sequence of calls. The straight-line model computes what each must return; ranks
are threads, and every rank compares every result bit for bit. A failure names its case: call the
property again with that seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.marks import late
from tests.ranks.phase_cases import drawn_case
from tests.ranks.phase_model import Model
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.config import resolve
from zero_topo.engine.stage3 import Stage3
from zero_topo.engine.weights import Weights
from zero_topo.plan import Phase

PHASES: tuple[Phase, ...] = ("gather_forward", "gather_backward", "gather_exact")
RATES = (1e-3, 1e-2, 0.3)
"""Sizes of updates, beside weights of about 1."""
SOME = range(30, 50)
"""Cases that find every row of ``tests/hazards.md`` that names these properties."""
GARBAGE = 99.0
"""What a file may have in the padding."""


@dataclass
class Rank:
    """One rank of a walk.

    Attributes:
        number: its rank.
        engine: its own, called as the hook calls it.
        done: the case and the calls so far, for messages.
        saved: what a checkpoint saved of the engine before this one.
    """

    number: int
    engine: Stage3
    done: list[str]
    saved: dict[str, Any] = field(default_factory=dict)

    def compare(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        """What the last call returns must be what the model says, bit for bit."""
        for place, (ours, right) in enumerate(zip(found, wanted, strict=True)):
            assert ours.dtype == right.dtype and torch.equal(ours, right), (
                f"result {place} of the last call differs on rank {self.number}: "
                f"{ours.reshape(-1)[:4].tolist()} is not {right.reshape(-1)[:4].tolist()}\n"
                + "\n".join(self.done)
            )


class Walk:
    """A random sequence of calls, and what the model says of each."""

    def __init__(self, seed: int, *wants: str) -> None:
        self.rng = random.Random(seed)
        self.case = drawn_case(self.rng, seed, self.rng.choice(wants))
        self.model = Model(self.case)
        self.trained = range(self.model.count)
        self.frozen = range(self.model.count, len(self.model.parameters))
        self._generator = torch.Generator().manual_seed(seed)
        self._calls: list[tuple[str, Callable[[Rank], object]]] = []
        self._masters = [self._drawn(p.numel) for p in self.model.parameters]
        self._load("fresh")

    def _normal(self, numel: int) -> Tensor:
        scale = self.rng.choice([0.02, 1.0, 30.0])
        return scale * torch.randn(numel, generator=self._generator)

    def _drawn(self, numel: int) -> Tensor:
        return self.model.table(self._normal(numel))

    def _own(
        self, tables: list[Tensor], indices: Sequence[int], rank: int, padding: float
    ) -> Tensor:
        """A rank's own row of these parameters."""
        rows = [torch.empty(0, dtype=tables[0].dtype)]
        for index in indices:
            row = tables[index][self.model.plan.position(rank)].clone()
            present = self.model.parameters[index].numel - rank * len(row)
            row[max(0, present) :] = padding
            rows.append(row)
        return torch.cat(rows)

    def _load(self, state: str) -> None:
        tables = [master.to(self.case.dtype) for master in self._masters]
        masters = [master.clone() for master in self._masters]
        for index in self.frozen:
            if self.model.tables:  # what has no masters is loaded as it is
                tables[index] = self.model.tables[index].clone()
        self.model.load(tables, masters, state == "saved")

        def load(rank: Rank) -> None:
            engine = rank.engine
            engine.weights.own_row.copy_(self._own(tables, self.trained, rank.number, GARBAGE))
            if state != "fresh":
                engine.load_state_dict(rank.saved if state == "saved" else {})
            if self.trained:
                engine.restart(self._own(masters, self.trained, rank.number, 0.0))
            if self.frozen:
                frozen = self._own(tables, self.frozen, rank.number, GARBAGE)
                engine.sets[1].own_row.copy_(frozen)
                engine.restart_frozen()

        self._calls.append((f"load {state}", load))

    def _set_of(self, rank: Rank, index: int) -> tuple[Weights, int]:
        """The weights that have a parameter, and the number of its first one."""
        if index in self.trained:
            return rank.engine.weights, 0
        return rank.engine.sets[1], self.model.count

    def _alike(self, pool: Sequence[int]) -> list[int]:
        """Some parameters that one collective may carry, in some order."""
        sent = self.model.parameters[self.rng.choice(list(pool))].sent
        alike = [index for index in pool if self.model.parameters[index].sent == sent]
        return self.rng.sample(alike, self.rng.randint(1, len(alike)))

    def gather(self, *phases: Phase) -> None:
        """Gather some parameters, in one of these phases; or several lists at once, all trained or
        all frozen, for which ranks wait in any order.
        """
        left = set(self.trained) | set(self.frozen)
        lists = []
        wanted = []
        for _ in range(self.rng.choice([1, 1, 3])):
            pools = [left.intersection(pool) for pool in (self.trained, self.frozen)]
            indices = self._alike(self.rng.choice([sorted(pool) for pool in pools if pool]))
            phase = self.rng.choice(phases or PHASES)
            lists.append((indices, phase))
            wanted += self.model.gather(indices, phase)
            left.difference_update(indices)
            if not left:
                break
        orders = [self.rng.sample(range(len(lists)), len(lists)) for _ in range(self.model.world)]

        def gather(rank: Rank) -> None:
            begun = []
            for indices, phase in lists:
                weights, first = self._set_of(rank, indices[0])
                begun.append(weights.gather([index - first for index in indices], phase))
            found = {place: begun[place].wait() for place in orders[rank.number]}
            rank.compare([whole for place in sorted(found) for whole in found[place]], wanted)

        self._calls.append((f"gather {lists}", gather))

    def publish(self) -> None:
        """Update consecutive parameters, in one or several calls."""
        first = self.rng.randrange(self.model.count)
        last = self.rng.randint(first + 1, self.model.count)
        inner = range(first + 1, last)
        cuts = self.rng.sample(inner, self.rng.randint(0, min(2, len(inner))))
        edges = [first, *sorted(cuts), last]
        for begin, end in pairwise(edges):
            self._publish(range(begin, end))

    def _publish(self, indices: range) -> None:
        rate = self.rng.choice(RATES)
        for index in indices:
            change = self._drawn(self.model.parameters[index].numel)
            self._masters[index] = self._masters[index] + rate * change
        masters = [self._masters[index].clone() for index in indices]
        self.model.publish(indices, masters)

        def publish(rank: Rank) -> None:
            rank.engine.weights.update(self._optimizer_rows(masters, rank), indices)

        self._calls.append((f"publish {indices}", publish))

    def _optimizer_rows(self, tables: list[Tensor], rank: Rank) -> Tensor:
        """The rows ``[N / O, columns]`` of these tables that a rank's optimizer has."""
        degree = self.model.plan.optimizer
        rows = [self.model.rows(table, rank.number, degree) for table in tables]
        return torch.cat(rows, dim=1)

    def edit(self) -> None:
        """Write a whole parameter; half of the time with the values that it has."""
        index = self.rng.randrange(len(self.model.parameters))
        full = self.model.whole(self.model.tables[index], index).clone()
        if self.rng.random() < 0.5:
            full[self.rng.randrange(full.numel())] = self.rng.uniform(-3, 3)
        self.model.edit(index, full)
        if index in self.trained:
            self._masters[index] = self.model.table(full).float()

        def edit(rank: Rank) -> None:
            weights, first = self._set_of(rank, index)
            weights.write_back(index - first, full.clone())

        self._calls.append((f"edit {index}", edit))

    def micro_batch(self, last: bool) -> None:
        """Scatter the gradients of some parameters, in buckets."""
        pool = self.rng.sample(self.trained, self.rng.randint(1, self.model.count))
        while pool:
            bucket = self._alike(pool)
            pool = [index for index in pool if index not in bucket]
            self._scatter(bucket, last)

    def _scatter(self, bucket: list[int], last: bool) -> None:
        dtype = self.rng.choice([self.case.dtype, torch.float32])
        numels = [self.model.parameters[index].numel for index in bucket]
        grads = []
        for _ in range(self.model.world):
            grads.append([self._normal(numel).to(dtype) for numel in numels])
        self.model.scatter(bucket, grads)

        def scatter(rank: Rank) -> None:
            own = [grad.clone() for grad in grads[rank.number]]
            sent = self.model.parameters[bucket[0]].sent
            rank.engine.gradients.scatter(bucket, own, last, sent)

        self._calls.append((f"scatter {bucket} {last}", scatter))

    def sync(self) -> None:
        """Reduce gradients across gradient domains."""
        tables = [table.clone() for table in self.model.sync()]

        def sync(rank: Rank) -> None:
            rank.engine.gradients.sync()
            found = rank.engine.gradients.optimizer_rows()
            rank.compare([found], [self._optimizer_rows(tables, rank)])

        self._calls.append(("sync", sync))

    def peek(self) -> None:
        """Read gradients before the step, where the sync does not round what is read twice."""
        if self.model.sync_dtype == self.model.accumulated:
            tables = [table.clone() for table in self.model.sync()]

            def peek(rank: Rank) -> None:
                own_row = self._own(tables, self.trained, rank.number, 0.0)
                rank.compare([rank.engine.gradients.peek()], [own_row])

            self._calls.append(("peek", peek))

    def end_step(self) -> None:
        """End the step."""
        self.model.end_step()
        self._calls.append(("end_step", lambda rank: rank.engine.end_step(skipped=False)))

    def restart(self) -> None:
        """Go on with a new engine from own rows and masters, with or without the saved state."""

        def restart(rank: Rank) -> None:
            rank.engine.end_step(skipped=False)
            rank.saved = rank.engine.state_dict()
            rank.engine = self.case.engine()

        self._calls.append(("restart", restart))
        self._load(self.rng.choice(["saved", "saved", "lost"]))

    # -- on ranks ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Make the calls on all ranks and compare every result; at the end copies must be equal."""
        stored = run_threads(self.model.world, self._on_rank)
        plan = self.model.plan
        for ranks in plan.groups(plan.weights, plan.world_size):
            for rank in ranks[1:]:
                assert torch.equal(stored[rank], stored[ranks[0]]), (
                    f"{self.case}: ranks {ranks[0]} and {rank} store different weights"
                )

    def _on_rank(self, number: int) -> Tensor:
        """Make the calls; return the bytes of the weights that the rank stores in the end."""
        rank = Rank(number, self.case.engine(), [str(self.case)])
        for words, call in self._calls:
            rank.done.append(words)
            call(rank)
        weights = rank.engine.weights
        weights.wait_for_publish()
        return weights.replicas()[0].view(-1).view(torch.uint8).clone()


# -- properties ------------------------------------------------------------------------------------


def gathers_bring_each_parameter_as_its_format_says(seed: int) -> None:
    """Whatever the list, the order, the tree and the phase; also where nothing is trained."""
    walk = Walk(seed, "", "int8", "frozen")
    for _ in range(6):
        walk.gather()
    walk.check()


def gradients_are_summed_in_tree_order(seed: int) -> None:
    """Over micro-batches in any buckets, then across gradient domains."""
    walk = Walk(seed, "", "int8")
    for _ in range(2):
        batches = walk.rng.randint(1, 3)
        for batch in range(batches):
            walk.micro_batch(last=batch == batches - 1)
            if walk.rng.random() < 0.2:
                walk.peek()
        walk.sync()
        walk.end_step()
    walk.check()


def every_gather_brings_the_last_update(seed: int) -> None:
    """After updates of any sub-groups, in any number of calls."""
    walk = Walk(seed, "", "int8")
    for _ in range(4):
        walk.publish()
        if walk.rng.random() < 0.5:
            walk.end_step()
        for _ in range(walk.rng.randint(0, 2)):
            walk.gather()
    walk.gather("gather_forward")
    walk.gather("gather_exact")
    walk.check()


def secondary_copies_are_of_the_last_weights(seed: int) -> None:
    """Whoever stored, renewed or edited them."""
    walk = Walk(seed, "secondary", "int8")
    for _ in range(10):
        walk.rng.choice([walk.gather, walk.gather, walk.publish, walk.edit, walk.end_step])()
        walk.gather("gather_forward", "gather_backward", "gather_backward")
    walk.check()


def a_new_engine_goes_on_as_the_old_one_would(seed: int) -> None:
    """From the own rows, the masters and the saved state; without the state it starts afresh."""
    walk = Walk(seed, "", "int8")
    for _ in range(2):
        walk.publish()
        walk.gather()
        walk.restart()
        walk.gather("gather_forward")
        walk.publish()
        walk.gather("gather_backward")
    walk.gather("gather_exact")
    walk.check()


PROPERTIES = (
    gathers_bring_each_parameter_as_its_format_says,
    gradients_are_summed_in_tree_order,
    every_gather_brings_the_last_update,
    secondary_copies_are_of_the_last_weights,
    a_new_engine_goes_on_as_the_old_one_would,
)


@pytest.fixture(autouse=True)
def late_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an all-gather brings arrives when it is waited for; until then its buffer is NaN."""
    all_gather = Group._all_gather

    def slow(group: Group, message: Tensor) -> Handle[Tensor]:
        received = all_gather(group, message).wait()
        arrived = received.clone()
        received.view(torch.uint8).fill_(255)
        return Handle(received).then(lambda buffer: buffer.copy_(arrived))

    monkeypatch.setattr(Group, "_all_gather", slow)


@pytest.fixture(autouse=True)
def own_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend adds between two nodes. Between three the sums are ours: FP32, rounded once."""
    monkeypatch.setattr(resolve, "BACKEND_ADDS", 2)


@pytest.mark.parametrize("seeds", [SOME, late([*range(30), *range(50, 700)])], ids=["some", "many"])
@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
def test_property(holds: Callable[[int], None], seeds: Sequence[int]) -> None:
    for seed in seeds:
        holds(seed)
