# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``"scheme": "auto"``: the plan for the model that DeepSpeed was given, on the machine that was found.

Every rank sees the same model, config and machine, and the planner is a pure function of them, so all choose alike
without a word between them; that they did is checked with everything else (``agreement.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.candidates import candidates
from zero_topo.cost.explain import recommend
from zero_topo.cost.footprint import InFlight
from zero_topo.cost.planner import Request
from zero_topo.cost.simulator import Job
from zero_topo.cost.transformer import LEAST_PARAMS, scaled
from zero_topo.topology.model import Topology


def choose_plan(block: ZeroTopoConfig, topology: Topology, engine: Any | None) -> ResolvedConfig:
    """The best plan for an engine's model, with the reasons in its notes.

    Shards are those of the model's own parameters; what is in flight, and the step time, are those of a transformer of
    that size (:func:`~zero_topo.cost.transformer.scaled`) with activation checkpointing, since a module does not tell
    its shape.

    Args:
        block: the user's, with the scheme "auto".
        topology: the machine.
        engine: DeepSpeed's, or None before there is one: then any plan that may be chosen stands for all of them.

    Raises:
        ValueError: if nothing fits into memory, or the user's other keys fit no plan.
    """
    if engine is None:
        return candidates(block, replace(topology, order=None, hosts=None))[0].config
    parameters = list(engine.module.parameters())
    numels = tuple(int(getattr(p, "ds_numel", p.numel())) for p in parameters)
    job = Job(
        scaled(max(sum(numels), LEAST_PARAMS)),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        itemsize=max((p.element_size() for p in parameters), default=4),
    )
    flight = InFlight(
        engine.zero_max_live_parameters(),
        engine.zero_reduce_bucket_size(),
        engine.zero_sub_group_size(),
        engine.zero_cpu_offload(),
        engine.fp16_enabled(),
    )
    chosen = recommend(block, Request(topology, job, numels, flight=flight))
    shape = f"{job.model.layers} layers of width {job.model.hidden}, {job.model.sequence} tokens a sequence"
    assumed = f"scheme auto: {sum(numels):,} parameters, counted as a transformer of {shape}"
    resolved = resolve_config(chosen.config, topology)
    return replace(resolved, notes=(assumed, *chosen.notes, *resolved.notes))
