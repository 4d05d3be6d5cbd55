# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Types of what commands print with ``--json``."""

from __future__ import annotations

from typing import NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from zero_topo.config.modes import SyncConfig
from zero_topo.config.parts import PublishConfig


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
    notes: list[str]
