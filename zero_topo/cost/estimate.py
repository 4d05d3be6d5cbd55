# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Predicts which plan trains a live model fastest on a machine; DeepSpeed has such estimators for memory alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.explain import explain, setting
from zero_topo.cost.module_tree import read_modules
from zero_topo.cost.planner import Ranking, Request, rank_plans
from zero_topo.cost.step import Job
from zero_topo.topology import resolve_topology


def estimate(
    model: Any,
    machine: str | Mapping[str, Any] = "auto",
    ranks: int | None = None,
    *,
    sequence: int | None = None,
    micro_batch: int = 1,
    micro_batches: int = 1,
    checkpointing: bool = True,
    lossy: bool = False,
) -> Ranking:
    """Print the plan that is predicted to train a model fastest in 16 bits, with the reasons, and return all plans.

    Args:
        model: a ``torch.nn.Module`` on any device, also "meta". Parameters that require no gradient count as frozen.
        machine: the machine, as the config key ``topology`` takes it.
        ranks: ranks of the job; None takes the launcher's, or those of the machine's description.
        sequence: tokens of a sequence; None takes the limit of the model's config, or 2048.
        micro_batch: sequences per rank and micro-batch.
        micro_batches: micro-batches per optimizer step.
        checkpointing: whether activations are recomputed.
        lossy: whether plans may be quantized.

    Raises:
        ValueError: if the machine or the ranks are wrong, or no plan fits.
    """
    tree = read_modules(model, type(model).__name__)
    tree = tree if sequence is None else replace(tree, sequence=sequence)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, frozen = (tuple(numel for numel, trains in sizes if trains == which) for which in (True, False))
    job = Job(tree, micro_batch, micro_batches, checkpointing)
    request = Request(resolve_topology(machine, os.environ, ranks), job, trained, frozen=frozen)
    ranking = rank_plans(ZeroTopoConfig.parse({"lossy": lossy}), request)
    print(f"{tree.name}: {tree.params:,} parameters in {tree.layers} layers of width {tree.hidden}")
    for line in (setting(job), *explain(ranking)):
        print(f"- {line}")
    return ranking
