# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The settings of SCAPE, which sends a share of the momentum that was chosen one step before."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from zero_topo.config.sparse_config import SparseSync
from zero_topo.plan import Plan


class ScapeSync(SparseSync):
    """The elements of largest momentum at the last step, by a mask that all ranks share; AdamS lives on them alone."""

    MODE: ClassVar[str] = "scape"
    OPTIMIZER: ClassVar[str | None] = "AdamS"

    mode: Literal["scape"] = Field(
        "scape", description="The momentum's largest elements, chosen a step before (SCAPE, with the AdamS optimizer)."
    )
    density: float = Field(0.1, gt=0, le=1, description="Share of each rank's optimizer shard that the mask holds.")
    start_density: float = Field(1.0, gt=0, le=1, description="Density of the first step, if there is a warm-up.")
    warmup: int = Field(
        0,
        ge=0,
        description="Steps over which the density goes geometrically from start_density to density; the paper takes "
        "a tenth of the training.",
    )

    def problem(self, plan: Plan) -> str | None:
        """Refuses gradient and optimizer shards that differ: the momentum could not be rebuilt."""
        if plan.optimizer == plan.gradients:
            return None
        return (
            f'sync.mode = "scape": every rank rebuilds the momentum of its gradient shard (degree {plan.gradients}), '
            f"but its optimizer shard (degree {plan.optimizer}) is another; set both to the same domain, such as "
            '"gradients": "node", "optimizer": "node": then no weights cross nodes either'
        )

    def density_at(self, step: int) -> float:
        """Density of the mask of a step, counted from 0: ``d_start * (d / d_start) ** (t / warmup)``, then ``d``."""
        if step >= self.warmup:
            return self.density
        return float(self.start_density * (self.density / self.start_density) ** (step / self.warmup))
