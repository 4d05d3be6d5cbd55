# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the package offers a training script: ``initialize``, ``Init``, ``stats``."""

from __future__ import annotations

from typing import Any

import deepspeed

from zero_topo.cost.memory import ADAM_BYTES, ADAM_BYTES_FP32, AGE_BYTES, VARIANCE_BYTES
from zero_topo.engine.stage3 import Stats
from zero_topo.hook.inference import TopoInference
from zero_topo.hook.install import install
from zero_topo.hook.optimizer import TopoStage3
from zero_topo.sync import AdamS, AgedAdamW


def enable() -> None:
    """Install the hook into DeepSpeed; ``import zero_topo`` does it too, as soon as DeepSpeed is imported.

    Raises:
        ImportError: if the installed DeepSpeed is not one the hook fits, naming what differs.
    """
    install()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with the hook in place; same arguments, same results.

    Raises:
        ValueError: for an invalid ``zero_topo`` block or machine, before any process group exists.
    """
    enable()
    return deepspeed.initialize(*args, **kwargs)


def init_context(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.zero.Init`` with the hook in place: parameters are partitioned as they are built."""
    enable()
    return deepspeed.zero.Init(*args, **kwargs)


def stats(engine: Any) -> Stats:
    """What a DeepSpeed engine with a ``zero_topo`` block did and holds, on this rank. Not collective.

    Args:
        engine: what ``deepspeed.initialize`` returned.

    Raises:
        ValueError: if the engine runs without zero_topo.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, TopoStage3 | TopoInference):
        raise ValueError(
            'this engine runs without zero_topo; put a "zero_topo" block into its DeepSpeed JSON and import zero_topo'
        )
    topo, trains = optimizer.topo, isinstance(optimizer, TopoStage3)
    micro_batches = engine.gradient_accumulation_steps()
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
    )


def _optimizer_itemsize(optimizer: TopoStage3) -> int:
    """Bytes per element that Adam's states and FP32 masters (unless these are the weights) are expected to take."""
    adam = ADAM_BYTES_FP32 if optimizer.masters_are_weights() else ADAM_BYTES
    ours = ((AdamS, -VARIANCE_BYTES), (AgedAdamW, AGE_BYTES))
    return adam + sum(more for kind, more in ours if isinstance(optimizer.optimizer, kind))


def _optimizer_bytes(optimizer: TopoStage3) -> int:
    """Bytes of FP32 masters (unless they are the weights themselves) and optimizer states on this rank."""
    masters = [] if optimizer.masters_are_weights() else optimizer.fp32_partitioned_groups_flat
    return sum(tensor.nbytes for tensor in (*masters, *optimizer.optimizer_tensors()))
