# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The planner's request for DeepSpeed's model: it chooses a plan for ``"scheme": "auto"``, and checks a named scheme.

Every rank has the same model, config and machine, and the planner is a pure function of them, so all ranks choose one
plan without communication. ``agreement.py`` checks that they did.
"""

from __future__ import annotations

from typing import Any

from zero_topo.cost.estimate import module_request
from zero_topo.cost.muon import method_of
from zero_topo.cost.planner import Request
from zero_topo.topology.model import Topology


def request_of(engine: Any, topology: Topology, trains: bool = True) -> Request:
    """Return the planner's request for an engine: its modules, with activation checkpointing, and its settings.

    Args:
        engine: DeepSpeed's engine.
        topology: the machine.
        trains: whether there are gradients and optimizer states. True for the reference model of a policy too: it uses
            the policy's plan, so that both round their weights identically.
    """
    return module_request(
        engine.module,
        topology,
        trains=trains,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        micro_batches=engine.gradient_accumulation_steps(),
        itemsize=max((p.element_size() for p in engine.module.parameters()), default=4),
        muon=method_of({"optimizer": {"type": engine.optimizer_name(), "params": engine.optimizer_params()}}),
        live=engine.zero_max_live_parameters(),
        bucket=engine.zero_reduce_bucket_size(),
        sub_group=engine.zero_sub_group_size(),
        offload=engine.zero_cpu_offload(),
        loss_scaled=engine.fp16_enabled(),
    )
