# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero_topo.stats``: an engine's traffic, memory and waiting times; and the reports that show
them.

With the block's key ``report``, rank 0 writes a line for each optimizer step, and a report of its
own measurements when the engine is destroyed or the process ends, without a collective.
``zero_topo.report`` gathers the measurements of all ranks.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comms_logger
from deepspeed.utils import log_dist
from torch import Tensor

from zero_topo.config import ResolvedConfig
from zero_topo.cost import Workload, memory_bytes
from zero_topo.cost.memory import (
    ADAM_BYTES,
    ADAM_BYTES_FP32,
    AGE_BYTES,
    VARIANCE_BYTES,
    predict_memory,
)
from zero_topo.hook.inference import TopoInference
from zero_topo.hook.initialize import job_of
from zero_topo.hook.optimizer import TopoStage3
from zero_topo.hook.seam import deepspeed_json, wrapping
from zero_topo.observe.collect import gather_bytes, peak_memory, write_report
from zero_topo.observe.log import LOGGER
from zero_topo.observe.monitor import breakdown, step_events
from zero_topo.observe.report import Stats
from zero_topo.observe.runlog import METRICS, log_step
from zero_topo.sync import AdamS, AgedAdamW


def stats(engine: Any) -> Stats:
    """Return this rank's traffic, memory and times for a DeepSpeed engine with a ``zero_topo``
    block. Not collective.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.

    Raises:
        ValueError: if the engine runs without zero_topo.
    """
    optimizer: Any = getattr(engine, "optimizer", None)  # a DistributedDataParallel has none
    trains = isinstance(optimizer, TopoStage3)
    if not trains and not isinstance(optimizer, TopoInference):
        raise ValueError(
            'this engine runs without zero_topo; put a "zero_topo" block into its DeepSpeed JSON '
            "and import zero_topo"
        )
    topo = optimizer.topo
    micro_batches = engine.gradient_accumulation_steps()
    peak, on_device = peak_memory(topo.like.device)
    work = topo.workload(micro_batches)
    engines = optimizer.engines()
    experts = [(other.config, other.workload(micro_batches)) for other in engines[1:]]
    if trains and not optimizer.predicted_memory:
        optimizer.predicted_memory = _predicted(engine, optimizer, [(topo.config, work), *experts])
    memory = Counter({"optimizer": _optimizer_bytes(optimizer) if trains else 0})
    for each in engines:
        memory.update(each.memory())
    return Stats(
        config=topo.config,
        steps=topo.meter.steps,
        micro_batches=micro_batches,
        step_bytes=dict(topo.meter.last_step),
        total_bytes=dict(topo.meter.total),
        memory=dict(memory),
        work=work,
        accumulation_itemsize=topo.accumulation_dtype.itemsize,
        optimizer_itemsize=_optimizer_itemsize(optimizer) if trains else 0,
        calls=dict(topo.meter.calls),
        phase_seconds=dict(topo.meter.last_seconds),
        sync_report=topo.gradients.mode.report(),
        peak_memory=peak,
        on_device=on_device,
        predicted_memory=optimizer.predicted_memory if trains else {},
        experts=experts[0] if experts else None,
    )


def _predicted(
    engine: Any,
    optimizer: TopoStage3,
    parts: Sequence[tuple[ResolvedConfig, Workload]],
) -> dict[str, int]:
    """Return the predicted memory of a rank at the peak of a step, with the shards of experts
    added.
    """
    (config, work), *experts = parts
    job = job_of(engine)
    if experts:  # the module's parameters are those of both plans
        frozen = work.frozen.numels if work.frozen else ()
        job = replace(job, numels=work.numels, frozen=frozen, whole=())
    predicted = Counter(predict_memory(config, job.work, job))
    for plan, of_experts in experts:
        itemsizes = optimizer.topo.accumulation_dtype.itemsize, _optimizer_itemsize(optimizer)
        predicted.update(memory_bytes(plan, of_experts, *itemsizes))
    return dict(predicted)


def _optimizer_itemsize(optimizer: TopoStage3) -> int:
    """Return the expected bytes per element of Adam's states and FP32 masters (unless these are the
    weights).
    """
    adam = ADAM_BYTES_FP32 if optimizer.masters_are_weights() else ADAM_BYTES
    ours = ((AdamS, -VARIANCE_BYTES), (AgedAdamW, AGE_BYTES))
    return adam + sum(more for kind, more in ours if isinstance(optimizer.optimizer, kind))


def _optimizer_bytes(optimizer: TopoStage3) -> int:
    """Return the bytes of FP32 masters (unless they are the weights) and optimizer states on this
    rank.
    """
    masters = [] if optimizer.masters_are_weights() else optimizer.fp32_partitioned_groups_flat
    return sum(tensor.nbytes for tensor in (*masters, *optimizer.optimizer_tensors()))


# -- reports ---------------------------------------------------------------------------------------


