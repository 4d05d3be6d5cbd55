# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the sparse modes of ``sync``, which send a share of the elements between gradient
domains.

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

Note [Positions]
    Every block of 4096 elements has the same number of selected elements, so all buffers have one
    length and no sizes are exchanged. Ascending positions are sent as Elias-Fano codes (Vigna,
    "Quasi-succinct indices", WSDM 2013): the lower bits of each position unchanged, the upper bits
    as a bit vector. For each value of the upper bits, the vector has a 1 per selected element and
    then a 0. This is within half a bit per selected element of the optimum, and every block can be
    decoded independently.
"""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
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
from zero_topo.strict import Strings

SELECTION_BYTES = 12  # bytes of an unpacked index and value
SORTING_BYTES = 41  # bytes per selected element while it is sorted and summed, itself included
PART_BYTES = 39  # bytes per element while the largest elements of each parameter are selected
TERNARY_BLOCK = 4096
LEAST_RUN = (
    60_000_000  # elements of a run: 16 runs of a large model, a few layers in each, so few launches
)
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
    """What all sparse modes have in common."""

    density: Density = Field(0.01, description="Share of the elements that a rank selects.")
    select: Select = Field("all", description=SELECT)
    error_feedback: StrictBool = Field(
        True,
        description="Keep what was not sent, in FP32 where it was not sent, and add it at the next "
        "step. Costs 4 bytes for each element of the gradient shard.",
    )
    offload_residual: StrictBool = Field(
        False,
        description="Keep the residual in the host's memory and bring it to the device once a "
        "step.",
    )
    value_dtype: Dtype = Field(
        "fp32",
        description="Type of the values on the wire; each comes with an index of 4 bytes, or 8 "
        "above 2^32 elements.",
    )
    include: Strings = Field(
        ("*",),
        description="Parameters to sparsify: shell patterns of their names, any of which must fit.",
    )
    exclude: Strings = Field(
        (), description="Parameters to reduce densely after all: shell patterns."
    )
    dense_vectors: StrictBool = Field(
        True, description="Reduce parameters of fewer than two dimensions (norms, biases) densely."
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
        across = [Move(*outer, round(self.peer_bytes(widths, plan)), gathers=False)]
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
        return (
            peers * columns * FP32
            if self.error_feedback and not self.offload_residual and peers > 1
            else 0,
            0,
        )

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


class MaskedSync(SparseSync):
    """What modes have in common that send the elements of a mask, without indices."""

    def run_bytes(self, columns: int, plan: Plan, overwritten: int) -> tuple[float, float, float]:
        """Keep the rounding errors of the own sums, if they are sent back; exchange all elements or
        those of a mask.

        At the end the rounding errors of all elements, or of those under the mask, are computed.
        """
        peers = sync_peers(plan)
        rounded = ITEMSIZES[self.value_dtype] % FP32
        n = peers * columns
        rows = 1 if replicated(plan) else 1 / peers
        masked = self.density * n
        sent = FP32 * n + 2 * FP32 * masked + max(n, (FP32 + rounded) * masked)
        received = 8 * masked * rows + self.dense_bytes(columns, plan, overwritten, self.density)
        errors = FP32 * columns if rounded and replicated(plan) else 0
        settling = max(rounded * n, n + 8 * masked, (12 + rounded) * masked)
        return errors, max(self.dense_bytes(columns, plan, overwritten), sent, received), settling


class PickingSync(SparseSync):
    """What modes have in common that send selected elements, an index and a value each; here, all
    to every peer.

    Attributes:
        SELECTING: scratch bytes per element while the selected ones are found.
        ROOM: elements in a packet, as a multiple of those that a rank is to select.
    """

    SELECTING: ClassVar[int] = FP32
    ROOM: ClassVar[float] = 1

    select: Literal["run", "all"] = Field("all", description=SELECT)

    def record_bytes(self, numel: int) -> int:
        """Return the bytes of a selected element as sent: a value, and an index into ``numel``
        elements.
        """
        return index_bytes(numel) + ITEMSIZES[self.value_dtype]

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes of the selected elements, sent to every peer."""
        numel = sync_peers(plan) * sum(widths)
        return (
            share(self.ROOM * self.density, numel)
            * (sync_peers(plan) - 1)
            * self.record_bytes(numel)
        )

    def run_bytes(self, columns: int, plan: Plan, overwritten: int) -> tuple[float, float, float]:
        """Keep the selected elements; select, or receive and add up all selected elements of all
        peers.
        """
        peers = sync_peers(plan)
        n = peers * columns
        k = self.ROOM * self.density * peers * columns
        summed = max(SORTING_BYTES * peers * k, SELECTION_BYTES * peers * k + 4 * n + overwritten)
        kept = SELECTION_BYTES * k
        return kept, kept + max((FP32 + self.SELECTING) * n, summed), FP32 * self.density * n


