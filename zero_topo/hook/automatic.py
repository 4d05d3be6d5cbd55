# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The planner's request for DeepSpeed's model: it chooses a plan for ``"scheme": "auto"``, and checks a named scheme.

Every rank has the same model, config and machine, and the planner is a pure function of them, so all ranks choose one
plan without communication. ``agreement.py`` checks that they did.
"""

from __future__ import annotations

from typing import Any

from zero_topo.cost.footprint import InFlight
from zero_topo.cost.muon import method_of
from zero_topo.cost.planner import Request
from zero_topo.cost.step import Job
from zero_topo.cost.transformer import LEAST_PARAMS, scaled
from zero_topo.topology.model import Topology


def request_of(engine: Any, topology: Topology, trains: bool = True) -> Request:
    """Return the planner's request for an engine.

    Shards have the sizes of the model's parameters. A module does not expose its architecture, so memory in flight and
    step time are those of a transformer of its size (:func:`~zero_topo.cost.transformer.scaled`) with activation
    checkpointing.

    Args:
        engine: DeepSpeed's engine.
        topology: the machine.
        trains: whether there are gradients and optimizer states. True for the reference model of a policy too: it uses
            the policy's plan, so that both round their weights identically.
    """
    trained: list[tuple[int, int, bool]] = []
    frozen: list[tuple[int, int, bool]] = []
    for parameter in engine.module.parameters():
        numel = int(getattr(parameter, "ds_numel", parameter.numel()))
        of = numel, parameter.element_size(), bool(getattr(parameter, "use_muon", False))
        (trained if parameter.requires_grad and trains else frozen).append(of)
    if trains and not trained:
        trained, frozen = frozen, trained
    job = Job(
        scaled(max(sum(numel for numel, *_ in (*trained, *frozen)), LEAST_PARAMS)),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        itemsize=max((size for _, size, _ in (*trained, *frozen)), default=4),
        muon=method_of({"optimizer": {"type": engine.optimizer_name(), "params": engine.optimizer_params()}}),
    )
    flight = InFlight(
        engine.zero_max_live_parameters(),
        engine.zero_reduce_bucket_size(),
        engine.zero_sub_group_size(),
        engine.zero_cpu_offload(),
        engine.fp16_enabled(),
    )
    numels, still = (tuple(numel for numel, *_ in params) for params in (trained, frozen))
    whole = tuple(muon for *_, muon in trained)
    return Request(topology, job, numels, flight=flight, frozen=still, whole=whole)
