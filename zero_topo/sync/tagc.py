# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""TAGC: an exact index and a count sketch of the values, reduced to the owner of each row.

Polyakov, Dukhanov and Spirin, "TAGC: Optimizing Gradient Communication in Distributed Transformer
Training" (EuroMLSys 2025), on the sketch of Note [Count sketch] in
``quant/reference_sparse.py``.

1. Each rank selects the largest elements of its gradient plus residual; the residual keeps the
   rest.
2. A bitmap marks the selected elements, one bit per element. Each row's bits go to the row's owner,
   who ORs them.
3. Owners send all peers the size of their row's union, and all ranks choose one compression ratio
   from these.
4. A count sketch of each row's values goes to the row's owner, who adds the sketches and peels the
   sum.
5. If ranks need more than their own row, owners send the union and its values to all.

Or, not plus
    The paper adds packed bits as integers, since NCCL has no OR. If two ranks select one element,
    the sum carries into the next bit: the next element looks selected, and the element itself does
    not. Here each rank's bits go to the owner unchanged, which costs as many bytes.

Note [Nothing is estimated]
    Whether peeling succeeds depends on the union alone. Elements whose blocks share all three
    places cannot be separated, however empty the sketch is. The owner therefore first peels a test
    sketch of whole numbers, which FP32 adds exactly: an element with a wrong result was not
    reached. Such elements are left out of the sketch, and their values are sent separately. The
    kernel counts them. A result may be right by chance, so the test is repeated with other numbers
    until all are found.

Without a sketch
    The owner has every peer's bits, so values can be sent uncompressed, in order and without
    indices. This is done if the union is too dense for any sketch, or rows are too short for one;
    nothing is padded or sent densely. It even needs fewer bytes: no rank selects more than the
    union, which has 0.57 n / r elements if a sketch is safe, while a sketch has n / r values.
    Sketches save bytes where buffers are added on their way.

Host synchronizations of TAGC
    The host reads all lengths at once, after the bitmap. That is the only synchronization of a step
    without a sketch. The size of a sketch depends on these lengths, and the number of values sent
    separately on the sketch: a step with a sketch needs a second one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from zero_topo.collectives.transport import host_counts
from zero_topo.config.sparse_config import share
from zero_topo.config.tagc_config import TagcSync
from zero_topo.quant import ops
from zero_topo.quant.operands import counted
from zero_topo.quant.reference_sparse import SKETCH_WIDTH
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.masked import packed, unpacked
from zero_topo.sync.selection import (
    Selected,
    added,
    added_rows,
    largest,
    largest_of_each,
    positions,
)
from zero_topo.sync.sparse import Exchange, Report, Run, Sparse, Started, counts_or_flag

logger = logging.getLogger(__name__)

SEED = 0x7A6C
# A place holds 30 blocks on average at most, so sums of whole numbers below this are exact in FP32
PROBE = 1 << 16


@dataclass(frozen=True)
class _Index:
    """The elements that this rank and its peers selected.

    Attributes:
        mask: this rank's selection, bool ``[P, m]``.
        received: each peer's bits for this rank's row, uint8 ``[P, ceil(m / 8)]``.
        union: the OR of these bits, bool ``[m]``.
        bits: the union, packed, uint8 ``[ceil(m / 8)]``.
        counts: by row, the number of elements in its union.
        sizes: by row, the number of elements that this rank selected.
        expected: by peer, the number of elements that it selected in this rank's row.
    """

    mask: Tensor
    received: Tensor
    union: Tensor
    bits: Tensor
    counts: list[int]
    sizes: list[int]
    expected: list[int]


