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
    A run of ``n`` elements is read as gradient plus residual in FP32, ``4 n`` bytes, when it is
    exchanged and again when the step is decided; then it is not, if its gradients are adjacent and
    nothing has overwritten them, but the formulas count it. In addition, depending on the mode, an
    exchange stores the magnitudes to select from (``4 n``) or the sums, and the selected elements:
    an index and a value take 12 bytes, and 41 while they are sorted for summation in a fixed order.
    Until the step is decided every run keeps what it sent, and the gradients that its sums
    overwrote. The internal scratch of torch's selection and sort is not counted.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, StrictBool

from zero_topo.config.sync_config import (
    FP32,
    ITEMSIZES,
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
SORTING_BYTES = 41  # bytes per selected element while it is sorted and summed, itself included
PART_BYTES = 39  # bytes per element while the largest elements of each parameter are selected
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

    @property
    def busiest(self) -> Self:
        """Return the settings of the step that sends most, the steps before ``start`` excepted."""
        return self.model_copy(update={"density": max(self.density, self.density_at(self.start))})

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
        """Return the bytes of the largest moment; see Note [At the peak].

        The FP32 reduction inside the node, or a dense reduction before ``start``, counts if it
        needs more.
        """
        inner = sync_pairs(plan)[0]
        peers = sync_peers(plan)
        width = sum(run)
        if peers == 1:
            return 0, 0
        mode = self.busiest
        table = FP32 * peers * width
        rows = (peers if replicated(plan) else 0 if mode.settles_own_row else 1) * itemsize
        rounds = ITEMSIZES[self.value_dtype] % FP32 if self.start else 0
        errors = FP32 if rounds and replicated(plan) else 0  # of the sums of a first step
        kept, peak, settling = mode.run_bytes(width, plan, rows * width)
        later, _, _ = mode.run_bytes(columns - width, plan, 0)
        own, others = (
            rows * n + max(errors * n, stored)
            for n, stored in ((width, kept), (columns - width, later))
        )
        within = 2 * table * (inner[1] // inner[0]) if inner is not None else 0
        dense = self.dense_bytes(width, plan, rows * width) if self.start else 0
        made = max(table + within, dense, peak)
        settled = own + table + max(rounds * peers * width, settling)
        return round(others + max(made, settled)), round(own + others)

    @abstractmethod
    def run_bytes(self, columns: int, plan: Plan, overwritten: int) -> tuple[float, float, float]:
        """Return the bytes of a run, or of several as if they were one: kept, at the peak of the
        exchange, settling.

        1. What is kept until the step is decided, overwritten gradients excluded.
        2. The peak of the exchange: gradient plus residual, the scratch, and all that is kept.
        3. The scratch of subtracting what was sent, once the step is decided.

        Args:
            columns: ``m``, elements of a row of the run.
            plan: says how many peers there are, and whether they need more than one row.
            overwritten: bytes of the gradients that the sums overwrite.
        """

    @property
    def settles_own_row(self) -> bool:
        """Return whether runs keep the new residual of the own row, in place of its overwritten
        gradients.
        """
        return False

    @abstractmethod
    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes that a rank sends to its peers, at least one, in a step.

        Args:
            widths: columns of each parameter.
            plan: gives the number of peers, and whether they need more than one row.
        """

    def dense_bytes(self, columns: int, plan: Plan, overwritten: int, kept: float = 1.0) -> float:
        """Return the peak bytes of an exchange of all elements of a run, or of the share ``kept``.

        They are the values, as sent and as received, FP32 rows to add up, and the sums of one row
        or of all.
        """
        peers = sync_peers(plan)
        itemsize = ITEMSIZES[self.value_dtype]
        row = FP32 * columns * kept
        n = peers * columns * kept
        back = 0.0
        sums = float(FP32 * columns)
        if replicated(plan):
            rounding = (FP32 * n + row + itemsize * columns * kept) if itemsize < FP32 else 0
            back = 2 * itemsize * n + row + rounding
            sums = peers * sums + (row if itemsize < FP32 else 0)
        return max(2 * FP32 * n, back, itemsize * n + sums + overwritten)
