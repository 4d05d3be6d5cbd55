# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero_topo.stats``: an engine's traffic, memory and waiting times."""

from __future__ import annotations

import resource
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from deepspeed.accelerator import get_accelerator

from zero_topo.collectives.meter import Span
from zero_topo.config import ResolvedConfig
from zero_topo.cost import Workload
from zero_topo.cost.memory import ADAM_BYTES, ADAM_BYTES_FP32, AGE_BYTES, VARIANCE_BYTES
from zero_topo.hook.automatic import request_of
from zero_topo.hook.inference import TopoInference
from zero_topo.hook.optimizer import TopoStage3
from zero_topo.observe.report import RankBytes, measurements
from zero_topo.observe.tables import measured_text, pace_words
from zero_topo.sync import AdamS, AgedAdamW
from zero_topo.units import KIB


@dataclass(frozen=True)
class Stats:
    """Traffic, memory and times of an engine on this rank (``zero_topo.stats``); ``str`` returns tables.

    Attributes:
        config: the resolved block.
        steps: optimizer steps, skipped ones included; forward passes for an engine without an optimizer.
        micro_batches: micro-batches per optimizer step.
        step_bytes: ``(phase, domain)`` -> bytes this rank sent in the last optimizer step.
        total_bytes: ``(phase, domain)`` -> bytes this rank sent since the start.
        memory: role -> bytes stored by this rank, including states offloaded to the host.
        work: the model as input of the cost formulas.
        accumulation_itemsize: bytes per element of the gradient buffer.
        optimizer_itemsize: bytes per element of Adam's states, 12, or 8 if FP32 masters are the weights themselves;
            4 less with AdamS, 1 more with AgedAdamW.
        calls: phase -> collectives since the start.
        phase_seconds: phase -> seconds of the last optimizer step in which the host worked on it or waited for it.
        sync_report: the mode of sync's report of the last step: densities, norms, counts.
        phase_spans: (phase, begin, end) of the times summed in ``phase_seconds``, in seconds since the previous step.
        peak_memory: peak bytes of tensors on this rank's device; on a CPU, peak bytes of the process.
        on_device: whether ``peak_memory`` is that of a device.
        predicted_memory: role -> bytes on this rank at the peak of a step, as the planner predicts them; empty without
            an optimizer.
        pace: ``tokens_per_s``, ``tflops`` and ``mfu`` of this rank in the last optimizer step, as far as known.
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
    phase_seconds: dict[str, float]
    sync_report: dict[str, float]
    phase_spans: Collection[Span]
    peak_memory: int
    on_device: bool
    predicted_memory: dict[str, int]
    pace: dict[str, float]

    def __str__(self) -> str:
        what = "optimizer steps" if self.optimizer_itemsize else "forward passes"
        head = f"{self.steps} {what}" + (f"; the last one: {pace_words(self.pace)}" if self.pace else "")
        return f"{head}\n\n{measured_text(measurements(self, [self.of_rank()]))}"

    def of_rank(self) -> RankBytes:
        """Return this rank's part of a report."""
        return RankBytes(self.step_bytes, self.memory, self.peak_memory)


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
        optimizer.predicted_memory = request_of(engine, topo.config.topology).holds(topo.config)
    return Stats(
        config=topo.config,
        steps=topo.meter.steps,
        micro_batches=micro_batches,
        step_bytes=dict(topo.meter.last_step),
        total_bytes=dict(topo.meter.total),
        memory={**topo.memory(), "optimizer": _optimizer_bytes(optimizer) if trains else 0},
        work=topo.workload(micro_batches),
        accumulation_itemsize=topo.accumulation_dtype.itemsize,
        optimizer_itemsize=_optimizer_itemsize(optimizer) if trains else 0,
        calls=dict(topo.meter.calls),
        phase_seconds=dict(topo.meter.last_seconds),
        sync_report=topo.gradients.mode.report(),
        phase_spans=topo.meter.last_spans,
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