class Tagc(Sparse):
    """Reduces count sketches of the selected elements to the owners of the rows.

    The state counts the steps after a warm-up with less than the configured compression.
    """

    config: TagcSync

    def __init__(self, config: TagcSync, context: SyncContext) -> None:
        super().__init__(config, context)
        self._scheduled = config.scheduled(self.peers.size)

    @property
    def density(self) -> float:
        """The share of elements that a rank selects in this step, ``1 - theta`` after a warm-up."""
        return self._scheduled.density_at(self.steps)

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Reduce a bitmap of all selected elements, then their values: in a sketch unless their
        union is too dense.
        """
        state: int = self._state
        selected = self._largest(total, run)
        index = self._index(selected, run.width)
        # Only what is not zero has a bit: values are sent in the order of the bits.
        selected = selected.non_zero(sum(index.sizes))
        densest = max(index.counts) / run.width
        ratio = self.config.safe_ratio(densest, run.width)
        warming = self.density > self._scheduled.density  # a warm-up is configured to be denser
        fell_back = not warming and ratio != self.config.safe_ratio(0, run.width)
        if fell_back and not state and self.peers.index == 0:
            logger.info(
                "zero_topo: sync tagc: the ranks selected %.4f of a row's elements, too many for a "
                "sketch of %dx; this step %s",
                densest,
                self.config.ratio,
                f"takes {ratio}x" if ratio else "sends values without a sketch",
            )
        stuck: int = 0
        estimated: float | Tensor = 0.0
        if ratio is None:
            selected = selected.rounded(self.dtype)
            row = self._plain(selected, index)
        else:  # sketches and separate values are FP32
            row, stuck, estimated = self._sketched(index, total, ratio)
        report = Report(
            density=len(selected) / len(total),
            union=sum(index.counts) / len(total),
            ratio=float(ratio or 0),  # 0: no sketch
            repeated=float(stuck),
            estimated=estimated,
            fallbacks=float(state + fell_back),
        )
        reduced = self._table_of(row, index)
        return lambda: reduced, Exchange(selected.subtract_from, report, state + fell_back)

    def decided(self, exchanges: Sequence[Exchange]) -> int:
        """Count a step with less than the configured compression in any run."""
        return max(self._state, *(exchange.state or 0 for exchange in exchanges))

    def _largest(self, total: Tensor, run: Run) -> Selected:
        """Select the configured share of all elements, or of each parameter's part of each row."""
        if self.config.select != "parameter":
            return largest(total, share(self.density, len(total)))
        parts, count = self.shares(self.density, self.peers.size, run)
        indices = positions(largest_of_each(total, *parts), count)
        return Selected(indices, total[indices])

    def _index(self, selected: Selected, width: int) -> _Index:
        """Send the bits of every row to its owner; collective, and one host synchronization."""
        size = self.peers.size
        mask = selected.indices.new_zeros(size, width, dtype=torch.bool)
        # A bit for each element, row by row for the owners.
        mask.view(-1)[selected.indices] = selected.values != 0
        received = self.peers.all_to_all(packed(mask))
        masks = unpacked(received, 0, width)
        union = masks.any(dim=0)
        # All counts in one host synchronization, whatever the number of peers.
        counts = self.peers.gather(counts_or_flag(union.sum(), selected.values))
        numbers = self.to_host(counts, mask.sum(dim=1), masks.sum(dim=1))
        lengths = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
        bits = packed(union[None])[0]
        return _Index(mask, received, union, bits, *lengths)

    def _plain(self, rounded: Selected, index: _Index) -> Tensor:
        """Sum the own row without a sketch, FP32 ``[m]``: values are sent in the order of the
        bits.
        """
        width = index.mask.shape[1]
        values = rounded.values.to(self.dtype)
        received = self.peers.begin("all_to_all", values, index.sizes, index.expected).wait()
        places = positions(unpacked(index.received, 0, width).reshape(-1), len(received))
        places %= width
        zeros = partial(received.new_zeros, width, dtype=torch.float32)
        return added(Selected(places, received.float()), zeros)

    def _sketched(self, index: _Index, total: Tensor, ratio: int) -> tuple[Tensor, int, Tensor]:
        """Sum the own row from sketches; also return the number of values sent separately, and of
        estimates.
        """
        size, width = index.mask.shape
        rows = self.config.sketch_rows(width, ratio)
        stuck, counts = self._stuck(index, rows)
        table = torch.where(index.mask, total.view(size, width), 0.0)
        repeated = total.new_zeros(0)
        if any(counts):
            # Each owner names the elements that it cannot recover; their values come without a
            # sketch.
            asked = self.peers.begin("all_gather", stuck.to(torch.int32), counts).wait().long()
            sizes = host_counts(counts).to(total.device, non_blocking=True)
            owners = counted(size, total).repeat_interleave(sizes, output_size=len(asked))
            places = owners * width + asked
            values = table.view(-1)[places]
            table.view(-1)[places] = 0  # peeling could not separate them
            expected = [len(stuck)] * size
            repeated = self.peers.begin("all_to_all", values, counts, expected).wait()
        # A sketch is linear: the sum of the peers' sketches is that of their sum.
        sketches = ops.sketch(table, SEED, rows)
        del table
        summed = added_rows(self.peers.all_to_all(sketches.view(size, -1)))
        inside = index.union.clone()
        inside[stuck] = False
        bits = packed(inside[None])[0]
        own, left = ops.peel(summed.view(rows, SKETCH_WIDTH), bits, SEED, width)
        if any(counts):
            own[stuck] = added_rows(repeated.view(size, -1))
        return own, len(stuck), left

    def _stuck(self, index: _Index, rows: int) -> tuple[Tensor, list[int]]:
        """Return indices in this rank's row, int64, that peeling does not reach, and their number
        in each row.

        Note [Nothing is estimated]. One host synchronization per attempt; all ranks make the same
        number of attempts.
        """
        device = index.bits.device
        width = len(index.union)
        stuck = torch.zeros_like(index.union)
        for attempt in count():
            generator = torch.Generator(device).manual_seed(attempt)
            probe = torch.randint(
                1, PROBE, (width,), generator=generator, dtype=torch.float32, device=device
            )
            # Known numbers at the same places show what peeling will reach.
            probe *= index.union
            peeled, left = ops.peel(ops.sketch(probe, SEED, rows), index.bits, SEED, width)
            stuck |= peeled != probe
            reached = stuck.sum()
            known = torch.where(reached >= left, reached, width + 1)
            counts = self.to_host(self.peers.gather(known))
            if max(counts) <= width:
                break
        return positions(stuck, counts[self.peers.index]), counts

    def _table_of(self, row: Tensor, index: _Index) -> Tensor:
        """Return all rows, FP32 ``[P * m]``, equal on all ranks; or the own row if no others are
        needed.
        """
        if not self.everywhere:
            return row
        masks = unpacked(self.peers.gather(index.bits), 0, len(row))
        values = row[positions(index.union, index.counts[self.peers.index])]
        table = row.new_zeros(index.mask.numel())
        places = positions(masks.reshape(-1), sum(index.counts))
        table[places] = self.peers.begin("all_gather", values, index.counts).wait()
        return table

    def fresh(self) -> int:
        """Return zero fallbacks."""
        return 0

    def save(self, state: int) -> dict[str, Tensor]:
        """Convert the number of fallbacks to a tensor."""
        return {"fallbacks": torch.tensor(state, dtype=torch.int64, device="cpu")}

    def restored(self, saved: Mapping[str, Tensor]) -> int:
        """Read the number of fallbacks from a checkpoint."""
        return int(saved["fallbacks"])


build_mode.register(TagcSync, Tagc)
