# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What ``--json`` prints, command by command, as types: bytes are integers, times are seconds, keys are never left out
unless they say so, and no other keys are there. Programs that read them get the JSON schema from ``schema --of``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from zero_topo.config import PublishConfig, ZeroTopoConfig
from zero_topo.config.modes import SyncConfig
from zero_topo.cost.step import Range
from zero_topo.cost.transformer import Transformer
from zero_topo.doctor.finding import Finding
from zero_topo.strict import Seconds
from zero_topo.topology import Topology
from zero_topo.topology.rates import Rates, Ring

Roles = dict[str, int]
"""Role -> bytes of a rank."""
ByDomain = dict[str, int]
"""Domain -> bytes that a rank sends in an optimizer step."""


class _Document(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]


class _Degrees(_Document):
    weights: int
    secondary: int | None
    gradients: int
    optimizer: int


class _Bits(_Document):
    weights: str | None
    secondary: str | None
    gradients: str | None
    resident: str | None


class _Resolved(_Document):
    """A block on a machine."""

    scheme: str | None
    world_size: int
    degrees: _Degrees
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
    notes: list[str]


class _Checked(_Resolved):
    topology: Topology
    cost: dict[str, Any]
    translated: list[str]


class _Ranked(_Document):
    name: str
    degrees: _Degrees
    quantize: _Bits
    seconds: float | None
    losses: list[str]
    wire_seconds: float
    sent_by_domain: ByDomain
    memory: Roles
    block: ZeroTopoConfig


class _Forecast(_Document):
    params: int
    chosen: _Ranked | None


class _Automatic(_Document):
    """The output of ``check`` for a block whose plan depends on the model, if the command names none."""

    scheme: Literal["auto"]
    lossy: bool
    topology: Topology
    forecasts: list[_Forecast]
    translated: list[str]
    notes: list[str]


class _Sent(_Document):
    phase: str
    domain: str
    bytes: int


class _Costed(_Resolved):
    memory: Roles
    sent: list[_Sent]
    sent_by_domain: ByDomain


class _Schemes(_Document):
    """The output of ``plan``."""

    topology: Topology
    params: int
    trainable: int
    micro_batches: int
    schemes: list[_Costed]


class _Recommended(_Ranked):
    range: Range


class _Refused(_Document):
    name: str
    memory: Roles
    needs: int


class _Recommendation(_Document):
    """The output of ``plan --recommend``."""

    topology: Topology
    model: Transformer
    params: int
    micro_batch: int
    micro_batches: int
    setting: str
    overlap: float
    memory_limit: int | None
    reserve: float
    recommended: _Recommended
    why: list[str]
    assumed: list[str]
    plans: list[_Ranked]
    lossier: list[_Ranked]
    fitting: int
    refused: list[_Refused]


class _Largest(_Document):
    max_params: int | None


class _MaxParams(_Document):
    """The output of ``plan --max-params``."""

    topology: Topology
    memory_limit: int
    reserve: float
    sequence: int
    micro_batch: int
    checkpointing: bool
    schemes: dict[str, _Largest]


class _Point(_Document):
    scheme: str
    ranks: int
    micro_batches: int
    step_s: float
    tflops_per_gpu: float
    breakdown: dict[str, float]
    range: Range
    sent_by_domain: ByDomain
    held: int
    fits: bool


class _Simulated(_Document):
    """The output of ``simulate``."""

    machine: str
    model: str
    params: int
    setting: str
    overlap: float
    notes: list[str]
    rates: Rates
    assumed: list[str]
    results: list[_Point]
    scaling_efficiency: list[dict[str, Any]]
    break_even: list[dict[str, Any]]


class _Rings(_Document):
    rings: dict[str, dict[str, Ring]]


class _Collectives(_Document):
    """The output of ``simulate --calibrate`` for files of rccl-tests."""

    rates: _Rings
    measurements: int


class _Costs(_Document):
    topology: Topology
    params: int
    micro_batches: int
    memory: dict[str, Roles]
    sent_by_domain: dict[str, ByDomain]
    step_s: dict[str, float]


class _Migrated(_Document):
    config: dict[str, Any]
    translated: list[str]
    differences: list[str]
    costs: _Costs | None


class _Findings(_Document):
    machine: str | None
    findings: list[Finding]
    failed: int


class _Row(_Document):
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


class _Peak(_Document):
    min: int
    max: int
    on_device: bool
    predicted: int


class _Measured(_Document):
    ranks: NotRequired[int]
    config: _Resolved
    topology: Topology
    parameters: int
    micro_batches: int
    sent: list[_SentRow]
    phase_seconds: dict[str, Seconds]
    sync: dict[str, float]
    memory: list[_HeldRow]
    peak: NotRequired[_Peak]


class _Report(_Document):
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


DOCUMENTS: Mapping[str, Any] = MappingProxyType(
    {
        "topology": Topology,
        "plan": _Schemes | _Recommendation | _MaxParams,
        "simulate": _Simulated | _Collectives,
        "check": _Checked | _Automatic,
        "migrate": _Migrated,
        "report": _Report,
        "doctor": _Findings,
    }
)
"""Command -> the type of what it prints with ``--json``."""


def document(command: str) -> TypeAdapter[Any]:
    """Return the model of a command's ``--json`` output: it validates the output and has its schema.

    Raises:
        ValueError: if the command prints none.
    """
    if command not in DOCUMENTS:
        raise ValueError(f"--of {command}: it prints no JSON; choose one of {', '.join(DOCUMENTS)}")
    return TypeAdapter(DOCUMENTS[command])
