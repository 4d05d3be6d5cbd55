# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The benchmarks' GPT, split by AutoTP, trains as the whole one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject import layers

from benchmarks.control import Control
from benchmarks.engine_groups import clean_groups
from benchmarks.floors import tensor_load
from benchmarks.schemes import KNOWN
from benchmarks.training import Bench, build_model, engine_of
from benchmarks.training_setup import TrainingSetup
from tests.launcher.training import EMULATED, mean
from zero_topo.examples.data import Corpus

SETUP = TrainingSetup(layers=2, width=128, context=8, batch=1, bf16=False)
MICRO_BATCHES = 2
STEPS = 4


def losses_of(name: str) -> list[float]:
    """Mean losses of a scheme's first steps over all ranks."""
    job = KNOWN[name].job_on(EMULATED)
    corpus = Corpus.load(None, SETUP.context)
    bench = Bench(SETUP, STEPS, 1, Control(None), corpus, dist.new_group())
    config = SETUP.of_job(job, MICRO_BATCHES)
    shared = job.get("tensor", 1)
    found = []
    with clean_groups(), engine_of(build_model(SETUP, 0), config) as engine:
        for step in range(STEPS):
            loss = bench.train_step(engine, step, shared=shared)
            found.append(mean(torch.tensor(loss)))
    return found


@pytest.mark.parametrize(("name", "tolerance"), [("stock-tp2", 1e-5), ("topo-tp2", 1e-2)])
def test_the_split_gpt_trains_as_the_whole_one(
    name: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of ranks sees the samples of both, and each has half of the heads: losses of the same
    steps are equal, and the pair reduces as many bytes as the formula says.
    """
    whole = losses_of("stock")
    reduced = 0
    reduce = layers.dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal reduced
        reduced += tensor.nbytes
        return reduce(tensor, *args, **kwargs)

    counting = SimpleNamespace(**{**vars(layers.dist), "all_reduce": counted})
    monkeypatch.setattr(layers, "dist", counting)
    assert losses_of(name) == pytest.approx(whole, rel=tolerance)
    # Of two ranks each sends as many bytes as are reduced
    assert reduced == STEPS * tensor_load(SETUP, MICRO_BATCHES, 2).out["gcd"]
