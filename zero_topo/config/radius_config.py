# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The settings of Radius, whose mask all ranks share, so that values travel without indices."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from zero_topo.config.sparse_config import SparseSync


class RadiusSync(SparseSync):
    """The elements that the optimizer moved most at the last resampling; the others wait for the next one."""

    MODE: ClassVar[str] = "radius"

    mode: Literal["radius"] = Field("radius", description="One mask for all ranks, chosen anew at intervals (Radius).")
    density: float = Field(0.4, gt=0, le=1, description="Share of each parameter that the mask holds.")
    interval: int = Field(
        200, ge=1, description="Steps from one resampling to the next: then everything is reduced, and the mask chosen."
    )
    start: int = Field(
        0,
        ge=0,
        description="Optimizer steps at the beginning that reduce everything. The paper starts to sparsify after 15 to "
        "20% of the training; after 5% it found the loss hurt. At 0 the first mask means little: Adam's first update "
        "is the sign of the gradient, equally large everywhere.",
    )
