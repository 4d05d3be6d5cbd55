# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The formulas are what each rank sends in a step, and what it stores of frozen weights, on random
machines, plans, formats and models.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import run_threads
from tests.marks import late
from tests.ranks.phase_cases import Case, drawn_case
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.cost import memory_bytes, step_bytes
from zero_topo.engine.stage3 import Stage3
from zero_topo.plan import Phase

SYNCS: tuple[dict[str, Any], ...] = (
    {},
    {"reduce": "all_reduce"},
    {"reduce": "ring"},
    {"mode": "quantized"},
    {"mode": "quantized", "bits": 8},
)


def with_sync(case: Case, sync: dict[str, Any]) -> Case:
    """The case with another reduction between gradient domains."""
    block = ZeroTopoConfig.parse(case.block | {"sync": sync})
    config = resolve_config(block, case.config.topology)
    return replace(case, config=config) if case.trained else case


class Steps:
    """One rank's engine and its steps."""

    def __init__(self, case: Case) -> None:
        self.engine = Stage3(
            case.config,
            case.trained,
            case.frozen,
            torch.empty(0, dtype=case.dtype),
            case.scatter_dtype,
            case.dtype,
            case.run_numel,
        )
        self._case = case
        if case.trained:
            columns = self.engine.weights.own_row.shape
            self.engine.restart(torch.zeros(columns))
        if case.frozen:
            self.engine.restart_frozen()

    def _gather(self, phase: Phase) -> None:
        parts = zip(self.engine.sets, (self._case.trained, self._case.frozen), strict=False)
        for weights, parameters in parts:
            for index, parameter in enumerate(parameters):
                if parameter.persistent == (phase == "gather_exact"):
                    weights.gather([index], phase).wait()

    def _backward(self, last: bool) -> None:
        self._gather("gather_backward")
        buckets: dict[Any, list[int]] = {}
        for index, parameter in enumerate(self._case.trained):
            buckets.setdefault(parameter.sent, []).append(index)
        for sent, bucket in buckets.items():
            numels = [self._case.trained[index].numel for index in bucket]
            grads = [torch.ones(numel, dtype=self._case.dtype) for numel in numels]
            self.engine.gradients.scatter(bucket, grads, last, sent)

    def step(self, micro_batches: int) -> None:
        """One optimizer step, which makes new weights of the gradients."""
        trained = bool(self._case.trained)
        for batch in range(micro_batches):
            self._gather("gather_forward")
            if trained:
                self._backward(batch == micro_batches - 1)
        if trained:
            self.engine.gradients.sync()
            self.engine.weights.update(self.engine.gradients.optimizer_rows().float())
            self._gather("gather_exact")
            self.engine.weights.wait_for_publish()
        self.engine.end_step(skipped=False)


@pytest.mark.parametrize("seeds", [range(25), late(range(25, 1500))], ids=["some", "many"])
def test_the_formulas_are_what_every_rank_sends_and_stores(seeds: range) -> None:
    """To the byte, by phase and domain; also where the weights are not trained."""
    for seed in seeds:
        rng = random.Random(seed)
        case = drawn_case(rng, seed, rng.choice(["", "", "int8", "secondary", "frozen"]))
        case = with_sync(case, rng.choice(SYNCS))
        micro_batches = rng.randint(1, 3)

        def rank_main(rank: int, case: Case = case, count: int = micro_batches) -> None:
            steps = Steps(case)
            steps.step(1)  # fills copies that all later steps read
            steps.step(count)
            work = steps.engine.workload(count)
            sent = Counter(steps.engine.meter.last_step)
            assert sent == step_bytes(case.config, work), case
            memory = steps.engine.memory()
            formula = memory_bytes(case.config, work, case.dtype.itemsize)
            for role in ("weights", "secondary", "frozen", "residual"):
                assert memory.get(role, 0) == formula.get(role, 0), (role, case)
            assert case.trained or {**memory, "optimizer": 0} == formula, case

        run_threads(case.config.plan.world_size, rank_main)
