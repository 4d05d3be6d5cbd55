# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the sparse modes of ``sync``, which send a share of the elements between gradient domains.

Note [Expected, not exact]
    The bytes that a sparse mode sends depend on the data: how many elements several ranks select alike, and how far a
    reused threshold has drifted. The formulas assume that each rank selects ``k`` elements, evenly spread, that ranks
    select the same element only by chance, and that there are as many sums as possible. Counts and flags (8 bytes per
    peer) and the few values sent in addition to a sketch are left out. One-dimensional parameters, which are reduced
    dense, count as sparse. The meter reports the bytes actually sent.

Note [At the peak]
    For the ``n`` elements that the peers reduce, a reduction stores gradient plus residual in FP32, ``4 n`` bytes,
    which become the next residual. In addition, depending on the mode, it stores the magnitudes to select from
    (``4 n``) or the sums, and the selected elements: an index and a value take 12 bytes, and 41 while they are sorted
    for summation in a fixed order. The internal scratch of torch's selection and sort is not counted.

Note [Positions]
    Every block of 4096 elements has the same number of selected elements, so all buffers have one length and no sizes
    are exchanged. Ascending positions are sent as Elias-Fano codes (Vigna, "Quasi-succinct indices", WSDM 2013): the
    lower bits of each position unchanged, the upper bits as a bit vector. For each value of the upper bits, the vector
    has a 1 per selected element and then a 0. This is within half a bit per selected element of the optimum, and every
    block can be decoded independently.
