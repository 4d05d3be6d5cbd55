# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The benchmark's model on FSDP2, plain or with our collectives, behind the few calls of a
DeepSpeed engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zero_topo.fsdp as topo
from benchmarks.emulated_cluster.ring import ring_reduce_scatter_tensor
from benchmarks.emulated_cluster.spec import Spec
from benchmarks.training_setup import TrainingSetup
from benchmarks.uplink import stock_uplink, uplink
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.cost import Workload
from zero_topo.examples.gpt import GPT
from zero_topo.observe.report import Stats


class Ring:
    """FSDP2's reduce-scatter as the benchmark's ring, see ``emulated_cluster/ring.py``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> None:
        """Sum over the ranks of a group."""
        ring_reduce_scatter_tensor(output_tensor, input_tensor, group=how["group"])


class FsdpEngine:
    """A model and its optimizer on FSDP2, with the calls of a DeepSpeed engine that the benchmark
    makes.

    Plain FSDP2 stores FP32 weights, and gathers and reduces in 16 bits; ours stores 16 bits and
    FP32 masters.

    Attributes:
        module: the model.

    Args:
        model: on every rank.
        setup: sizes and learning rate.
        job: with "host", "block", "ring" and "micro_batches".
    """

    def __init__(self, model: GPT, setup: TrainingSetup, job: Mapping[str, Any]) -> None:
        self._job = job
        self._count = 0
        settings = setup.deepspeed(None, 1)
        adam = {
            key: value
            for key, value in settings["optimizer"]["params"].items()
            if key != "torch_adam"
        }
        self._clip = settings["gradient_clipping"]
        self.module: Any = model
        if job["block"] is not None:
            topo.fully_shard(model.bfloat16() if setup.bf16 else model, job["block"])
            self.optimizer: torch.optim.Optimizer = topo.shard_optimizer(
                torch.optim.AdamW, model, **adam
            )
            return
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
            if setup.bf16
            else MixedPrecisionPolicy()
        )
        mesh = _plain_mesh(job)
        modules: list[Any] = [*model.blocks, model]
        for module in modules:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for module in modules:
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            if job["ring"]:
                module.set_custom_reduce_scatter(Ring())
        self.optimizer = torch.optim.AdamW(model.parameters(), **adam)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return int(self._job["micro_batches"])

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch."""
        loss: Tensor = self.module(tokens, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        """A micro-batch's backward pass; replicas are reduced in the last one of a step alone."""
        last = self._count == self.gradient_accumulation_steps() - 1
        self.module.set_requires_all_reduce(last)
        (loss / self.gradient_accumulation_steps()).backward()

    def step(self) -> None:
        """An optimizer step after the last micro-batch."""
        self._count = (self._count + 1) % self.gradient_accumulation_steps()
        if self._count == 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def expected(self, spec: Spec) -> tuple[float, Stats | None]:
        """Bytes that leave a node in a step by the formulas, and what our meter counted, if it is
        ours.
        """
        if isinstance(self.optimizer, topo.ShardedOptimizer):
            stats = topo.stats(self.optimizer)
            return uplink(stats.config, stats.work, spec), stats
        numels = [param.numel() for param in self.module.parameters()]
        count = self.gradient_accumulation_steps()
        if self._job["host"] == "fsdp":
            return stock_uplink(numels, count, spec, self._job["ring"]), None
        config = resolve_config(ZeroTopoConfig.parse({"scheme": "hsdp"}), spec.topology())
        return uplink(config, Workload.uniform(numels, 2, count), spec), None


def _plain_mesh(job: Mapping[str, Any]) -> DeviceMesh:
    """The mesh of FSDP2 over all ranks, or with a replica on each node."""
    world = dist.get_world_size()
    if job["host"] == "fsdp":
        return init_device_mesh("cpu", (world,))
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh(
        "cpu", (world // per_node, per_node), mesh_dim_names=("replicate", "shard")
    )
