# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The sparse modes of ``sync``, which send a share of the elements between gradient domains.

Note [Expected, not exact]
    How much a sparse mode sends depends on the data: which picks of several ranks coincide, how far a reused threshold
    has drifted. The formulas take ``k`` picks a rank, evenly spread and coinciding by chance only, and of sums the most
    there can be; messages of counts and flags (8 bytes to a peer) and the few values beside a sketch are left out.
    Parameters of one dimension, which are reduced densely, count as if they were sparse. The meter says what was sent.

Note [At the peak]
    Of the ``n`` elements that the peers reduce, a reduction holds gradient plus residual in FP32, ``4 n`` bytes, which
    become the next residual. Beside them, by mode, there are magnitudes to select from (``4 n``) or the sums, and
    picks: an index and a value are 12 bytes, 41 while they are sorted to be added up in order. What torch's selection
    and sort need inside is not counted.

Note [Positions]
    Of every block of 4096 elements equally many are picked, so that messages have one length, which nobody has to ask
    for. Ascending positions travel as Elias-Fano codes (Vigna, "Quasi-succinct indices", WSDM 2013): the lower bits of
    each as they are, the upper ones as a bit vector that has, for each value of them, a 1 for each pick and then a 0.
    That is within half a bit a pick of what any code needs, and every block can be decoded by itself.
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

PICK_BYTES = 12  # index and value, taken apart
SORTING_BYTES = 41  # of a pick that is being added up, itself included
PART_BYTES = 39  # of an element while the largest of each parameter are found
TERNARY_BLOCK = 4096


def index_bytes(numel: int) -> int:
    """Bytes of an index into a vector of so many elements, as picks travel with it: 4 while 32 bits tell them apart."""
    return 4 if numel <= 2**32 else 8


def replicated(plan: Plan) -> bool:
    """Whether several ranks hold the same optimizer shard, so that sums go back to all."""
    return plan.optimizer < plan.world_size


