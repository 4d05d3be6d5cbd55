# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Traffic, memory and times of a model on FSDP2, and the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_topo.cost.memory import ADAM_BYTES
from zero_topo.cost.volume import Workload
from zero_topo.fsdp.optimizer import ShardedOptimizer
from zero_topo.observe.collect import gather_bytes, peak_memory, write_report
from zero_topo.observe.report import Stats


def stats(optimizer: ShardedOptimizer) -> Stats:
    """Return this rank's traffic, memory and times. Not collective.

    Args:
        optimizer: of :func:`~zero_topo.fsdp.shard_optimizer`.
    """
    host = optimizer.host
    meter = host.mesh.meter
    mode = optimizer.gradients.mode
    peak, on_device = peak_memory(mode.context.device)
    return Stats(
        config=host.config,
        steps=meter.steps,
        micro_batches=optimizer.passes,
        step_bytes=dict(meter.last_step),
        total_bytes=dict(meter.total),
        memory=_memory(optimizer),
        work=_workload(optimizer),
        accumulation_itemsize=optimizer.gradients.buffer.itemsize,
        optimizer_itemsize=ADAM_BYTES,
        calls=dict(meter.calls),
        phase_seconds=dict(meter.last_seconds),
        sync_report=mode.report(),
        peak_memory=peak,
        on_device=on_device,
        predicted_memory={},
        formula=dict(optimizer.formula),
    )


def report(
    optimizer: ShardedOptimizer,
    folder: str | Path,
    title: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the report of a run with the measurements of all ranks. Collective.

    Args:
        optimizer: of :func:`~zero_topo.fsdp.shard_optimizer`.
        folder: where rank 0 writes ``report.json``, ``report.html`` and its pictures.
        title: one line about model and data; by default the model's class and size.
        settings: the program's settings, to show in the report.
    """
    found = stats(optimizer)
    ranks = gather_bytes(found)
    if dist.get_rank() == 0:
        write_report(folder, found, ranks, optimizer.host.model, title, settings)


def _workload(optimizer: ShardedOptimizer) -> Workload:
    """Describe the model, each parameter padded to whole shards, for ZeRO-3 and for memory."""
    context = optimizer.gradients.mode.context
    params = context.parameters
    weights = next(iter(optimizer.parts)).itemsize
    return Workload(
        numels=tuple(param.numel for param in params),
        dims=tuple(param.dims for param in params),
        persistent=(False,) * len(params),
        itemsize=weights,
        micro_batches=optimizer.passes,
        scatter_itemsize=weights,
        sync_itemsize=context.dtype.itemsize,
        run_numel=optimizer.publisher.run_numel,
    )


def _memory(optimizer: ShardedOptimizer) -> dict[str, int]:
    """Return the bytes of the shards that this rank stores."""
    trained = sum(part.local().nbytes for part in optimizer.parts.values())
    gradients = optimizer.gradients
    sizes = {"weights": trained, "gradients": gradients.buffer.nbytes}
    states: list[Tensor] = []
    for part in optimizer.parts.values():
        states.append(part.master)
        values = optimizer.inner.state.get(part.master, {}).values()
        states += [value for value in values if isinstance(value, Tensor) and value.dim()]
    sizes["optimizer"] = sum(state.nbytes for state in states)
    frozen = [param for param in optimizer.host.model.parameters() if param not in optimizer.parts]
    if frozen:
        sizes["frozen"] = sum(_stored_bytes(param) for param in frozen)
    residual = gradients.mode.state_bytes()
    return {**sizes, "residual": residual} if residual else sizes


def _stored_bytes(param: Tensor) -> int:
    return param.to_local().nbytes if isinstance(param, DTensor) else param.nbytes
