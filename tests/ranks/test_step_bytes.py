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


def gather(engine: Stage3, case: Case, phase: Phase) -> None:
    """Gather the parameters that a phase is for."""
    for weights, parameters in zip(engine.sets, (case.trained, case.frozen), strict=False):
        for index, parameter in enumerate(parameters):
            if parameter.persistent == (phase == "gather_exact"):
                weights.gather([index], phase).wait()


def step(engine: Stage3, case: Case, micro_batches: int) -> None:
    """One optimizer step with a bucket for each type that is sent, which makes new weights of the
    gradients.
    """
    buckets: dict[Any, list[int]] = {}
    for index, parameter in enumerate(case.trained):
        buckets.setdefault(parameter.sent, []).append(index)
    for batch in range(micro_batches):
        gather(engine, case, "gather_forward")
        if case.trained:
            gather(engine, case, "gather_backward")
        for sent, bucket in buckets.items():
            numels = [case.trained[index].numel for index in bucket]
            grads = [torch.ones(numel, dtype=case.dtype) for numel in numels]
            engine.gradients.scatter(bucket, grads, batch == micro_batches - 1, sent)
    if case.trained:
        engine.gradients.sync()
        engine.weights.update(engine.gradients.optimizer_rows().float())
        gather(engine, case, "gather_exact")
        engine.weights.wait_for_publish()
    engine.end_step(skipped=False)


@pytest.mark.parametrize("seeds", [range(25), late(range(25, 1500))], ids=["some", "many"])
def test_the_formulas_are_what_every_rank_sends_and_stores(seeds: range) -> None:
    """To the byte, by phase and domain; also where the weights are not trained."""
    for seed in seeds:
        rng = random.Random(seed)
        case = drawn_case(rng, seed, rng.choice(["", "", "int8", "secondary", "frozen"]))
        case = with_sync(case, rng.choice(SYNCS))
        micro_batches = rng.randint(1, 3)

        def rank_main(rank: int, case: Case = case, count: int = micro_batches) -> None:
            engine = case.engine()
            if case.trained:
                engine.restart(torch.zeros(engine.weights.own_row.shape))
            if case.frozen:
                engine.restart_frozen()
            step(engine, case, 1)  # fills copies that all later steps read
            step(engine, case, count)
            work = engine.workload(count)
            sent = Counter(engine.meter.last_step)
            assert sent == step_bytes(case.config, work), case
            memory = engine.memory()
            formula = memory_bytes(case.config, work, case.dtype.itemsize)
            for role in ("weights", "secondary", "frozen", "residual"):
                assert memory.get(role, 0) == formula.get(role, 0), (role, case)
            assert case.trained or {**memory, "optimizer": 0} == formula, case

        run_threads(case.config.plan.world_size, rank_main)