def report(
    engine: Any,
    folder: str | Path,
    title: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the report of a run with the measurements of all ranks: tables, plots and one HTML
    page. Collective.

    The report shows the losses and speeds of the steps in the folder's ``metrics.jsonl``, which the
    block's key ``report`` writes. For an engine without a ``zero_topo`` block it has no bytes and
    no memory.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        folder: where rank 0 writes ``report.json``, ``report.html`` and its pictures.
        title: one line about model and data; by default the model's class and size.
        settings: the program's settings, to show in the report.
    """
    found = stats(engine) if isinstance(engine.optimizer, TopoStage3 | TopoInference) else None
    ranks = gather_bytes(found)
    recorder = getattr(engine.optimizer, "recorder", None)
    if recorder is not None and recorder.folder == Path(folder):
        recorder.finish()
    if dist.get_rank() == 0:
        write_report(folder, found, ranks, engine.module, title, settings, deepspeed_json(engine))


class Recorder:
    """Writes a run's folder on rank 0 without host synchronizations: it reads a loss once its copy
    has completed.

    Args:
        engine: DeepSpeed's engine, whose ``backward`` is wrapped; its optimizer calls
            :meth:`close`.
        folder: the run's folder; a resumed run appends to the log there, a new run replaces it.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        self.folder = folder
        self._engine = engine
        self._began = time.perf_counter()
        self._loss: Tensor | None = None
        self._waiting: deque[tuple[Any, Tensor | None, dict[str, Any]]] = deque()
        engine.backward = wrapping(self._backward)(engine.backward)
        atexit.register(self.close)

    def _backward(self, backward: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            part = loss.detach().float().reshape(())
            if kwargs.get("scale_wrt_gas") is not False:
                part = part * (1 / self._engine.gradient_accumulation_steps())
            self._loss = part if self._loss is None else self._loss + part
        return backward(loss, *args, **kwargs)

    def step(self, sent: Mapping[tuple[str, str], int]) -> None:
        """Log an optimizer step, with the bytes that this rank sent."""
        now = time.perf_counter()
        engine = self._engine
        loss = self._loss
        event = None
        seconds = now - self._began
        self._began = now
        self._loss = None
        # The loss is read later, when its event has passed: the host must not wait here.
        if loss is not None and not get_accelerator().is_synchronized_device():
            loss = loss.to("cpu", non_blocking=True)
            event = get_accelerator().Event()
            event.record()
        # A new run begins: lines of an older one in the same folder are not its own.
        if engine.global_steps == 1:
            (self.folder / METRICS).unlink(missing_ok=True)
        lr = float(engine.get_lr()[0])
        line = {
            "step": engine.global_steps,
            "lr": lr,
            "seconds": seconds,
            "sent": sent,
        }
        self._waiting.append((event, loss, line))
        while self._waiting and (self._waiting[0][0] is None or self._waiting[0][0].query()):
            self._write_line()

    def _write_line(self) -> None:
        _, loss, line = self._waiting.popleft()
        log_step(self.folder, **line, loss=None if loss is None else loss.item())

    def finish(self) -> None:
        """Write the lines whose loss is still pending, and cancel the report at the end of the
        process.
        """
        atexit.unregister(self.close)
        for event, _, _ in list(self._waiting):
            if event is not None:
                event.synchronize()
            self._write_line()

    def close(self) -> None:
        """Write the report of this rank."""
        self.finish()
        found = stats(self._engine)
        try:
            write_report(
                self.folder,
                found,
                [found.of_rank()],
                self._engine.module,
                deepspeed=deepspeed_json(self._engine),
            )
        except OSError as error:
            LOGGER.warning("zero_topo: the report in %s is not written: %s", self.folder, error)
        else:
            LOGGER.info("zero_topo: report in %s", self.folder)


def report_steps(engine: Any, optimizer: TopoStage3 | TopoInference) -> None:
    """Report each step to DeepSpeed's monitors, the log and the run's folder.

    Args:
        engine: DeepSpeed's engine.
        optimizer: its optimizer.
    """
    if comms_logger.enabled:
        log_dist(
            "zero_topo: comms_logger times DeepSpeed's own collectives alone; a profile of torch "
            "shows zero_topo's in ranges zero_topo.<phase>",
            ranks=[0],
        )
    folder = optimizer.topo.config.report
    # An engine without an optimizer has no steps
    if engine.global_rank != 0 or isinstance(optimizer, TopoInference):
        return
    if not (engine.monitor.enabled or engine.wall_clock_breakdown() or folder):
        return
    optimizer.recorder = Recorder(engine, Path(folder)) if folder else None

    def step_reported(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > before:
            _report_step(engine, optimizer)
        return result

    engine.step = wrapping(step_reported)(engine.step)


def _report_step(engine: Any, optimizer: TopoStage3) -> None:
    topo = optimizer.topo
    seconds = topo.meter.last_seconds
    if optimizer.recorder is not None:
        optimizer.recorder.step(topo.meter.last_step)
    if engine.monitor.enabled:
        of_mode = topo.gradients.mode.report()
        peak, _ = peak_memory(topo.like.device)
        events = step_events(topo.meter.last_step, seconds, of_mode, peak, engine.global_samples)
        engine.monitor.write_events(events)
    every = engine.steps_per_print()
    if engine.wall_clock_breakdown() and every and engine.global_steps % every == 0:
        LOGGER.info(breakdown(seconds))
