# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Predicts which plan trains a live model fastest on a machine; DeepSpeed has such estimators for memory alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.explain import explain, setting
from zero_topo.cost.model_files import TRAINED
from zero_topo.cost.module_tree import read_modules, shape_of
from zero_topo.cost.planner import Ranking, Request, rank_plans
from zero_topo.cost.step import Job
from zero_topo.topology import Topology, resolve_topology


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
        sequence: tokens of a sequence; None takes the limit of the model's config, at most 4096; without one, 2048.
        micro_batch: sequences per rank and micro-batch.
        micro_batches: micro-batches per optimizer step.
        checkpointing: whether activations are recomputed.
        lossy: whether plans may be quantized.

    Raises:
        ValueError: if the machine or the ranks are wrong, or no plan fits.
    """
    found = resolve_topology(machine, os.environ, ranks)
    request = module_request(model, found, sequence, micro_batch=micro_batch, micro_batches=micro_batches)
    job = replace(request.job, checkpointing=checkpointing)
    ranking, tree = rank_plans(ZeroTopoConfig.parse({"lossy": lossy}), replace(request, job=job)), job.model
    print(f"{tree.name}: {tree.params:,} parameters in {tree.layers} layers of width {tree.hidden}")
    for line in (setting(job), *explain(ranking)):
        print(f"- {line}")
    return ranking


def module_request(
    module: Any, topology: Topology, sequence: int | None = None, trains: bool = True, **job: Any
) -> Request:
    """Return the planner's request for a live model, whose parameters DeepSpeed may have partitioned.

    Args:
        module: the ``torch.nn.Module``.
        topology: the machine.
        sequence: tokens of a sequence; None takes the limit of the model's config, at most 4096; without one, 2048.
        trains: whether there are gradients and optimizer states. A model without a trained parameter counts as trained.
        job: other fields of :class:`~zero_topo.cost.step.Job`.
    """
    tree = read_modules(module, type(module).__name__)
    tree = replace(tree, sequence=sequence or min(tree.sequence, TRAINED))
    parameters = [*module.parameters()]
    trained, frozen = ([p for p in parameters if (p.requires_grad and trains) == which] for which in (True, False))
    if trains and not trained:
        trained, frozen = frozen, trained
    numels, still = (tuple(math.prod(shape_of(p)) for p in group) for group in (trained, frozen))
    whole = tuple(bool(getattr(p, "use_muon", False)) for p in trained)  # DeepSpeed's mark
    return Request(topology, Job(tree, **job), numels, frozen=still, whole=whole)
