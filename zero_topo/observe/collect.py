# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Measurements of a running job for its report: the memory's peak, and the bytes of all ranks."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from zero_topo.observe.report import RankBytes, Stats, build_report
from zero_topo.units import KIB


def peak_memory(device: torch.device) -> tuple[int, bool]:
    """Return the peak bytes of tensors on a device, on a CPU those of the process, and whether of a
    device.
    """
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB, False
    return int(torch.get_device_module(device).max_memory_allocated()), True


def gather_bytes(found: Stats | None) -> list[RankBytes]:
    """Return the bytes of each rank that has statistics. Collective."""
    ranks: list[RankBytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found and found.of_rank())
    return [rank for rank in ranks if rank is not None]


def write_report(
    folder: str | Path,
    found: Stats | None,
    ranks: Sequence[RankBytes],
    model: torch.nn.Module,
    title: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    deepspeed: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a run's report; see :func:`~zero_topo.observe.report.build_report`.

    Args:
        folder: where the files go.
        found: this rank's statistics; None for a run without zero_topo.
        ranks: the bytes of all known ranks.
        model: names the run if there is no title.
        title: one line about model and data.
        settings: the program's settings, to show.
        deepspeed: DeepSpeed's config.
    """
    numel = sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
    build_report(
        Path(folder),
        found,
        ranks,
        title=title or f"{type(model).__name__}, {numel:,} parameters",
        world_size=dist.get_world_size(),
        settings=settings,
        deepspeed=deepspeed,
    )