"""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field

from zero_topo.config.sync_config import (
    FP32,
    ITEMSIZES,
    Books,
    Dtype,
    Kept,
    Move,
    Scratch,
    SyncSettings,
    sync_hops,
    sync_peers,
)
from zero_topo.plan import Plan

PICK_BYTES = 12  # bytes of an unpacked index and value
SORTING_BYTES = 41  # bytes per selected element while it is sorted and summed, itself included
PART_BYTES = 39  # bytes per element while the largest elements of each parameter are selected
TERNARY_BLOCK = 4096


def index_bytes(numel: int) -> int:
    """Return the bytes of an index into ``numel`` elements as it is sent: 4 if 32 bits suffice, else 8."""
    return 4 if numel <= 2**32 else 8


def replicated(plan: Plan) -> bool:
    """Return whether several ranks store the same optimizer shard, so that sums are sent back to all of them."""
    return plan.optimizer < plan.world_size


class SparseSync(SyncSettings):
    """What all sparse modes have in common; one optimizer step syncs all parameters at once."""

    WHOLE: ClassVar[bool] = True

    density: float = Field(0.01, gt=0, le=1, description="Share of the elements that a rank selects.")
    error_feedback: bool = Field(
        True,
        strict=True,
        description="Keep what was not sent, in FP32 where it was not sent, and add it at the next step. Costs 4 bytes "
        "for each element of the gradient shard.",
    )
    offload_residual: bool = Field(
        False,
        strict=True,
        description="Keep the residual in the host's memory and bring it to the device once a step.",
    )
    value_dtype: Dtype = Field(
        "fp32",
        description="Type of the values on the wire; each comes with an index of 4 bytes, or 8 above 2^32 elements.",
    )
    include: tuple[str, ...] = Field(
        ("*",), description="Parameters to sparsify: shell patterns of their names, any of which must fit."
    )
    exclude: tuple[str, ...] = Field((), description="Parameters to reduce densely after all: shell patterns.")
    dense_vectors: bool = Field(
        True, strict=True, description="Reduce parameters of fewer than two dimensions (norms, biases) densely."
    )
    start: int = Field(0, ge=0, description="Optimizer steps at the beginning that reduce everything.")
    start_density: float = Field(
        0.25, gt=0, le=1, description="Density of the step after start, if there is a warm-up; DGC begins with 0.25."
    )
    warmup: int = Field(
        0,
        ge=0,
        description="Steps after start over which the density goes geometrically from start_density to density, as in "
        "DGC (arXiv 1712.01887, section 3.4).",
    )

    def density_at(self, step: int) -> float:
        """Return a step's density; steps count from 0.

        It is 1 up to ``start``, then ``d_0 (d / d_0) ** (t / warmup)`` in the warm-up, then ``d``.
        """
        since = step - self.start
        if since < 0:
            return 1.0
        if since >= self.warmup:
            return self.density
        return float(self.start_density * (self.density / self.start_density) ** (since / self.warmup))

    @property
    def busiest(self) -> Self:
        """Return the settings of the step that sends most, the steps before ``start`` excepted."""
        return self.model_copy(update={"density": max(self.density, self.density_at(self.start))})

    def volume(self, books: Books, widths: Sequence[int], itemsize: int) -> None:
        """Record an FP32 reduction inside the node if needed, the mode's buffers, and an FP32 gather in the node."""
        plan, columns, peers = books.plan, sum(widths), sync_peers(books.plan)
        inner, outer = sync_hops(plan)
        if peers == 1:
            return
        if inner is not None:
            books.reduce(inner, peers * columns * FP32)
        books.moves.append(Move(*outer, round(self.peer_bytes(widths, plan)), gathers=False))
        if inner is not None and plan.optimizer < inner[1]:
            books.gather((plan.optimizer, inner[1]), peers * columns * FP32)

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> Kept:
        """Return the bytes of an FP32 residual of all elements that the peers reduce."""
        peers = sync_peers(plan)
        return Kept(peers * columns * FP32 if self.error_feedback and not self.offload_residual and peers > 1 else 0)

    def scratch(self, plan: Plan, columns: int, run: Sequence[int], itemsize: int) -> Scratch:
        """Return the bytes of gradient plus residual and of the mode's scratch; see Note [At the peak].

        The FP32 reduction inside the node, or a dense reduction before ``start``, counts instead if it needs more.
        """
        inner, peers = sync_hops(plan)[0], sync_peers(plan)
        if peers == 1:
            return Scratch()
        within = 2 * FP32 * peers * columns * (inner[1] // inner[0]) if inner is not None else 0
        dense = self.exchanged_bytes(peers * columns, plan) if self.start else 0
        made = round(max(within, dense, self.busiest.made_bytes(columns, plan)))
        return Scratch(always=FP32 * peers * columns + made)

    @abstractmethod
    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes that a rank sends to its peers, at least one, in a step.

        Args:
            widths: columns of each parameter.
            plan: gives the number of peers, and whether they need more than one row.
        """

    @abstractmethod
    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Return the mode's peak scratch bytes, gradient plus residual excluded.

        Args:
            columns: ``C``, elements of a row.
            plan: gives the number of peers, and whether they need more than one row.
        """

    def exchanged_bytes(self, numel: float, plan: Plan, everywhere: bool | None = None) -> float:
        """Return the peak scratch bytes of reducing ``numel`` values: rounded copy, receive buffer, FP32 values, sums.

        Args:
            numel: values in all rows.
            plan: the degrees.
            everywhere: whether all sums are sent back to all peers; None follows the plan.
        """
        itemsize, row = ITEMSIZES[self.value_dtype], FP32 * numel / sync_peers(plan)
        rounds = itemsize < FP32
        coming = (2 * itemsize + FP32) * numel if rounds else FP32 * numel + row
        if not (replicated(plan) if everywhere is None else everywhere):
            return coming
        back = row + (itemsize + FP32 if rounds else FP32) * numel + (row / FP32 * itemsize if rounds else 0)
        return max(coming, back)

    def masked_bytes(self, numel: int, plan: Plan, everywhere: bool | None = None) -> float:
        """Return the peak scratch bytes of reducing the elements that a mask selects, the mask excluded.

        They are the positions and values of the selected elements, then the sums at their positions.


        Args:
            numel: ``n``, elements of all rows; the mask selects the share ``density`` of them.
            plan: the degrees.
            everywhere: as in :meth:`exchanged_bytes`.
        """
        kept, sums = self.density * numel, replicated(plan) if everywhere is None else everywhere
        placed = 4 * (kept + numel) if sums else (12 * kept + 4 * numel) / sync_peers(plan)
        return 12 * kept + max(self.exchanged_bytes(kept, plan, sums), placed)


class PickingSync(SparseSync):
    """What modes have in common that send selected elements, an index and a value each; here, all to every peer."""

    @property
    def by_row(self) -> bool:
        """Return whether an index counts within a row, because the row's owner sums it."""
        return False

    def picks(self, numel: int, plan: Plan) -> float:
        """Return the number of selected elements that a rank sends.

        Args:
            numel: ``n``, elements that the peers reduce.
            plan: gives the number of peers, and whether they need more than one row.
        """
        return self.density * numel * (sync_peers(plan) - 1)

    def record_bytes(self, numel: int, plan: Plan) -> int:
        """Return the bytes of a selected element as sent: a value, and an index into ``numel`` elements or a row."""
        return index_bytes(numel // sync_peers(plan) if self.by_row else numel) + ITEMSIZES[self.value_dtype]

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes of all selected elements sent."""
        numel = sync_peers(plan) * sum(widths)
        return self.picks(numel, plan) * self.record_bytes(numel, plan)

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Return the scratch bytes of a rank that receives all selected elements of all peers."""
        peers = sync_peers(plan)
        n, k = peers * columns, self.density * peers * columns
        return PICK_BYTES * k + max(4 * n + PICK_BYTES * peers * k, SORTING_BYTES * peers * k)


class TopkASync(PickingSync):
    """Every rank sends its selected elements to all others."""

    mode: Literal["topk_a"] = Field("topk_a", description="All-gather of every rank's largest elements.")


class GaussianKSync(PickingSync):
    """As ``topk_a``, with a threshold that is estimated from a normal distribution."""

    mode: Literal["gaussian_k"] = Field(
        "gaussian_k", description="All-gather of the elements above a threshold that a normal distribution suggests."
    )


class TopkDsaSync(PickingSync):
    """Selected elements are reduced by their owners; the sums are gathered, sparse or dense, whichever is shorter."""

    mode: Literal["topk_dsa"] = Field(
        "topk_dsa",
        description="Sparse reduce-scatter of the selected elements, then an all-gather that may turn dense (SparCML).",
    )

    @property
    def by_row(self) -> bool:
        """Return True: owners sum their rows."""
        return True

    def picks(self, numel: int, plan: Plan) -> float:
        """Return the count for each owner's part, then for the sums that all peers get.

        A region has at most ``k`` sums; it is sent dense if that is shorter.
        """
        k, peers = self.density * numel, sync_peers(plan)
        dense = numel / peers * 4 / self.record_bytes(numel, plan)
        return k * (peers - 1) / peers + (min(k, dense) * (peers - 1) if replicated(plan) else 0)

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Return the peak of selecting, of summing, and, if all rows are needed, of receiving them sparse or dense."""
        peers, row, back = sync_peers(plan), 4 * columns, 0.0
        n, k = peers * columns, self.density * peers * columns
        if replicated(plan):
            sparse = k * self.record_bytes(n, plan) < row
            back = row + (4 * n + (PICK_BYTES + 8) * peers * k if sparse else 8 * n)
        return PICK_BYTES * k + max(4 * n, SORTING_BYTES * k, back)


class GTopkSync(PickingSync):
    """The largest elements of the sum, found in a tree."""

    mode: Literal["gtopk"] = Field(
        "gtopk", description="Pairwise sums in a tree, the largest elements chosen anew at each level (gTopk)."
    )

    def picks(self, numel: int, plan: Plan) -> float:
        """Return the number of elements that the tree's root sends: fewest on the way up, most on the way down."""
        return self.density * numel * (sync_peers(plan) - 1).bit_length()

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Return the bytes at the end: the sums, and the selected elements of the last two levels."""
        n = sync_peers(plan) * columns
        return 4 * n + 6 * PICK_BYTES * self.density * n


class OkTopkSync(PickingSync):
    """The largest elements of the sum of the largest, with O(k) words whatever the number of ranks."""

    mode: Literal["oktopk"] = Field("oktopk", description="The sparse all-reduce of Ok-Topk.")
    tau: int = Field(64, ge=1, description="Steps between two balancings of the regions.")
    tau_prime: int = Field(32, ge=1, description="Steps between two exact thresholds.")
    sharded: bool = Field(
        False,
        strict=True,
        description="Regions are the optimizer shards and sums stay with their owners, with all of these' own rows: "
        "about 2k words in place of 4k. Needs an optimizer that is sharded over the world.",
    )

    transport: Literal["torch", "mpi"] = Field(
        "torch", description='Library that sends the messages: torch.distributed, or MPI through mpi4py ("mpi").'
    )

    def problem(self, plan: Plan) -> str | None:
        """Refuse MPI without mpi4py, and ``sharded`` where several ranks store the same optimizer shard."""
        if self.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
            return 'sync.transport = "mpi": mpi4py is not installed; pip install mpi4py, or set "transport": "torch"'
        if not self.sharded or plan.optimizer == plan.world_size:
            return None
        return (
            "sync.sharded = true: sums would stay with one rank, but several store the same optimizer shard; set "
            '"optimizer": "world", or "sharded": false'
        )

    @property
    def by_row(self) -> bool:
        """Return whether owners sum their rows, which they do if the sums stay with them."""
        return self.sharded

    def picks(self, numel: int, plan: Plan) -> float:
        """Return the count for each owner's part, then an equal share of ``k`` sums for all unless the sums stay."""
        peers = sync_peers(plan)
        part = self.density * numel * (peers - 1) / peers
        return part if self.sharded else 2 * part

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Return the peak of selecting, of summing, and of a row of sums with the elements selected from the sums."""
        peers, row = sync_peers(plan), 4 * columns
        n, k = peers * columns, self.density * peers * columns
        chosen: float = row + columns if self.sharded else 4 * n + (PICK_BYTES + 4) * min(peers * k, n)
        own = row if self.sharded else 0  # copied, and later overwritten with the sums
        return PICK_BYTES * k + max(own + 4 * n, own + SORTING_BYTES * k, row + chosen)


class RadiusSync(SparseSync):
    """Reduce the elements that the optimizer moved most when the mask was chosen; the others wait for the next mask."""

    mode: Literal["radius"] = Field("radius", description="One mask for all ranks, chosen anew at intervals (Radius).")
    density: float = Field(0.4, gt=0, le=1, description="Share of each parameter that the mask selects.")
    value_dtype: Dtype = Field(
        "bf16", description="Type of the values as sent; error feedback adds the rounding error to the residual."
    )
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

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the mean bytes per step. Once an interval it sends all elements and the mask, else masked ones."""
        between, resampling = self.between_bytes(widths, plan), self.resampling_bytes(sum(widths), plan)
        return ((self.interval - 1) * between + resampling) / self.interval

    def between_bytes(self, widths: Iterable[int], plan: Plan) -> int:
        """Return the bytes that a rank sends to its peers in a step that does not resample."""
        return self._to_peers(sum(max(1, int(self.density * width)) for width in widths), plan)

    def resampling_bytes(self, columns: int, plan: Plan) -> int:
        """Return the bytes that a rank sends to its peers in a step that resamples."""
        return self._to_peers(columns, plan) + (sync_peers(plan) - 1) * -(-columns // 8)

    def _to_peers(self, width: int, plan: Plan) -> int:
        """Return the bytes of ``width`` values to each peer, twice if the sums are also sent back to all peers."""
        return (2 if replicated(plan) else 1) * (sync_peers(plan) - 1) * width * ITEMSIZES[self.value_dtype]

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> Kept:
        """Return a residual, and a bit per element that the peers reduce; each of the ``P`` rows is packed alone."""
        peers = sync_peers(plan)
        masks = peers * -(-columns // 8) if peers > 1 else 0
        return super().memory(plan, columns, loss_scaled)._replace(masks=masks)

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Return the larger of a step that reduces everything and one with a boolean mask and its elements."""
        n = sync_peers(plan) * columns
        return max(self.exchanged_bytes(n, plan), n + self.masked_bytes(n, plan))


class PerParameter(SparseSync):
    """What modes have in common that can select elements within each parameter."""

    per_parameter: bool = Field(
        False,
        strict=True,
        description="Choose the same share of each parameter by itself, instead of all parameters' together.",
    )


class ScapeSync(PerParameter):
    """Reduce the elements with the largest momentum in the last step; AdamS updates only these."""

    OPTIMIZER: ClassVar[str | None] = "AdamS"

    mode: Literal["scape"] = Field(
        "scape", description="The momentum's largest elements, chosen a step before (SCAPE, with the AdamS optimizer)."
    )
    density: float = Field(0.1, gt=0, le=1, description="Share of each rank's optimizer shard that the mask selects.")
    start_density: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Density of the first step, if there is a warm-up; the paper's takes a tenth of the training.",
    )

    def problem(self, plan: Plan) -> str | None:
        """Refuse gradient and optimizer shards that differ: the momentum could not be rebuilt."""
        if plan.optimizer == plan.gradients:
            return None
        return (
            f'sync.mode = "scape": every rank rebuilds the momentum of its gradient shard (degree {plan.gradients}), '
            f"but its optimizer shard (degree {plan.optimizer}) is another; set both to the same domain, such as "
            '"gradients": "node", "optimizer": "node": then no weights cross nodes either'
        )

    def volume(self, books: Books, widths: Sequence[int], itemsize: int) -> None:
        """Record the bytes of every sparse mode, and in the group inside the node the mask bits of all peers' rows."""
        super().volume(books, widths, itemsize)
        inner, peers = sync_hops(books.plan)[0], sync_peers(books.plan)
        if inner is not None and peers > 1:
            books.gather(inner, peers * -(-sum(widths) // 8))

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Return the bytes of each peer's masked row, then of the rank's own sums and mask bits to all peers."""
        columns = sum(widths)
        parts = widths if self.per_parameter else [columns]
        kept = sum(min(part, max(1, math.ceil(self.density * part))) for part in parts)
        return (sync_peers(plan) - 1) * (2 * kept * ITEMSIZES[self.value_dtype] + -(-columns // 8))

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> Kept:
        """Return the residual, the current mask and the next mask, for all rows of the gradient shard."""
        rows = plan.world_size // plan.gradients
        masks = 2 * rows * -(-columns // 8) if rows > 1 else 0
        return super().memory(plan, columns, loss_scaled)._replace(masks=masks)

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Return the momentum, a boolean mask, and the larger of selecting, a full reduction and a masked one."""
        n = sync_peers(plan) * columns
        sorting = PART_BYTES * columns if self.per_parameter else 0
        return 5 * n + columns + max(self.exchanged_bytes(n, plan, True), sorting, self.masked_bytes(n, plan, True))


class TernarySync(SparseSync):
    """Send the largest elements of every block, each as a sign, and one scale for the block."""

    mode: Literal["ternary"] = Field(
        "ternary", description="Signs of each block's largest elements, their positions, and one scale a block."
    )
    density: float = Field(0.05, gt=0, le=1, description="Share of the elements of each block that a rank selects.")
    value_dtype: Dtype = Field("bf16", description="Type of a block's scale on the wire.")

    @property
    def picks(self) -> int:
        """Return the number of selected elements of each block."""
        return min(TERNARY_BLOCK, max(1, math.ceil(self.density * TERNARY_BLOCK)))

    @property
    def low_bits(self) -> int:
        """Return the low bits of a position that are sent unchanged: the number that makes the block shortest."""
        return min(range(TERNARY_BLOCK.bit_length()), key=lambda low: self.picks * low + (TERNARY_BLOCK >> low))

    @property
    def high_bits(self) -> int:
        """Return the length of the bit vector that encodes the upper bits of a block's positions."""
        return self.picks + (TERNARY_BLOCK >> self.low_bits)

    @property
    def block_bits(self) -> int:
        """Return the bits of a block's positions and signs, its scale excluded."""
        return self.high_bits + self.picks * (self.low_bits + 1)

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> int:
        """Return the exact bytes of a row's blocks and scales per owner; twice if all peers need all rows."""
        blocks, ways = -(-sum(widths) // TERNARY_BLOCK), 2 if replicated(plan) else 1
        row = -(-blocks * self.block_bits // 8) + blocks * ITEMSIZES[self.value_dtype]
        return ways * (sync_peers(plan) - 1) * row

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Return the scratch bytes: padded blocks, received buffers (unpacked, then placed), and the sums."""
        peers, row = sync_peers(plan), -(-columns // TERNARY_BLOCK)
        sums, apart = 4 * TERNARY_BLOCK * row, peers * row * (1.125 * self.block_bits + 28 * self.picks)
        return 4 * TERNARY_BLOCK * (2 * peers - 1) * row + (sums + apart if replicated(plan) else max(sums, apart))
