# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What to plan for the model that DeepSpeed was given: ``"scheme": "auto"`` is chosen for it, a named one must fit.

Every rank sees the same model, config and machine, and the planner is a pure function of them, so all choose alike
without a word between them; that they did is checked with everything else (``agreement.py``).
"""

from __future__ import annotations

from typing import Any

from zero_topo.cost.footprint import InFlight
from zero_topo.cost.planner import Request
from zero_topo.cost.step import Job
from zero_topo.cost.transformer import LEAST_PARAMS, scaled
from zero_topo.topology.model import Topology


def request_of(engine: Any, topology: Topology, trains: bool = True) -> Request:
    """What to plan for an engine.

    Shards are those of the model's parameters. What is in flight, and the step time, are those of a transformer of its
    size (:func:`~zero_topo.cost.transformer.scaled`) with activation checkpointing, since a module does not tell its
    shape.

    Args:
        engine: DeepSpeed's.
        topology: the machine.
        trains: whether there are gradients and optimizer states. True for the reference model of a policy too, which
            takes the policy's plan, so that both round their weights alike.
    """
    trained: list[tuple[int, int]] = []
    frozen: list[tuple[int, int]] = []
    for parameter in engine.module.parameters():
        numel = int(getattr(parameter, "ds_numel", parameter.numel()))
        (trained if parameter.requires_grad and trains else frozen).append((numel, parameter.element_size()))
    if trains and not trained:
        trained, frozen = frozen, trained
    job = Job(
        scaled(max(sum(numel for numel, _ in (*trained, *frozen)), LEAST_PARAMS)),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        itemsize=max((size for _, size in (*trained, *frozen)), default=4),
    )
    flight = InFlight(
        engine.zero_max_live_parameters(),
        engine.zero_reduce_bucket_size(),
        engine.zero_sub_group_size(),
        engine.zero_cpu_offload(),
        engine.fp16_enabled(),
    )
    numels, still = (tuple(numel for numel, _ in params) for params in (trained, frozen))
    return Request(topology, job, numels, flight=flight, frozen=still)