class TopkASync(PickingSync):
    """Every rank sends its selected elements to all others."""

    mode: Literal["topk_a"] = Field(
        "topk_a", description="All-gather of every rank's largest elements."
    )


class GaussianKSync(PickingSync):
    """As ``topk_a``, with a threshold that is estimated from a normal distribution."""

    SELECTING: ClassVar[int] = 2
    ROOM: ClassVar[float] = 4 / 3

    mode: Literal["gaussian_k"] = Field(
        "gaussian_k", description="topk_a with an estimated threshold (Gaussian-k)."
    )


class TopkDsaSync(PickingSync):
    """Selected elements are reduced by their owners; the sums are gathered, sparse or dense,
    whichever is shorter.
    """

    mode: Literal["topk_dsa"] = Field(
        "topk_dsa", description="Sparse reduce-scatter, then an all-gather (SparCML)."
    )

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes of each owner's part, with indices into its row, then of the sums that
        all peers get.

        A region has at most ``k`` sums; it is sent dense if that is shorter.
        """
        row = sum(widths)
        peers = sync_peers(plan)
        k = self.density * peers * row
        record = self.record_bytes(row)
        dense = row * 4 / record
        return (
            k * (peers - 1) / peers + (min(k, dense) * (peers - 1) if replicated(plan) else 0)
        ) * record

    def run_bytes(self, columns: int, plan: Plan, overwritten: int) -> tuple[float, float, float]:
        """At the peak select, sum, or, if all rows are needed, receive them sparse or dense."""
        peers = sync_peers(plan)
        row = 4 * columns
        n = peers * columns
        k = self.density * peers * columns
        back: float = row + overwritten
        if replicated(plan):
            sparse = k * self.record_bytes(columns) < row
            back = max(
                row + (4 * n + (SELECTION_BYTES + 8) * peers * k if sparse else 4 * n),
                4 * n + overwritten,
            )
        kept, _, settling = super().run_bytes(columns, plan, overwritten)
        return kept, kept + max(8 * n, SORTING_BYTES * k, back), settling


class GTopkSync(PickingSync):
    """The largest elements of the sum, found in a tree."""

    mode: Literal["gtopk"] = Field(
        "gtopk",
        description="Pairwise sums in a tree, the largest elements chosen anew at each level "
        "(gTopk).",
    )

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes that the tree's root sends: fewest on the way up, most on the way
        down.
        """
        numel = sync_peers(plan) * sum(widths)
        return self.density * numel * (sync_peers(plan) - 1).bit_length() * self.record_bytes(numel)

    def run_bytes(self, columns: int, plan: Plan, overwritten: int) -> tuple[float, float, float]:
        """Keep also at each level the elements that are not passed on; at the peak select or
        sum.
        """
        n = sync_peers(plan) * columns
        levels = (sync_peers(plan) - 1).bit_length()
        selections, _, settling = super().run_bytes(columns, plan, overwritten)
        kept = (1 + levels) * selections
        return kept, max(8 * n + selections, 4 * n + kept + selections + overwritten), settling


