# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The settings that all sparse modes of ``sync`` have in common, and the sizes of what they send
and store.

Expected, not exact
    The bytes that a sparse mode sends depend on the data: how many elements several ranks select
    alike, and how far a reused threshold has drifted. The formulas assume that each rank selects
    ``k`` elements, evenly spread, that ranks select the same element only by chance, and that there
    are as many sums as possible. Counts and flags (8 bytes per peer) and the few values sent in
    addition to a sketch are left out. One-dimensional parameters, which are reduced dense, count as
    sparse. The meter reports the bytes actually sent.

Note [At the peak]
    A run of ``n`` elements is read as gradient plus residual in FP32, ``4 n`` bytes. An exchange
    stores in addition magnitudes to select from, or sums, and selected elements. :data:`PEAK` bytes
    per element bound it, with ``4 n`` more where all ranks get all sums; to select the largest
    elements of each parameter takes :data:`PART_BYTES`. The bound is at most three times what is
    measured, for the densities of the papers. Until the step is decided every run keeps what it
    sent, a row of residuals, and the gradients that its sums overwrote. The internal scratch of
    torch's selection and sort is not counted.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, StrictBool

from zero_topo.config.sync_config import (
    FP32,
    Dtype,
    Move,
    SyncSettings,
    gather_moves,
    reduce_moves,
    sync_pairs,
    sync_peers,
)
from zero_topo.plan import Plan

SELECTION_BYTES = 12  # bytes of an unpacked index and value
PEAK = 12  # bytes per element of a run in an exchange
PART_BYTES = 41  # bytes per element while the largest elements of each parameter are selected
# Elements of a run: 16 runs of a large model, a few layers in each, so few launches
LEAST_RUN = 60_000_000
Density = Annotated[float, Field(gt=0, le=1)]
Select = Literal["parameter", "run", "all"]
SELECT = (
    'Of what the largest elements are selected: "parameter" of each parameter, "run" of each run '
    "of at most "
    'reduce_bucket_size elements, "all" of all parameters. A run is sent as soon as its gradients '
    "are final, and "
    'reuses the scratch memory of the run before it; "all" waits for the last gradient.'
)


def index_bytes(numel: int) -> int:
    """Return the bytes of an index into ``numel`` elements as it is sent: 4 if 32 bits suffice,
    else 8.
    """
    return 4 if numel <= 2**32 else 8


def share(density: float, numel: int) -> int:
    """Return ``k``, the number of elements of a density, at least one."""
    return min(numel, max(1, math.ceil(density * numel)))


def replicated(plan: Plan) -> bool:
    """Return whether several ranks store the same optimizer shard, so that sums are sent back to
    all of them.
    """
    return plan.optimizer < plan.world_size


class SparseSync(SyncSettings):
    """What all sparse modes have in common.

    Attributes:
        EXCLUDED: shell patterns of the names of parameters that are reduced densely, as vectors
            (norms, biases) always are.
    """

    EXCLUDED: ClassVar[tuple[str, ...]] = ()

    density: Density = Field(0.01, description="Share of the elements that a rank selects.")
    select: Select = Field("all", description=SELECT)
    error_feedback: StrictBool = Field(
        True,
        description="Keep what was not sent, in FP32 where it was not sent, and add it at the next "
        "step. Costs 4 bytes for each element of the gradient shard.",
    )
    value_dtype: Dtype = Field(
        "fp32",
        description="Type of the values on the wire; each comes with an index of 4 bytes, or 8 "
        "above 2^32 elements.",
    )
    start: NonNegativeInt = Field(
        0, description="Optimizer steps at the beginning that reduce everything."
    )
    start_density: Density = Field(
        0.25,
        description="Density of the step after start, if there is a warm-up; DGC begins with 0.25.",
    )
    warmup: NonNegativeInt = Field(
        0,
        description="Steps after start over which the density goes geometrically from "
        "start_density to density, as in DGC (arXiv 1712.01887, section 3.4).",
    )

    @property
    def keeps_residual(self) -> bool:
        """Return whether there is error feedback."""
        return self.error_feedback

    @property
    def whole(self) -> bool:
        """Return whether elements are selected of all parameters."""
        return self.select == "all"

    def run_numel(self, bucket: int | None, numel: int) -> int | None:
        """Return the most parameter elements of a run: a bucket, but at most a sixteenth of a large
        model.
        """
        return None if bucket is None or self.whole else min(bucket, max(LEAST_RUN, numel // 16))

    def density_at(self, step: int) -> float:
        """Return a step's density; steps count from 0.

        It is 1 up to ``start``, then ``d_0 (d / d_0) ** (t / warmup)`` in the warm-up, then ``d``.
        """
        since = step - self.start
        if since < 0:
            return 1.0
        if since >= self.warmup:
            return self.density
        return float(
            self.start_density * (self.density / self.start_density) ** (since / self.warmup)
        )

    def volume(self, plan: Plan, widths: Sequence[int], itemsize: int) -> list[Move]:
        """Return an FP32 reduction inside the node if needed, the mode's buffers, and an FP32
        gather in the node.
        """
        peers = sync_peers(plan)
        inner, outer = sync_pairs(plan)
        if peers == 1:
            return []
        across = [Move(*outer, round(self.peer_bytes(widths, plan)))]
        rows = peers * sum(widths) * FP32
        if inner is None:
            return across
        back = (
            gather_moves(plan, (plan.optimizer, inner[1]), rows)
            if plan.optimizer < inner[1]
            else []
        )
        return reduce_moves(plan, inner, rows) + across + back

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> tuple[int, int]:
        """Return the bytes of an FP32 residual of all elements that the peers reduce, and no
        masks.
        """
        peers = sync_peers(plan)
        residual = peers * columns * FP32
        return residual if self.error_feedback and peers > 1 else 0, 0

    def scratch(
        self, plan: Plan, columns: int, run: Sequence[int], itemsize: int
    ) -> tuple[int, int]:
        """Return upper bounds of the scratch bytes; see Note [At the peak]."""
        inner = sync_pairs(plan)[0]
        peers = sync_peers(plan)
        if peers == 1:
            return 0, 0
        width = sum(run)
        rows = peers if replicated(plan) else 1
        kept = rows * itemsize + FP32 + SELECTION_BYTES * self.kept_share(peers) * peers
        made = max(self.selecting(peers), PEAK + FP32 * replicated(plan))
        if inner is not None:
            made += 2 * FP32 * (inner[1] // inner[0])
        return round(kept * (columns - width) + made * peers * width), round(kept * columns)

    def selecting(self, peers: int) -> float:
        """Return the bytes per element while the largest of each parameter are selected."""
        return PART_BYTES if self.select == "parameter" else 0.0

    def kept_share(self, peers: int) -> float:
        """Return the largest share of the elements that a rank keeps until a step is decided."""
        return max(self.density, self.start_density if self.warmup else 0.0)

    @abstractmethod
    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes that a rank sends to its peers, at least one, in a step.

        Args:
            widths: columns of each parameter.
            plan: gives the number of peers, and whether they need more than one row.
        """
