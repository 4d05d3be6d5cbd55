# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Types of ``report.json``: bytes are integers, times are seconds. A key may be left out only if
its type says so.
"""

from __future__ import annotations

from typing import Any, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from zero_topo.config.modes import SyncConfig
from zero_topo.config.parts import PublishConfig
from zero_topo.strict import Seconds
from zero_topo.topology import Topology


class Document(TypedDict):
    """A JSON object without other keys than its type's."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]


class Degrees(Document):
    """Role -> ranks that share it."""

    weights: int
    secondary: int | None
    gradients: int
    optimizer: int


class _Bits(Document):
    weights: str | None
    secondary: str | None
    gradients: str | None
    resident: str | None


class _Frozen(Document):
    secondary: int | None
    on: str


class Resolved(Document):
    """A block on a machine, as ``ResolvedConfig.to_json`` writes it."""

    scheme: str | None
    world_size: int
    degrees: Degrees
    inner: int | None
    quantize: _Bits
    sync: SyncConfig
    publish: PublishConfig
    accumulation_dtype: str | None
    overlap: bool
    meter: bool
    report: NotRequired[str | None]  # older runs have none
    seed: int | None
    debug_checks: bool
    registered_buffers: NotRequired[bool]  # older runs have none of these
    secondary_on: NotRequired[str]
    frozen: NotRequired[_Frozen | None]
    notes: list[str]


class _Row(Document):
    min: int
    max: int
    formula: int | None
    zero3: int | None


class _SentRow(_Row):
    domain: str
    phase: str


class _HeldRow(_Row):
    role: str
    padding: int | None


class _Peak(Document):
    min: int
    max: int
    on_device: bool
    predicted: int


class _Measured(Document):
    ranks: NotRequired[int]
    config: Resolved
    topology: Topology
    parameters: int
    micro_batches: int
    sent: list[_SentRow]
    phase_seconds: dict[str, Seconds]
    sync: dict[str, float]
    memory: list[_HeldRow]
    peak: NotRequired[_Peak]


class Report(Document):
    """``report.json``."""

    format: int
    title: str
    world_size: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    seconds: Seconds
    seconds_per_step: Seconds | None
    pace: NotRequired[dict[str, float]]
    zero_topo: _Measured | None
    settings: dict[str, Any]
    deepspeed: dict[str, Any]
    versions: NotRequired[dict[str, str | None]]  # older runs have none
