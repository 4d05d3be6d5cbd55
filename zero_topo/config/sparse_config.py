# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the sparse modes of ``sync``, which send a share of the elements between gradient
domains.

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
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field, StrictBool

from zero_topo.config.sparse_base import (
    SELECT,
    Density,
    SparseSync,
    index_bytes,
    replicated,
    share,
)
from zero_topo.config.sync_config import (
    FP32,
    ITEMSIZES,
    Dtype,
    Move,
    gather_moves,
    sync_pairs,
    sync_peers,
)
from zero_topo.plan import Plan

TERNARY_BLOCK = 4096


class MaskedSync(SparseSync):
    """What modes have in common that send the elements of a mask, without indices."""

    def kept_share(self, peers: int) -> float:
        """Return 0: the mask selects them again."""
        return 0.0

    def selecting(self, peers: int) -> float:
        """Return the bytes of the own row, and of the run as it is read."""
        return FP32 + super().selecting(peers) / peers


class OkTopkSync(SparseSync):
    """The largest elements of the sum of the largest, with O(k) words whatever the number of ranks.

    With ``"select": "run"`` it selects the same share of each rank's part of a run, without
    thresholds.
    """

    mode: Literal["oktopk"] = Field("oktopk", description="The sparse all-reduce of Ok-Topk.")
    select: Literal["run", "all"] = Field("all", description=SELECT)
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
        indexed = row if self.sharded or not self.whole else peers * row
        record = index_bytes(indexed) + ITEMSIZES[self.value_dtype]
        return (part if self.sharded else 2 * part) * record


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
