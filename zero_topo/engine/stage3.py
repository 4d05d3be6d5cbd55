# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The engine behind one DeepSpeed stage-3 optimizer: groups, shards, sync mode, meter. It knows no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.collectives.wire import Wire
from zero_topo.config import ResolvedConfig
from zero_topo.cost.volume import Workload
from zero_topo.engine.agreement import check_agreement, check_replicas
from zero_topo.engine.gradients import GradientOptions, Gradients
from zero_topo.engine.masters import Masters
from zero_topo.engine.shards import Layout
from zero_topo.engine.weights import WeightOptions, Weights
from zero_topo.mesh import Mesh
from zero_topo.plan import Plan
from zero_topo.quant.registry import select_quantizer
from zero_topo.sync import SyncContext, build_mode

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """What the engine takes from DeepSpeed.

    Attributes:
        numels: elements of each trainable parameter, in DeepSpeed's flat order.
        names: their names, for messages.
        like: a tensor of the model's dtype on the accelerator.
        scatter_dtype: DeepSpeed's ``communication_data_type``, used where gradients are not quantized.
        accumulation_dtype: DeepSpeed's own choice, used if the block names none.
        bucket_numel: DeepSpeed's ``reduce_bucket_size``; also bounds the temporaries of sync and publish.
    """

    numels: tuple[int, ...]
    names: tuple[str, ...]
    like: Tensor
    scatter_dtype: torch.dtype
    accumulation_dtype: torch.dtype
    bucket_numel: int


@dataclass(frozen=True)
class Stats:
    """What an engine did and holds, on this rank; see :func:`zero_topo.stats`.

    Attributes:
        config: the resolved block.
        steps: optimizer steps taken, skipped ones included.
        micro_batches: micro-batches per optimizer step.
        step_bytes: ``(phase, domain)`` -> bytes this rank sent in the last optimizer step.
        total_bytes: the same since the start.
        memory: role -> bytes held on this rank.
        work: the model as the cost formulas see it.
        accumulation_itemsize: bytes per element of the gradient buffer.
        optimizer_itemsize: bytes per element of Adam's states, 12, or 8 where FP32 masters are the weights themselves.
        calls: phase -> collectives since the start.
    """

    config: ResolvedConfig
    steps: int
    micro_batches: int
    step_bytes: dict[tuple[str, str], int]
    total_bytes: dict[tuple[str, str], int]
    memory: dict[str, int]
    work: Workload
    accumulation_itemsize: int
    optimizer_itemsize: int
    calls: dict[str, int]


class Stage3:
    """Owns the nested shards of one optimizer.

    Attributes:
        weights: primary and secondary shards.
        gradients: the gradient shard and the mode of sync.
        masters: FP32 optimizer shards, where DeepSpeed's own layout cannot hold them; else None.
        meter: bytes sent.
    """

    def __init__(self, config: ResolvedConfig, setup: Setup) -> None:
        check_agreement(config)
        self.config = config
        self.setup = setup
        self.meter = Meter(config.meter)
        self.layout = Layout(config.plan, dist.get_rank(), setup.numels)
        self.mesh = Mesh(config.plan, config.topology, required_hops(config.plan))
        self.quantizer = select_quantizer(setup.like.device)
        self.accumulation_dtype = _dtype(config.accumulation_dtype, setup.accumulation_dtype)
        self.publish_dtype = _dtype(config.publish.dtype, setup.like.dtype)
        self.weights = self._build_weights()
        self.gradients = self._build_gradients()
        self.masters = Masters(self.layout, self.mesh, self.meter, setup.like.device) if self.separate_masters else None

    @property
    def separate_masters(self) -> bool:
        """Whether FP32 masters need buffers of their own: several rows per rank, or weights published rounded."""
        plan = self.config.plan
        return plan.optimizer < plan.world_size or self.publish_dtype != self.setup.like.dtype

    def _build_weights(self) -> Weights:
        config, setup = self.config, self.setup
        options = WeightOptions(config.weights_spec, config.secondary_spec, self.publish_dtype, setup.bucket_numel)
        return Weights(self.layout, self.mesh, self.meter, self.quantizer, options, setup.like)

    def _build_gradients(self) -> Gradients:
        config, setup = self.config, self.setup
        context = SyncContext(
            plan=config.plan,
            mesh=self.mesh,
            meter=self.meter,
            quantizer=self.quantizer,
            dtype=self.sync_dtype,
            chunk_numel=setup.bucket_numel,
        )
        wire = Wire(self.quantizer, config.gradients_spec, setup.scatter_dtype)
        options = GradientOptions(wire, self.accumulation_dtype)
        mode = build_mode(config.sync, context)
        return Gradients(self.layout, self.mesh, self.meter, mode, options, setup.like.device)

    @property
    def sync_dtype(self) -> torch.dtype:
        """Type in which dense sync values travel."""
        return _dtype(getattr(self.config.sync, "dtype", None), self.accumulation_dtype)

    def restart(self, row: Tensor) -> None:
        """Take each rank's own world shard as the truth, at start-up and after a load. Collective.

        Args:
            row: ``[F]``, this rank's own row of the primary shard; its padding is zeroed.
        """
        self.layout.clear_padding(row[None], self.config.plan.world_size)
        self.weights.publish_world()
        self.gradients.zero()
        self.meter.reset_step()

    def end_step(self) -> None:
        """After an optimizer step, skipped or not: zero the gradients and close the meter's step."""
        self.gradients.zero()
        self.meter.end_step()

    def publish(self) -> None:
        """Publish updated weights; with ``debug_checks``, compare all replicas afterwards.

        Raises:
            RuntimeError: on every rank, if ranks that share a shard hold different bits.
        """
        self.weights.publish()
        if self.config.debug_checks:
            check_replicas(self.config.plan, self.weights.copies())

    def workload(self, persistent: tuple[bool, ...], micro_batches: int) -> Workload:
        """The model as the cost formulas see it, all gradients in one bucket."""
        setup = self.setup
        return Workload(
            numels=setup.numels,
            persistent=persistent,
            itemsize=setup.like.dtype.itemsize,
            buckets=None,
            micro_batches=micro_batches,
            scatter_itemsize=setup.scatter_dtype.itemsize,
            sync_itemsize=self.sync_dtype.itemsize,
            publish_itemsize=self.publish_dtype.itemsize,
        )

    def memory(self) -> dict[str, int]:
        """Bytes of the shards on this rank, but for the optimizer's."""
        return {**self.weights.memory(), "gradients": self.gradients.buffer.nbytes}


def required_hops(plan: Plan) -> list[tuple[int, int]]:
    """Every hop an engine of this plan may use, in the order in which all ranks create the groups."""
    world = plan.world_size
    hops = [(1, plan.weights), *plan.hop_chain(), (plan.gradients, world), (plan.optimizer, world)]
    hops += [(plan.weights, plan.optimizer), (plan.weights, world)]
    return [*hops, (1, plan.secondary)] if plan.secondary is not None else hops


def _dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    return default if name is None else DTYPES[name]
