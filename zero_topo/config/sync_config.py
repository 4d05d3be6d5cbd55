# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the settings of the modes of ``sync`` and their costs: bytes sent, bytes stored, and
scratch bytes.

To add a mode, write its model here or in ``sparse_config.py``, with the formulas that are abstract
in its base, and add the class to ``SYNC_MODES``. Nothing else in config and cost needs a change:
the ``mode`` key selects the class, and the engine dispatches on it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from zero_topo.plan import Plan
from zero_topo.quant.spec import BlockSpec
from zero_topo.strict import StrictModel

Dtype = Literal["fp32", "bf16", "fp16"]
ITEMSIZES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32 = 4


class Move(NamedTuple):
    """Records that a rank sends ``sent`` bytes in the process group ``(lo, hi)``."""

    lo: int
    hi: int
    sent: int


def gather_moves(plan: Plan, pair: tuple[int, int], message: int) -> list[Move]:
    """Return an all-gather's moves: the outermost group first; inner groups then pass on everything
    received.
    """
    moves = []
    for lo, hi in reversed(plan.stages(*pair)):
        moves.append(Move(lo, hi, (hi // lo - 1) * message))
        message *= hi // lo
    return moves


def reduce_moves(plan: Plan, pair: tuple[int, int], message: int) -> list[Move]:
    """Return a reduce-scatter's moves: each group carries the buffers for all destinations of the
    groups after it.
    """
    stages = plan.stages(*pair)
    return [Move(lo, hi, (hi // lo - 1) * (pair[1] // hi) * message) for lo, hi in stages]


class SyncSettings(StrictModel):
    """Settings of one mode; each subclass adds the key ``mode``, its own, and its formulas.

    Attributes:
        MODE: the value of ``mode``, its default.
        OPTIMIZER: the only ``optimizer.type`` it works with; None if any will do.

    Raises:
        TypeError: where a mode without a formula is used; Python's error for an abstract class
            names the formula.
    """

    MODE: ClassVar[str]
    OPTIMIZER: ClassVar[str | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "mode" in cls.model_fields:
            cls.MODE = cls.model_fields["mode"].default

    @property
    def spec(self) -> BlockSpec | None:
        """Return the format of blocks in which gradients cross nodes; None if they are not
        sent so.
        """
        return None

    @property
    def keeps_residual(self) -> bool:
        """Return whether ranks store what they have not sent, and add it to the next step."""
        return False

    @property
    def whole(self) -> bool:
        """Return whether one collective carries all parameters, rather than runs of them as they
        are ready.
        """
        return False

    def run_numel(self, bucket: int | None, numel: int) -> int | None:
        """Return the most parameter elements of a run; None if one collective carries all
        parameters.

        Args:
            bucket: DeepSpeed's ``reduce_bucket_size``, or None.
            numel: elements of all parameters.
        """
        return None if self.whole else bucket

    def problem(self, plan: Plan) -> str | None:
        """Return why the mode cannot work with a plan and what to change; None if it can.

        Args:
            plan: the degrees.
        """
        return None

    @abstractmethod
    def volume(self, plan: Plan, widths: Sequence[int], itemsize: int) -> list[Move]:
        """Return what a rank sends in one sync.

        Args:
            plan: the degrees.
            widths: elements of each parameter in a rank's world shard.
            itemsize: bytes of a gradient element that is sent dense.
        """

    @abstractmethod
    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> tuple[int, int]:
        """Return the bytes of the residual and of the masks that a rank stores between steps.

        Args:
            plan: the degrees.
            columns: ``C``, elements of the rank's world shards.
            loss_scaled: whether a loss scaler may skip steps (FP16).
        """

    @abstractmethod
    def scratch(
        self, plan: Plan, columns: int, run: Sequence[int], itemsize: int
    ) -> tuple[int, int]:
        """Return the scratch bytes of a rank in a sync, in addition to the shards and to
        :meth:`memory`.

        They are the peak, and the part of it that is kept until it is decided whether the step is
        skipped.

        Args:
            plan: the degrees.
            columns: ``C``, elements of the rank's world shards.
            run: elements, in a world shard, of each parameter of the largest run that is synced at
                a time.
            itemsize: bytes of a gradient element that is sent dense.
        """


def sync_pairs(plan: Plan) -> tuple[tuple[int, int] | None, tuple[int, int]]:
    """Return the group of a sync inside the node (None if gradients fill whole nodes) and the group
    across nodes.
    """
    *inner, outer = plan.stages(*plan.pair_of("sync"))
    return (inner[0] if inner else None), outer


def sync_peers(plan: Plan) -> int:
    """Return ``P``, the number of ranks in the group of a sync across nodes."""
    lo, hi = sync_pairs(plan)[1]
    return hi // lo


def rows_message(rows: int, widths: Iterable[int], spec: BlockSpec | None, itemsize: int) -> int:
    """Return the bytes of a packed buffer of ``rows`` rows per parameter, each row padded to whole
    blocks.
    """
    if spec is None:
        return rows * sum(widths) * itemsize
    alike = Counter(widths).items()  # layers are equal
    blocks = sum(count * spec.blocks(width) for width, count in alike)
    return spec.nbytes(rows * blocks * spec.block_size)


class DenseSync(SyncSettings):
    """Every element of the gradient shard is reduced, unquantized."""

    mode: Literal["dense"] = Field("dense", description="Reduce every element, unquantized.")
    reduce: Literal["reduce_scatter", "ring", "all_reduce"] = Field(
        "reduce_scatter",
        description='"reduce_scatter" reduces a gradient shard straight to the optimizer shards, '
        "with sums in FP32; "
        '"ring" lets NCCL or RCCL sum between nodes on the way, in the type on the wire, as '
        "unmodified ZeRO-3 does (on "
        'other backends it is "reduce_scatter"); "all_reduce" reduces the shard to every rank that '
        "holds it, as step 4 "
        "of the ZeRO-topo paper does, at twice the bytes.",
    )
    dtype: Dtype | None = Field(
        None,
        description="Type of the values on the wire; null takes the type the gradients are "
        "accumulated in.",
    )

    def volume(self, plan: Plan, widths: Sequence[int], itemsize: int) -> list[Move]:
        """Return a reduce-scatter to one row per rank, then an all-gather to the optimizer or the
        gradient shard.
        """
        row = sum(widths) * itemsize
        shard = plan.gradients if self.reduce == "all_reduce" else plan.optimizer
        return reduce_moves(plan, plan.pair_of("sync"), row) + gather_moves(
            plan, (shard, plan.world_size), row
        )

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> tuple[int, int]:
        """Return zero bytes: this mode stores nothing between steps."""
        return 0, 0

    def scratch(
        self, plan: Plan, columns: int, run: Sequence[int], itemsize: int
    ) -> tuple[int, int]:
        """Return the bytes of the buffers sent to the owners of all rows, and of the equally large
        ones received.
        """
        rows = plan.world_size // plan.gradients
        return 2 * rows * sum(run) * itemsize if rows > 1 else 0, 0


class QuantizedSync(SyncSettings):
    """Every element is reduced straight to the optimizer shard, block-quantized, with the error fed
    back.
    """

    mode: Literal["quantized"] = Field(
        "quantized", description="Block-quantize what crosses between gradient domains."
    )
    bits: Literal[8, "nf4"] = Field(
        "nf4",
        description='Bits per value on the wire. 8: next to one FP32 scale per block. "nf4": 4 '
        "bits in a codebook, in blocks of 64 with scales of one byte.",
    )

    @property
    def keeps_residual(self) -> bool:
        """Return True: what rounding has lost is added to the next step."""
        return True

    @property
    def spec(self) -> BlockSpec:
        """Return the wire format."""
        return BlockSpec.named("int8" if self.bits == 8 else "nf4")

    def volume(self, plan: Plan, widths: Sequence[int], itemsize: int) -> list[Move]:
        """Return an unquantized reduction inside the node if needed, one quantized row to each
        owner, and a gather.

        The gather returns the reduced rows, unquantized, to the ranks that share an optimizer
        shard.
        """
        inner, outer = sync_pairs(plan)
        row = sum(widths) * itemsize
        within = (
            reduce_moves(plan, inner, plan.world_size // inner[1] * row)
            if inner is not None
            else []
        )
        across = reduce_moves(plan, outer, rows_message(1, widths, self.spec, itemsize))
        return within + across + gather_moves(plan, (plan.optimizer, plan.world_size), row)

    def memory(self, plan: Plan, columns: int, loss_scaled: bool) -> tuple[int, int]:
        """Return one FP32 row per peer if a loss scaler may skip steps; else the gradient shard
        stores the residual.
        """
        residual = (sync_peers(plan) - 1) * columns * FP32
        return residual if loss_scaled else 0, 0

    def scratch(
        self, plan: Plan, columns: int, run: Sequence[int], itemsize: int
    ) -> tuple[int, int]:
        """Return the bytes of the buffers sent and received, and of FP32 copies of the rows where
        those are needed.

        Rows are copied if they are summed inside the node first, or if reduced rows are sent back.
        Received gradients then overwrite the residual, so the copies store it until it is decided
        whether the step is skipped.
        """
        inner = sync_pairs(plan)[0]
        peers = sync_peers(plan)
        if peers == 1:
            return 0, 0
        replicated = plan.optimizer < plan.world_size
        table = FP32 * peers * sum(run) if inner is not None or replicated else 0
        kept = FP32 * peers * columns if replicated else 0
        summed = 2 * plan.world_size // plan.gradients * sum(run) * itemsize if inner else 0
        message = rows_message(peers, run, self.spec, itemsize)
        return max(kept, table) + max(summed, 2 * message), kept
