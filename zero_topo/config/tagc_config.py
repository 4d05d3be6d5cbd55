# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the settings of the sync mode ``tagc``: shares, sketch sizes, when a sketch is safe, and
bytes sent.

A rank sends 1 bit per element and 32 / r bits of sketch to the owners of the other rows:
``(1 + 32 / r) (P - 1) / P`` bits for each of the ``n`` elements. The paper's index goes to all
ranks, which makes it 2 + 32 / r. Sketches are counted in whole rows.

Which layers
    TAGC compresses the linear layers outside the attention core: feed-forward, embedding, head and
    output projection. Everything is included, and layers that compute queries, keys and values are
    excluded by their common names: separate layers (``q_proj``, ``query``, DeepSeek's
    ``kv_a_proj``, T5's ``SelfAttention.q``) and fused ones (``qkv``, ``Wqkv``, ``query_key_value``,
    GPT-2's ``c_attn``, PyTorch's ``in_proj_weight``). Norms and biases are dense too.

Note [Safe loads]
    The paper's shares of zeros (80%, 90%, 98.75% for 2x, 4x, 10x) describe the sum over the ranks,
    but are applied by each rank. Peeling works while the union of all selected elements fills less
    than about 0.57 of the sketch, that is 0.57 / r of the elements. The elements that ``P`` ranks
    select may all differ, so a rank selects at most 0.57 / (r P).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator
from pydantic.json_schema import SkipJsonSchema

from zero_topo.config.sparse_base import SparseSync, replicated
from zero_topo.config.sync_config import FP32, ITEMSIZES, Dtype, sync_peers
from zero_topo.plan import Plan

RATIOS = (10, 4, 2)
PAPER_ZEROS = {2: 0.80, 4: 0.90, 10: 0.9875}
SAFE_LOAD = 0.57
BLOCK = 1024
LEAST_BLOCKS = 64
LEAST_ROWS = 3
QUERY_KEY_VALUE = (
    "*qkv*",
    "*query_key_value*",
    "*.query.*",
    "*.key.*",
    "*.value.*",
    "*.[qkv].*",
    "*q_proj*",
    "*k_proj*",
    "*v_proj*",
    "*.q_a_proj*",
    "*.q_b_proj*",
    "*.kv_*",
    "*c_attn*",
    "*in_proj_weight",
)


class TagcSync(SparseSync):
    """An exact index and a count sketch of the values, both reduced to the owner of each row; TAGC.

    Polyakov, Dukhanov and Spirin, "TAGC: Optimizing Gradient Communication in Distributed
    Transformer Training" (EuroMLSys 2025).
    """

    EXCLUDED: ClassVar[tuple[str, ...]] = QUERY_KEY_VALUE

    mode: Literal["tagc"] = Field(
        "tagc", description="One bit per element and a count sketch of the values (TAGC)."
    )
    density: SkipJsonSchema[float] = Field(0.01, exclude=True, description="Not used: see theta.")
    ratio: Literal[2, 4, 10] = Field(
        4, description="How many times smaller than the values their sketch is."
    )
    theta: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of the elements that a rank does not select; null takes 0.8, 0.9 or "
        "0.9875 by the ratio, or more, so that the selected elements of all ranks fit into the "
        "sketch even if none coincide.",
    )

    value_dtype: Dtype = Field(
        "bf16", description="Type of values sent without a sketch; sketches are always FP32."
    )

    @field_validator("density")
    @classmethod
    def _refuse_density(cls, density: float) -> float:
        raise ValueError(
            "is not a setting of the mode tagc, where a rank selects 1 - theta of the elements; "
            "set theta, or leave it to ratio"
        )

    def zeros(self, peers: int) -> float:
        """Return the share of elements a rank does not select when ``peers`` ranks reduce; see Note
        [Safe loads].
        """
        if self.theta is not None:
            return self.theta
        return max(PAPER_ZEROS[self.ratio], 1 - SAFE_LOAD / (self.ratio * peers))

    def scheduled(self, peers: int) -> Self:
        """Return settings with the density that a rank selects when ``peers`` ranks reduce: the end
        of a warm-up.
        """
        return self.model_copy(update={"density": 1 - self.zeros(peers)})

    def kept_share(self, peers: int) -> float:
        """Return the share that a rank selects, in a warm-up at its begin."""
        return max(1 - self.zeros(peers), self.start_density if self.warmup else 0.0)

    def safe_ratio(self, union: float, width: int) -> int | None:
        """Return the largest known ratio, up to the configured one, to which a row's values can be
        compressed safely.

        Args:
            union: largest possible share of the row's elements that at least one rank has selected.
            width: elements of the row.

        Returns:
            The ratio, or None if values must be sent without a sketch: because the union is too
            dense for any ratio, or the row has fewer than 64 blocks of 1024 elements, so that too
            many blocks would share all three rows.
        """
        if width < LEAST_BLOCKS * BLOCK:
            return None
        return next((r for r in RATIOS if r <= self.ratio and union * r <= SAFE_LOAD), None)

    @staticmethod
    def sketch_rows(width: int, ratio: int) -> int:
        """Return the rows (of 1024 lanes) of the sketch of ``width`` elements."""
        blocks = -(-width // BLOCK)
        return max(LEAST_ROWS, -(-blocks // ratio))

    def peer_bytes(self, widths: Sequence[int], plan: Plan) -> int:
        """Return the bytes of each owner's row, and of the sums sent back unless they stay with the
        owner.

        A row is sent as mask bits, with a sketch or the selected values; sums as mask bits of the
        union, in FP32.
        """
        peers = sync_peers(plan)
        width = sum(widths)
        mask = -(-sum(widths) // 8)
        ratio = self.safe_ratio(self._union(peers), width)
        if ratio is None:
            values = round((1 - self.zeros(peers)) * width) * ITEMSIZES[self.value_dtype]
        else:
            values = self.sketch_rows(width, ratio) * BLOCK * FP32
        back = mask + round(self._union(peers) * width) * FP32 if replicated(plan) else 0
        return (peers - 1) * (mask + values + back)

    def _union(self, peers: int) -> float:
        """Return the share of elements that at least one of ``peers`` ranks selects, if they select
        independently.
        """
        return 1 - self.zeros(peers) ** peers
