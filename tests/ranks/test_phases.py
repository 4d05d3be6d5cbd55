# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One property for each phase of the engine, over random machines, plans, formats and models.

A walk is a random sequence of calls. The straight-line model computes what each must return; ranks
are threads, and every rank compares every result bit for bit. A failure names its case: call the
property again with that seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.marks import late
from tests.ranks.phase_cases import Case, drawn_case
from tests.ranks.phase_model import Model
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
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


class Engine:
    """One rank's engine, called as the hook calls it."""

    def __init__(self, case: Case) -> None:
        like = torch.empty(0, dtype=case.dtype)
        self._case = case
        self._saved: dict[str, Any] = {}
        self._made = Stage3(
            case.config,
            case.trained,
            case.frozen,
            like,
            case.scatter_dtype,
            case.dtype,
            case.run_numel,
        )

    def load(self, trained: Tensor, frozen: Tensor, masters: Tensor, state: Any) -> None:
        """Start from the rank's own world shards ``[F]`` and, unless it is None, a saved state."""
        self._made.weights.own_row.copy_(trained)
        if state is not None:
            self._made.load_state_dict(state)
        if self._case.trained:
            self._made.restart(masters)
        if self._case.frozen:
            self._made.sets[1].own_row.copy_(frozen)
            self._made.restart_frozen()

    def _set_of(self, index: int) -> tuple[Weights, int]:
        """The weights that have a parameter, and the number of its first one."""
        count = len(self._case.trained)
        if index < count:
            return self._made.weights, 0
        return self._made.sets[1], count

    def gather(self, order: Sequence[int], *lists: tuple[Sequence[int], Phase]) -> list[Tensor]:
        """Whole parameters, of lists that are all trained or all frozen. Their gathers begin one
        after the other; the rank waits for them in its own order.
        """
        begun = []
        for indices, phase in lists:
            weights, first = self._set_of(indices[0])
            begun.append(weights.gather([index - first for index in indices], phase))
        found = {place: begun[place].wait() for place in order}
        return [whole for place in range(len(begun)) for whole in found[place]]

    def publish(self, indices: range, masters: Tensor) -> None:
        """The optimizer has updated these masters ``[N / O, columns]``."""
        self._made.weights.update(masters, indices)

    def edit(self, index: int, full: Tensor) -> None:
        """A user has written a whole parameter."""
        weights, first = self._set_of(index)
        weights.write_back(index - first, full)

    def scatter(self, indices: Sequence[int], grads: list[Tensor], last: bool) -> None:
        """A bucket of one micro-batch's gradients."""
        sent = self._case.trained[indices[0]].sent
        self._made.gradients.scatter(indices, grads, last, sent)

    def peek(self) -> Tensor:
        """A user reads gradients before the step: the rank's own row ``[F]``."""
        return self._made.gradients.peek().clone()

    def sync(self) -> Tensor:
        """The gradients that the optimizer reads, ``[N / O, F]``."""
        self._made.gradients.sync()
        return self._made.gradients.optimizer_rows().clone()

    def end_step(self) -> None:
        """The step has ended."""
        self._made.end_step(skipped=False)

    def state(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return self._made.state_dict()

    def weights(self) -> Tensor:
        """The bytes of the weights that this rank stores."""
        self._made.weights.wait_for_publish()
        return self._made.weights.replicas()[0].view(-1).view(torch.uint8).clone()


@dataclass(frozen=True)
class Call:
    """One call, with what a rank passes and what it must return.

    Attributes:
        name: a method of :class:`Engine`, or "restart".
        arguments: by rank.
        wanted: by rank; None where nothing is returned.
        words: for messages.
    """

    name: str
    arguments: Callable[[int], tuple[Any, ...]]
    wanted: Callable[[int], list[Tensor]] | None = None
    words: str = ""


def nothing(rank: int) -> tuple[Any, ...]:
    """No arguments."""
    return ()


class Walk:
    """A random sequence of calls, and what the model says of each."""

    def __init__(self, seed: int, *wants: str) -> None:
        self.rng = random.Random(seed)
        self.case = drawn_case(self.rng, seed, self.rng.choice(wants))
        self.model = Model(self.case)
        self.trained = range(self.model.count)
        self.frozen = range(self.model.count, len(self.model.parameters))
        self._generator = torch.Generator().manual_seed(seed)
        self._calls: list[Call] = []
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

        def arguments(rank: int) -> tuple[Any, ...]:
            trained = self._own(tables, self.trained, rank, GARBAGE)
            frozen = self._own(tables, self.frozen, rank, GARBAGE)
            own_masters = self._own(masters, self.trained, rank, 0.0)
            return trained, frozen, own_masters, state

        self._calls.append(Call("load", arguments, words=state))

    def _alike(self, pool: Sequence[int]) -> list[int]:
        """Some parameters that one collective may carry, in some order."""
        sent = self.model.parameters[self.rng.choice(list(pool))].sent
        alike = [index for index in pool if self.model.parameters[index].sent == sent]
        return self.rng.sample(alike, self.rng.randint(1, len(alike)))

    def gather(self, *phases: Phase) -> None:
        """Gather some parameters, in one of these phases; or several lists at once, for which
        ranks wait in any order."""
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
        call = Call("gather", lambda rank: (orders[rank], *lists), lambda _: wanted, f"{lists}")
        self._calls.append(call)

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

        def arguments(rank: int) -> tuple[Any, ...]:
            degree = self.model.plan.optimizer
            rows = [self.model.rows(master, rank, degree) for master in masters]
            return indices, torch.cat(rows, dim=1)

        self._calls.append(Call("publish", arguments, words=str(indices)))

    def edit(self) -> None:
        """Write a whole parameter; half of the time with the values that it has."""
        index = self.rng.randrange(len(self.model.parameters))
        full = self.model.whole(self.model.tables[index], index).clone()
        if self.rng.random() < 0.5:
            full[self.rng.randrange(full.numel())] = self.rng.uniform(-3, 3)
        self.model.edit(index, full)
        if index in self.trained:
            self._masters[index] = self.model.table(full).float()
        self._calls.append(Call("edit", lambda _: (index, full.clone()), words=str(index)))

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

        def arguments(rank: int) -> tuple[Any, ...]:
            return bucket, [grad.clone() for grad in grads[rank]], last

        self._calls.append(Call("scatter", arguments, words=f"{bucket} {last}"))

    def sync(self) -> None:
        """Reduce gradients across gradient domains."""
        tables = [table.clone() for table in self.model.sync()]
        degree = self.model.plan.optimizer

        def wanted(rank: int) -> list[Tensor]:
            return [torch.cat([self.model.rows(table, rank, degree) for table in tables], dim=1)]

        self._calls.append(Call("sync", nothing, wanted))

    def peek(self) -> None:
        """Read gradients before the step, where the sync does not round what is read twice."""
        if self.model.sync_dtype == self.model.accumulated:
            tables = [table.clone() for table in self.model.sync()]

            def wanted(rank: int) -> list[Tensor]:
                return [self._own(tables, self.trained, rank, 0.0)]

            self._calls.append(Call("peek", nothing, wanted))

    def end_step(self) -> None:
        """End the step."""
        self.model.end_step()
        self._calls.append(Call("end_step", nothing))

    def restart(self) -> None:
        """Go on with a new engine from own rows and masters, with or without the saved state."""
        self._calls.append(Call("end_step", nothing))
        self._calls.append(Call("restart", nothing))
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

    def _on_rank(self, rank: int) -> Tensor:
        engine = Engine(self.case)
        saved: dict[str, Any] = {}
        for number, call in enumerate(self._calls):
            arguments = call.arguments(rank)
            if call.name == "restart":
                saved = engine.state()
                engine = Engine(self.case)
                continue
            if call.name == "load":
                *rows, state = arguments
                arguments = (*rows, {"fresh": None, "lost": {}, "saved": saved}[state])
            found = getattr(engine, call.name)(*arguments)
            if call.wanted is not None:
                results = [found] if isinstance(found, Tensor) else found
                self._compare(number, rank, results, call.wanted(rank))
        return engine.weights()

    def _compare(self, number: int, rank: int, found: list[Tensor], wanted: list[Tensor]) -> None:
        for place, (ours, right) in enumerate(zip(found, wanted, strict=True)):
            if ours.dtype == right.dtype and torch.equal(ours, right):
                continue
            calls = [f"{k} {call.name} {call.words}" for k, call in enumerate(self._calls)]
            history = "\n".join(calls[: number + 1])
            raise AssertionError(
                f"{self.case}\nresult {place} of the last call differs on rank {rank}: "
                f"{ours.reshape(-1)[:4].tolist()} is not {right.reshape(-1)[:4].tolist()}\n"
                f"{history}"
            )


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


@pytest.mark.parametrize(
    "seeds", [SOME, late([*range(30), *range(50, 2000)])], ids=["some", "many"]
)
@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
def test_property(holds: Callable[[int], None], seeds: Sequence[int]) -> None:
    for seed in seeds:
        holds(seed)