class OkTopkSync(PickingSync):
    """The largest elements of the sum of the largest, with O(k) words whatever the number of ranks.

    With ``"select": "run"`` it selects the same share of each rank's part of a run, without
    thresholds.
    """

    mode: Literal["oktopk"] = Field("oktopk", description="The sparse all-reduce of Ok-Topk.")
    tau: int = Field(64, ge=1, description="Steps between two balancings of the regions.")
    tau_prime: int = Field(32, ge=1, description="Steps between two exact thresholds.")
    sharded: StrictBool = Field(
        False,
        description="Regions are the optimizer shards and sums stay with their owners, with all of "
        "these' own rows: "
        "about 2k words in place of 4k. Needs an optimizer that is sharded over the world.",
    )

    transport: Literal["torch", "mpi"] = Field(
        "torch",
        description="Library that sends the messages: torch.distributed, or MPI through mpi4py "
        '("mpi").',
    )

    def problem(self, plan: Plan) -> str | None:
        """Refuse MPI without mpi4py, and ``sharded`` where several ranks store the same optimizer
        shard.
        """
        if self.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
            return (
                'sync.transport = "mpi": mpi4py is not installed; pip install mpi4py, or set '
                '"transport": "torch"'
            )
        if not self.sharded or plan.optimizer == plan.world_size:
            return None
        return (
            "sync.sharded = true: sums would stay with one rank, but several store the same "
            "optimizer shard; set "
            '"optimizer": "world", or "sharded": false'
        )

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes of each owner's part, then of an equal share of ``k`` sums for all
        unless the sums stay.

        Indices count within a row if its owner sums it: the sums stay with it, or rows are selected
        one by one.
        """
        row = sum(widths)
        peers = sync_peers(plan)
        part = (peers - 1) * (self.density * row if self.whole else share(self.density, row))
        record = self.record_bytes(row if self.sharded or not self.whole else peers * row)
        return (part if self.sharded else 2 * part) * record

    @property
    def settles_own_row(self) -> bool:
        """Return whether the owner keeps the sums that it does not choose."""
        return self.sharded

    def run_bytes(self, columns: int, plan: Plan, overwritten: int) -> tuple[float, float, float]:
        """Keep also the sums of the own row that are not chosen.

        At the peak sum, or store a row with magnitudes to select from or with all chosen sums.
        """
        n = sync_peers(plan) * columns
        row = 4 * columns
        selections, _, settling = super().run_bytes(columns, plan, overwritten)
        summing = SORTING_BYTES * self.density * n + (4 * n if self.whole else 0)
        return (
            selections + (row if self.sharded else 0),
            selections + row + max(8 * n, summing),
            settling,
        )


class RadiusSync(MaskedSync):
    """The elements that the optimizer moved most at the last resampling; the others wait for the
    next one.

    The paper starts to sparsify (``start``) after 15 to 20% of the training; after 5% it found the
    loss hurt. At 0 the first mask means little: Adam's first update is the sign of the gradient,
    equally large everywhere.
    """

    mode: Literal["radius"] = Field(
        "radius", description="One mask for all ranks, chosen anew at intervals (Radius)."
    )
    density: Density = Field(
        0.4, description="Share of each owner's slice of each parameter that the mask selects."
    )
    select: Literal["parameter"] = Field("parameter", description=SELECT)
    value_dtype: Dtype = Field(
        "bf16", description="Type of the values as sent; residuals keep the rounding error."
    )
    interval: int = Field(
        200,
        ge=1,
        description="Steps from one resampling to the next: then everything is reduced, and the "
        "mask chosen.",
    )

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the mean bytes per step. Once an interval it sends all elements and the mask, else
        masked ones.
        """
        between = self.between_bytes(widths, plan)
        resampling = self.resampling_bytes(sum(widths), plan)
        return ((self.interval - 1) * between + resampling) / self.interval

    def between_bytes(self, widths: Iterable[int], plan: Plan) -> int:
        """Return the bytes that a rank sends to its peers in a step that does not resample."""
        return self._to_peers(sum(max(1, int(self.density * width)) for width in widths), plan)

    def resampling_bytes(self, columns: int, plan: Plan) -> int:
        """Return the bytes that a rank sends to its peers in a step that resamples."""
        return self._to_peers(columns, plan) + (sync_peers(plan) - 1) * -(-columns // 8)

    def _to_peers(self, width: int, plan: Plan) -> int:
        """Return the bytes of ``width`` values to each peer, twice if the sums are also sent back
        to all peers.
        """
        return (
            (2 if replicated(plan) else 1)
            * (sync_peers(plan) - 1)
            * width
            * ITEMSIZES[self.value_dtype]
        )

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> tuple[int, int]:
        """Return a residual, and a bit per element that the peers reduce; each of the ``P`` rows is
        packed alone.
        """
        peers = sync_peers(plan)
        return super().memory(plan, columns, loss_scaled)[0], peers * -(
            -columns // 8
        ) if peers > 1 else 0


class ScapeSync(MaskedSync):
    """The elements of largest momentum at the last step, by a mask that all ranks share; AdamS
    lives on them alone.
    """

    OPTIMIZER: ClassVar[str | None] = "AdamS"

    mode: Literal["scape"] = Field(
        "scape",
        description="The momentum's largest elements, chosen a step before (SCAPE, with the AdamS "
        "optimizer).",
    )
    density: Density = Field(
        0.1, description="Share of each rank's optimizer shard that the mask selects."
    )
    start_density: Density = Field(
        1.0, description="Density of the first step, if there is a warm-up."
    )

    def volume(self, plan: Plan, widths: Sequence[int], itemsize: int) -> list[Move]:
        """Return the moves of every sparse mode, and in the group inside the node the mask bits of
        all peers' rows.
        """
        moves = super().volume(plan, widths, itemsize)
        inner = sync_pairs(plan)[0]
        peers = sync_peers(plan)
        if inner is not None and peers > 1:
            moves += gather_moves(plan, inner, peers * -(-sum(widths) // 8))
        return moves

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes of each peer's masked row, of the own sums if peers need them, and of
        mask bits to all.
        """
        columns = sum(widths)
        parts = widths if self.select == "parameter" else [columns]
        kept = sum(share(self.density, part) for part in parts)
        ways = 2 if replicated(plan) else 1
        return (sync_peers(plan) - 1) * (
            ways * kept * ITEMSIZES[self.value_dtype] + -(-columns // 8)
        )

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> tuple[int, int]:
        """Return the residual and the own row's momentum, and two masks of all rows of the gradient
        shard.

        The own row of each mask is stored again, as it was sent.
        """
        residual, masks = super().memory(plan, columns, loss_scaled)
        if sync_peers(plan) == 1:
            return residual, masks
        rows = plan.world_size // plan.gradients
        return residual + FP32 * columns, 2 * (rows + 1) * -(-columns // 8)

    def run_bytes(self, columns: int, plan: Plan, overwritten: int) -> tuple[float, float, float]:
        """Keep also the own row of the next mask, which is selected at the peak, or later its
        momentum.
        """
        errors, exchange, settling = super().run_bytes(columns, plan, overwritten)
        selecting = (PART_BYTES if self.select == "parameter" else 2 * FP32) * columns
        made = max(FP32 * sync_peers(plan) * columns + selecting, columns + exchange)
        return columns + errors, made, max((FP32 + 1) * columns, settling)


class TernarySync(SparseSync):
    """Send the largest elements of every block, each as a sign, and one scale for the block.

    ``select`` says of what the blocks are cut.
    """

    mode: Literal["ternary"] = Field(
        "ternary", description="Signs of each block's largest elements, with one scale."
    )
    density: Density = Field(
        0.05, description="Share of the elements of each block that a rank selects."
    )
    select: Literal["run", "all"] = Field("run", description=SELECT)
    value_dtype: Dtype = Field("bf16", description="Type of a block's scale on the wire.")

    @property
    def selections(self) -> int:
        """Return the number of selected elements of each block."""
        return share(self.density, TERNARY_BLOCK)

    @property
    def settles_own_row(self) -> bool:
        """Return True: the owner keeps the rest of its sums."""
        return True

    @property
    def low_bits(self) -> int:
        """Return the low bits of a position that are sent unchanged: the number that makes the
        block shortest.
        """
        selections = self.selections
        return min(
            range(TERNARY_BLOCK.bit_length()),
            key=lambda low: selections * low + (TERNARY_BLOCK >> low),
        )

    @property
    def block_bits(self) -> int:
        """Return the bits of a block's positions and signs, its scale excluded.

        They are a bit vector with the upper bits of the positions, then low bits and a sign for
        each selected element.
        """
        upper = self.selections + (TERNARY_BLOCK >> self.low_bits)
        return upper + self.selections * (self.low_bits + 1)

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> int:
        """Return the exact bytes of a row's blocks and scales per owner; twice if all peers need
        all rows.
        """
        blocks = -(-sum(widths) // TERNARY_BLOCK)
        ways = 2 if replicated(plan) else 1
        row = -(-blocks * self.block_bits // 8) + blocks * ITEMSIZES[self.value_dtype]
        return ways * (sync_peers(plan) - 1) * row

    def run_bytes(self, columns: int, plan: Plan, overwritten: int) -> tuple[float, float, float]:
        """Keep the packets sent and the residual of the own row.

        At the peak encode the padded blocks, or decode what is received and deliver the sums. At
        the end the packets of all other peers are unpacked to values with their indices.
        """
        peers = sync_peers(plan)
        blocks = -(-columns // TERNARY_BLOCK)
        others = sync_peers(plan) - 1
        kept = blocks * (peers * self.block_bits / 8 + FP32 * TERNARY_BLOCK)
        settling = (
            others
            * blocks
            * (1.125 * self.block_bits + self.selections * (16 + max(24, 5 * self.low_bits)))
        )
        encoding = others * blocks * (self.selections * (26 + 4 * self.low_bits) + self.block_bits)
        row = FP32 * TERNARY_BLOCK + (8 + FP32) * self.selections  # of the sums, with their indices
        sums = (row * peers * blocks if replicated(plan) else 0) + overwritten
        padded = FP32 * peers * TERNARY_BLOCK * blocks
        return (
            kept,
            max(FP32 * peers * columns + padded + encoding, kept + max(settling, sums)),
            settling,
        )