class SparseSync(SyncSettings):
    """What all sparse modes have in common; one optimizer step syncs all parameters at once."""

    WHOLE: ClassVar[bool] = True

    density: float = Field(0.01, gt=0, le=1, description="Share of the elements that a rank picks.")
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
        """Density of a step, counted from 0: 1 up to ``start``, then ``d_0 (d / d_0) ** (t / warmup)``, then ``d``."""
        since = step - self.start
        if since < 0:
            return 1.0
        if since >= self.warmup:
            return self.density
        return float(self.start_density * (self.density / self.start_density) ** (since / self.warmup))

    @property
    def busiest(self) -> Self:
        """The settings of the step that sends most, but for those before ``start``."""
        return self.model_copy(update={"density": max(self.density, self.density_at(self.start))})

    def volume(self, books: Books, widths: Sequence[int], itemsize: int) -> None:
        """Inside the node FP32 if that is not behind us, then the mode's messages, then FP32 rows inside the node."""
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
        """A residual of all elements that the peers reduce."""
        peers = sync_peers(plan)
        return Kept(peers * columns * FP32 if self.error_feedback and not self.offload_residual and peers > 1 else 0)

    def scratch(self, plan: Plan, columns: int, run: Sequence[int], itemsize: int) -> Scratch:
        """Gradient plus residual, and what the mode makes of it; Note [At the peak]. Or FP32 inside the node."""
        inner, peers = sync_hops(plan)[0], sync_peers(plan)
        if peers == 1:
            return Scratch()
        within = 2 * FP32 * peers * columns * (inner[1] // inner[0]) if inner is not None else 0
        dense = self.exchanged_bytes(peers * columns, plan) if self.start else 0
        made = round(max(within, dense, self.busiest.made_bytes(columns, plan)))
        return Scratch(always=FP32 * peers * columns + made)

    @abstractmethod
    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """Bytes that a rank sends to its peers, at least one, in a step.

        Args:
            widths: columns of each parameter.
            plan: says how many peers there are, and whether they need more than one row.
        """

    @abstractmethod
    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Bytes that the mode makes at its peak beside gradient plus residual.

        Args:
            columns: ``C``, elements of a row.
            plan: says how many peers there are, and whether they need more than one row.
        """

    def exchanged_bytes(self, numel: float, plan: Plan, everywhere: bool | None = None) -> float:
        """Bytes that reducing so many values makes beside them: rounded, those that came, in FP32, sums, what returns.

        Args:
            numel: in all rows.
            plan: the degrees.
            everywhere: whether all sums go back to all; None asks the plan.
        """
        itemsize, row = ITEMSIZES[self.value_dtype], FP32 * numel / sync_peers(plan)
        rounds = itemsize < FP32
        coming = (2 * itemsize + FP32) * numel if rounds else FP32 * numel + row
        if not (replicated(plan) if everywhere is None else everywhere):
            return coming
        back = row + (itemsize + FP32 if rounds else FP32) * numel + (row / FP32 * itemsize if rounds else 0)
        return max(coming, back)

    def masked_bytes(self, numel: int, plan: Plan, everywhere: bool | None = None) -> float:
        """Bytes that reducing what a mask holds makes beside the mask: positions and values, then sums in their places.

        Args:
            numel: ``n``, elements of all rows; the mask holds ``density`` of them.
            plan: the degrees.
            everywhere: as in :meth:`exchanged_bytes`.
        """
        kept, sums = self.density * numel, replicated(plan) if everywhere is None else everywhere
        placed = 4 * (kept + numel) if sums else (12 * kept + 4 * numel) / sync_peers(plan)
        return 12 * kept + max(self.exchanged_bytes(kept, plan, sums), placed)


class PickingSync(SparseSync):
    """What modes have in common that send picks, an index and a value each; here, all of a rank's to every peer."""

    @property
    def by_row(self) -> bool:
        """Whether an index is into a row, since its owner adds up."""
        return False

    def picks(self, numel: int, plan: Plan) -> float:
        """Picks that a rank sends.

        Args:
            numel: ``n``, elements that the peers reduce.
            plan: says how many peers there are, and whether they need more than one row.
        """
        return self.density * numel * (sync_peers(plan) - 1)

    def record_bytes(self, numel: int, plan: Plan) -> int:
        """Bytes of a pick on the wire: a value, and an index into ``numel`` elements, or into a row."""
        return index_bytes(numel // sync_peers(plan) if self.by_row else numel) + ITEMSIZES[self.value_dtype]

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """All picks."""
        numel = sync_peers(plan) * sum(widths)
        return self.picks(numel, plan) * self.record_bytes(numel, plan)

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """All picks of all peers come."""
        peers = sync_peers(plan)
        n, k = peers * columns, self.density * peers * columns
        return PICK_BYTES * k + max(4 * n + PICK_BYTES * peers * k, SORTING_BYTES * peers * k)


class TopkASync(PickingSync):
    """Every rank's picks go to all others."""

    mode: Literal["topk_a"] = Field("topk_a", description="All-gather of every rank's largest elements.")


class GaussianKSync(PickingSync):
    """As ``topk_a``, the threshold estimated from a normal distribution."""

    mode: Literal["gaussian_k"] = Field(
        "gaussian_k", description="All-gather of the elements above a threshold that a normal distribution suggests."
    )


class TopkDsaSync(PickingSync):
    """Picks are reduced where they belong, and the sums gathered, sparse or dense, whichever is shorter."""

    mode: Literal["topk_dsa"] = Field(
        "topk_dsa", description="Sparse reduce-scatter of the picks, then an all-gather that may turn dense (SparCML)."
    )

    @property
    def by_row(self) -> bool:
        """Owners add up their rows."""
        return True

    def picks(self, numel: int, plan: Plan) -> float:
        """To each owner its part; then sums to all, of which there may be ``k`` in a region, or it goes dense."""
        k, peers = self.density * numel, sync_peers(plan)
        dense = numel / peers * 4 / self.record_bytes(numel, plan)
        return k * (peers - 1) / peers + (min(k, dense) * (peers - 1) if replicated(plan) else 0)

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Selecting; adding up; and where all rows are needed, these, sparse or in dense messages."""
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
        """The root of the tree sends least on the way up and most on the way down."""
        return self.density * numel * (sync_peers(plan) - 1).bit_length()

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """At the end the sums, and the picks of the last two levels."""
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
        "torch", description='Who carries the messages: torch.distributed, or MPI by way of mpi4py ("mpi").'
    )

    def problem(self, plan: Plan) -> str | None:
        """Refuses MPI where mpi4py is missing, and sums that stay with one of several holders of an optimizer shard."""
        if self.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
            return 'sync.transport = "mpi": mpi4py is not installed; pip install mpi4py, or set "transport": "torch"'
        if not self.sharded or plan.optimizer == plan.world_size:
            return None
        return (
            "sync.sharded = true: sums would stay with one rank, but several hold the same optimizer shard; set "
            '"optimizer": "world", or "sharded": false'
        )

    @property
    def by_row(self) -> bool:
        """Owners add up their rows if sums stay with them."""
        return self.sharded

    def picks(self, numel: int, plan: Plan) -> float:
        """To each owner its part, then an equal share of ``k`` sums to all, unless these stay."""
        peers = sync_peers(plan)
        part = self.density * numel * (peers - 1) / peers
        return part if self.sharded else 2 * part

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Selecting; adding up; a row of sums, and what is chosen of it or, where all sums go to all, of all."""
        peers, row = sync_peers(plan), 4 * columns
        n, k = peers * columns, self.density * peers * columns
        chosen: float = row + columns if self.sharded else 4 * n + (PICK_BYTES + 4) * min(peers * k, n)
        own = row if self.sharded else 0  # is put aside, and becomes the sums
        return PICK_BYTES * k + max(own + 4 * n, own + SORTING_BYTES * k, row + chosen)


class RadiusSync(SparseSync):
    """The elements that the optimizer moved most at the last resampling; the others wait for the next one."""

    mode: Literal["radius"] = Field("radius", description="One mask for all ranks, chosen anew at intervals (Radius).")
    density: float = Field(0.4, gt=0, le=1, description="Share of each parameter that the mask holds.")
    value_dtype: Dtype = Field(
        "bf16", description="Type of the values on the wire; what rounding takes away is owed, with error feedback."
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
        """The mean over an interval: one step sends everything and the mask, the others what the mask holds."""
        between, resampling = self.between_bytes(widths, plan), self.resampling_bytes(sum(widths), plan)
        return ((self.interval - 1) * between + resampling) / self.interval

    def between_bytes(self, widths: Iterable[int], plan: Plan) -> int:
        """Bytes that a rank sends to its peers in a step that does not resample."""
        return self._to_peers(sum(max(1, int(self.density * width)) for width in widths), plan)

    def resampling_bytes(self, columns: int, plan: Plan) -> int:
        """Bytes that a rank sends to its peers in a step that resamples."""
        return self._to_peers(columns, plan) + (sync_peers(plan) - 1) * -(-columns // 8)

    def _to_peers(self, width: int, plan: Plan) -> int:
        """To each peer its row; then the sums of the own row to all, unless these stay."""
        return (2 if replicated(plan) else 1) * (sync_peers(plan) - 1) * width * ITEMSIZES[self.value_dtype]

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> Kept:
        """A residual, and a bit for each element that the peers reduce, each of the ``P`` rows packed by itself."""
        peers = sync_peers(plan)
        masks = peers * -(-columns // 8) if peers > 1 else 0
        return super().memory(plan, columns, loss_scaled)._replace(masks=masks)

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """A step that reduces everything, or the mask as booleans and what it holds."""
        n = sync_peers(plan) * columns
        return max(self.exchanged_bytes(n, plan), n + self.masked_bytes(n, plan))


class PerParameter(SparseSync):
    """What modes have in common that may choose of each parameter by itself."""

    per_parameter: bool = Field(
        False,
        strict=True,
        description="Choose the same share of each parameter by itself, instead of all parameters' together.",
    )


class ScapeSync(PerParameter):
    """The elements of largest momentum at the last step, by a mask that all ranks share; AdamS lives on them alone."""

    OPTIMIZER: ClassVar[str | None] = "AdamS"

    mode: Literal["scape"] = Field(
        "scape", description="The momentum's largest elements, chosen a step before (SCAPE, with the AdamS optimizer)."
    )
    density: float = Field(0.1, gt=0, le=1, description="Share of each rank's optimizer shard that the mask holds.")
    start_density: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Density of the first step, if there is a warm-up; the paper's takes a tenth of the training.",
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

    def volume(self, books: Books, widths: Sequence[int], itemsize: int) -> None:
        """As every sparse mode; inside a node that is not behind us, the bits of all peers' rows too."""
        super().volume(books, widths, itemsize)
        inner, peers = sync_hops(books.plan)[0], sync_peers(books.plan)
        if inner is not None and peers > 1:
            books.gather(inner, peers * -(-sum(widths) // 8))

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> float:
        """To each peer what the mask holds of its row, then the sums of the own row to all, and that row's bits."""
        columns = sum(widths)
        parts = widths if self.per_parameter else [columns]
        kept = sum(min(part, max(1, math.ceil(self.density * part))) for part in parts)
        return (sync_peers(plan) - 1) * (2 * kept * ITEMSIZES[self.value_dtype] + -(-columns // 8))

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> Kept:
        """A residual, the mask in force and the next one, of all rows of the gradient shard."""
        rows = plan.world_size // plan.gradients
        masks = 2 * rows * -(-columns // 8) if rows > 1 else 0
        return super().memory(plan, columns, loss_scaled)._replace(masks=masks)

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """The momentum, the mask as booleans, the choice; the first step, which reduces everything, or a later one."""
        n = sync_peers(plan) * columns
        sorting = PART_BYTES * columns if self.per_parameter else 0
        return 5 * n + columns + max(self.exchanged_bytes(n, plan, True), sorting, self.masked_bytes(n, plan, True))


class TernarySync(SparseSync):
    """The largest elements of every block, each as a sign, and one scale for the block."""

    mode: Literal["ternary"] = Field(
        "ternary", description="Signs of each block's largest elements, their positions, and one scale a block."
    )
    density: float = Field(0.05, gt=0, le=1, description="Share of the elements of each block that a rank picks.")
    value_dtype: Dtype = Field("bf16", description="Type of a block's scale on the wire.")

    @property
    def picks(self) -> int:
        """Of each block."""
        return min(TERNARY_BLOCK, max(1, math.ceil(self.density * TERNARY_BLOCK)))

    @property
    def low_bits(self) -> int:
        """Of a position, as they are: as many as make the block shortest."""
        return min(range(TERNARY_BLOCK.bit_length()), key=lambda low: self.picks * low + (TERNARY_BLOCK >> low))

    @property
    def high_bits(self) -> int:
        """Of the vector of a block that says the upper bits of all its positions."""
        return self.picks + (TERNARY_BLOCK >> self.low_bits)

    @property
    def block_bits(self) -> int:
        """Of a block beside its scale: positions and signs."""
        return self.high_bits + self.picks * (self.low_bits + 1)

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> int:
        """To each owner the bits of its row's blocks, and a scale each; as much back, if all need all rows; exact."""
        blocks, ways = -(-sum(widths) // TERNARY_BLOCK), 2 if replicated(plan) else 1
        row = -(-blocks * self.block_bits // 8) + blocks * ITEMSIZES[self.value_dtype]
        return ways * (sync_peers(plan) - 1) * row

    def made_bytes(self, columns: int, plan: Plan) -> float:
        """Blocks, filled up; what others sent, taken apart and then in its place; sums, twice if all need them."""
        peers, row = sync_peers(plan), -(-columns // TERNARY_BLOCK)
        sums, apart = 4 * TERNARY_BLOCK * row, peers * row * (1.125 * self.block_bits + 28 * self.picks)
        return 4 * TERNARY_BLOCK * (2 * peers - 1) * row + (sums + apart if replicated(plan) else max(sums, apart))
