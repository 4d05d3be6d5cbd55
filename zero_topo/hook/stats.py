# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero_topo.stats``: an engine's traffic, memory and waiting times."""

from __future__ import annotations

import resource
from typing import Any

from deepspeed.accelerator import get_accelerator

from zero_topo.cost.memory import ADAM_BYTES, ADAM_BYTES_FP32, AGE_BYTES, VARIANCE_BYTES
from zero_topo.hook.automatic import request_of
from zero_topo.hook.inference import TopoInference
from zero_topo.hook.optimizer import TopoStage3
from zero_topo.observe.report import Stats
from zero_topo.sync import AdamS, AgedAdamW
from zero_topo.units import KIB


def stats(engine: Any) -> Stats:
    """Return this rank's traffic, memory and times for a DeepSpeed engine with a ``zero_topo`` block. Not collective.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.

    Raises:
        ValueError: if the engine runs without zero_topo.
    """
    optimizer = engine.optimizer
    trains = isinstance(optimizer, TopoStage3)
    if not trains and not isinstance(optimizer, TopoInference):
        raise ValueError(
            'this engine runs without zero_topo; put a "zero_topo" block into its DeepSpeed JSON and import zero_topo'
        )
    topo = optimizer.topo
    micro_batches = engine.gradient_accumulation_steps()
    peak, on_device = peak_memory()
    if trains and not optimizer.predicted_memory:
        optimizer.predicted_memory = request_of(engine, topo.config.topology).price(topo.config).memory
    return Stats(
        config=topo.config,
        steps=topo.meter.steps,
        micro_batches=micro_batches,
        step_bytes=dict(topo.meter.last_step()),
        total_bytes=dict(topo.meter.total()),
        memory={**topo.memory(), "optimizer": _optimizer_bytes(optimizer) if trains else 0},
        work=topo.workload(micro_batches),
        accumulation_itemsize=topo.accumulation_dtype.itemsize,
        optimizer_itemsize=_optimizer_itemsize(optimizer) if trains else 0,
        calls=dict(topo.meter.calls),
        phase_seconds=dict(topo.meter.last_seconds()),
        sync_report=topo.gradients.mode.report(),
        phase_spans=topo.meter.last_spans(),
        peak_memory=peak,
        on_device=on_device,
        predicted_memory=optimizer.predicted_memory if trains else {},
        pace=optimizer.pace.last if trains else {},
    )


def peak_memory() -> tuple[int, bool]:
    """Return the peak bytes of tensors on this rank's device (on a CPU, of the process), and whether of a device."""
    if get_accelerator().is_synchronized_device():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB, False
    return int(get_accelerator().max_memory_allocated()), True


def _optimizer_itemsize(optimizer: TopoStage3) -> int:
    """Return the expected bytes per element of Adam's states and FP32 masters (unless these are the weights)."""
    adam = ADAM_BYTES_FP32 if optimizer.masters_are_weights() else ADAM_BYTES
    ours = ((AdamS, -VARIANCE_BYTES), (AgedAdamW, AGE_BYTES))
    return adam + sum(more for kind, more in ours if isinstance(optimizer.optimizer, kind))


def _optimizer_bytes(optimizer: TopoStage3) -> int:
    """Return the bytes of FP32 masters (unless they are the weights) and optimizer states on this rank."""
    masters = [] if optimizer.masters_are_weights() else optimizer.fp32_partitioned_groups_flat
    return sum(tensor.nbytes for tensor in (*masters, *optimizer.optimizer_tensors()))
