# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What all sparse modes share: which elements take part, the residual, when state changes, what the optimizer gets.

Note [A sparse step]
    Let ``g`` be this rank's gradient shard, reduced inside the node, without the loss scale, and ``e`` its residual.
    The mode turns ``a = g + e`` into a sum over the peers, of which it brings to the optimizer what that needs, and
    into a new residual ``e'``, such that nothing is lost: summed over the peers, ``a = u + e'`` element by element,
    where ``u`` is what the owner of the element gets. ``e'`` and the mode's other state (thresholds, regions, counts)
    take effect only when the step is known not to be skipped; until then ``e`` stays as it was. If the run is reopened
    instead, ``e'`` goes back to the gradients. It contains ``e``, so ``e`` is not added again when the run is started
    again in this step.

Note [Not a number]
    A value that is not finite must reach the optimizer, so that DeepSpeed skips the step or reports it: a mode that
    dropped it would train on. NaN counts as the largest value and as above every threshold, so a rank that has values
    that are not finite selects one of them. No mode therefore reads a whole gradient to check it, except a row from
    which a rank selects nothing. Where ranks exchange the counts of their selected elements, such a rank sends -1 in
    place of its counts (:func:`counts_or_flag`): all ranks stop there and write NaN. Where messages have one length,
    the sums contain the value. Under a mask ranks exchange a flag, and the device writes NaN into the sums.

Note [Host synchronizations]
    A host that reads a number of the device waits for all that was queued, and a GPU idles meanwhile. A mode reads what
    it needs in few synchronizations (:meth:`Sparse.to_host`), however many peers there are.

Note [Peers]
    Each rank is one of ``P`` peers that hold the same ``n`` elements of the gradient: row ``p`` of its table ``[P, C]``
    belongs to the optimizer shard of peer ``p``. In plain data parallelism every rank is a peer and all need all rows.

Note [Rounding]
    Where values are sent in 16 bits, a rank's residual keeps what rounding took from its values, and the owner's keeps
    what rounding took from the sums.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.config import DenseSync, SparseSync
from zero_topo.mesh import Route
from zero_topo.quant import ops
from zero_topo.quant.operands import DTYPES, Range, packed_ranges
from zero_topo.sync.base import Parameter, ResidualOwners, SyncContext
from zero_topo.sync.crossing import EXACT, Crossing, spread_back
from zero_topo.sync.dense import Dense
from zero_topo.sync.picks import added_rows, positions, share

Report = Mapping[str, float | Tensor]
"""A mode's numbers of one step; those of the device are read when somebody asks for them."""


class Step(NamedTuple):
    """A step that has been exchanged, all of it finite, and of which is not known yet whether it is skipped.

    Attributes:
        residual: FP32 ``[P * C]``, what this rank did not deliver.
        state: of the mode, from the next step on.
        report: of this step.
        scale: the loss scale of its gradients.
    """

    residual: Tensor
    state: Any
    report: Report
    scale: float


class _NotFiniteError(Exception):
    """Some rank has an element that is not finite; raised on all ranks, at the same host synchronization."""


class Sparse(Crossing):
    """A mode that sends a share of the elements.

    Attributes:
        everywhere: whether ranks need more than their own row.
        numel: ``n``, elements of the table.
        active: whether there is anything to exchange.
        dtype: of values on the wire.
        residual: FP32 ``[P * C]``, or empty without error feedback: what this rank still owes.
    """

    def __init__(self, config: SparseSync, context: SyncContext) -> None:
        self.config = config
        super().__init__(context, EXACT)
        plan = context.plan
        self.dtype = DTYPES[config.value_dtype]
        self.everywhere = plan.optimizer < plan.world_size
        self.waits = config.error_feedback
        self._included = tuple(p for p in context.parameters if takes_part(p, config))
        self._ranges = tuple(p.span for p in self._included)
        self._others = tuple(p.span for p in context.parameters if not takes_part(p, config))
        self._places = packed_ranges(self._ranges)  # their columns of the table
        self._columns = self._places[-1][1] if self._places else 0
        self.numel = self.peers.size * self._columns
        self._dense = Dense(DenseSync(), context)
        self.active = self.peers.size > 1 and self._columns > 0
        shard = context.shard
        # The gradient shard itself, where all of it takes part as it is: it is read without a copy, and takes the sums.
        whole = self._inner is None and not self._others and shard.dtype == torch.float32
        self._in_place = shard.view(-1) if whole and self.numel == shard.numel() else None
        self._offloaded = config.offload_residual and context.device.type != "cpu"
        self.residual = torch.zeros(
            self.numel if self.active and config.error_feedback else 0,
            device="cpu" if self._offloaded else context.device,
            pin_memory=self._offloaded,
        )
        # The counts of :meth:`shares` for one density, on the device: they are the same until the density changes.
        self._shared: tuple[float, Tensor, int] | None = None
        # The last exchange, all of it finite, until `commit` takes it over or drops it, or `reopen` returns its
        # residual to the gradients: a skipped step must leave residual and state as they were.
        self._undecided: Step | None = None
        # Whether `reopen` has put the residual into the gradients, so that the next `start` must not add it again.
        self._residual_added = False
        self._state = self.fresh()
        self._report: Report = {}

    @abstractmethod
    def exchange(self, total: Tensor, state: Any) -> tuple[Tensor, Any, Report]:
        """Reduce over the peers; collective.

        Args:
            total: FP32 ``[P * C]``, gradient plus residual, finite once counts of :func:`counts_or_flag` are read; on
                return the new residual, what this rank did not deliver.
            state: what the mode remembers; must not be changed.

        Returns:
            The sums that this rank needs, FP32: ``[P * C]``, perhaps of :meth:`zeros`, or ``[C]``, the own row, where
            every rank has an optimizer shard of its own; they are used up. Then the state from the next step on, and
            the numbers of this step.
        """

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Exchange what takes part, all of it in one run; the rest is reduced densely, under way when this returns."""
        if self.peers.size == 1:
            return Handle(None, (), lambda: None)
        dense = self._dense.start(shard, self._others, scale) if self._others else None
        if self._columns:
            self._undecided = self._step(shard, scale)
        return Handle(None, (), lambda: None if dense is None else dense.wait())

    def to_host(self, *numbers: Tensor) -> list[Any]:
        """Read numbers of the device on the host: ints if all are; see Note [Host synchronizations].

        Args:
            numbers: of any shape, one after the other; none negative but flags of :func:`counts_or_flag`.
        """
        values: list[Any] = torch.cat([number.view(-1) for number in numbers]).tolist()
        if min(values, default=0) < 0:
            raise _NotFiniteError
        return values

    def _step(self, shard: Tensor, scale: float) -> Step | None:
        total = self._with_residual(shard, scale)
        try:
            if self.steps < self.config.start:  # everything, as before the first sparse step
                reduced, state = self.reduce_rows(total.view(self.peers.size, -1)), self._state
                report: Report = {"density_asked": 1.0, "density": 1.0}
            else:
                reduced, state, report = self.exchanged(total)
        except _NotFiniteError:
            for begin, end in self._ranges:
                shard[:, begin:end] = torch.nan
            return None
        self._deliver(shard, reduced if scale == 1 else reduced.mul_(scale))
        return Step(total, state, report, scale)

    def _with_residual(self, shard: Tensor, scale: float) -> Tensor:
        """Gradient plus residual, FP32 ``[P * C]``, a copy."""
        add_residual = self.residual.numel() and not self._residual_added
        if add_residual and self._in_place is not None and scale == 1 and not self._offloaded:
            return self._in_place + self.residual
        total = self.table(shard, self._ranges).view(-1)
        if scale != 1:
            total /= scale
        return total.add_(self.residual.to(total.device, non_blocking=True)) if add_residual else total

    def zeros(self) -> Tensor:
        """FP32 zeros ``[P * C]`` for the sums, when the gradients are no longer needed."""
        if self._in_place is not None:
            return self._in_place.zero_()
        return torch.zeros(self.numel, device=self.context.device)

    def exchanged(self, total: Tensor) -> tuple[Tensor, Any, Report]:
        """What the mode makes of it; what is not finite is in the sums."""
        return self.exchange(total, self._state)

    @property
    def density(self) -> float:
        """That is asked for in this step."""
        return self.config.density_at(self.steps)

    @property
    def k(self) -> int:
        """Elements that the density means."""
        return share(self.density, self.numel)

    @property
    def since_start(self) -> int:
        """Steps synced since those that reduce everything."""
        return self.steps - self.config.start

    def shares(self, density: float, rows: int) -> tuple[Tensor, int]:
        """Of each parameter's part of so many rows width and count, int64 ``[2, rows * parameters]``; all counts."""
        if self._shared is None or self._shared[0] != density:
            widths = [past - first for first, past in self._places]
            counts = [share(density, width) for width in widths]
            parts = torch.tensor([widths, counts]).to(self.context.device, non_blocking=True).repeat(1, rows)
            self._shared = density, parts, rows * sum(counts)
        return self._shared[1:]

    def reduce_rows(self, packed: Tensor) -> Tensor:
        """Sums over the peers of ``[P, K]`` values, which become what rounding leaves; collective.

        Returns:
            FP32 ``[P * K]``, or of the own row ``[K]``.
        """
        sent = packed.to(self.dtype)
        total = added_rows(self.peers.scatter(sent))
        if self.dtype == packed.dtype:
            packed.zero_()
            return self.peers.gather(total).view(-1) if self.everywhere else total
        packed -= sent
        del sent
        if not self.everywhere:
            return total
        counts_or_flag = total.to(self.dtype)
        packed[self.peers.index] += total - counts_or_flag
        return self.peers.gather(counts_or_flag).float().view(-1)

    def _deliver(self, shard: Tensor, reduced: Tensor) -> None:
        """Put the sums into the shard, and gather them inside the node where its ranks need more rows."""
        own, size = self.peers.index, self.peers.size
        which = slice(None) if self.everywhere else slice(own, own + 1)
        table = reduced.view(-1, self._columns).expand(size, -1)  # the own row at every place, if it is alone
        if reduced.data_ptr() != shard.data_ptr():
            self.deliver(shard, self._ranges, table, which)
        plan = self.context.plan
        if self._inner is not None and plan.optimizer < self._inner.hi:
            within = Route((self.context.mesh.hop(plan.optimizer, self._inner.hi),))
            spread_back(self.context, shard, self._ranges, within, self._dense_wire)

    def reopen(self, shard: Tensor, ranges: Sequence[Range]) -> None:
        """What was delivered stays in the own row; what the mode left goes back to the gradients; see the first note.

        Args:
            shard: as in :meth:`start`.
            ranges: the same.
        """
        super().reopen(shard, ranges)
        step, self._undecided = self._undecided, None
        if step is None:
            return
        rows, left = self.rows(shard), step.residual.view(self.peers.size, -1) * step.scale
        for (begin, end), (first, past) in zip(self._ranges, self._places, strict=True):
            rows[:, begin:end] += left[:, first:past].to(rows.dtype)
        self._residual_added = True

    def commit(self, skipped: bool) -> None:
        """What the mode left, and what it remembers, are in force, or forgotten."""
        super().commit(skipped)
        step, self._undecided, self._residual_added = self._undecided, None, False
        if skipped or step is None:
            return
        if self.residual.numel():
            left = step.residual.view(-1)
            self.residual = self.residual.copy_(left) if self._offloaded else left
        self._state = step.state
        self._report = step.report
        self.steps += 1

    def residual_table(self) -> Tensor:
        """The residual at its place in a gradient shard, FP32 ``[P, F]``: rows and columns as the table's."""
        table = torch.zeros(self.peers.size, self.context.columns, device=self.context.device)
        if self.residual.numel():
            for (begin, end), (first, past) in zip(self._ranges, self._places, strict=True):
                table[:, begin:end] = self.residual.view(self.peers.size, -1)[:, first:past]
        return table

    def residual_rows(self) -> Tensor | None:
        """The residual; None without error feedback."""
        return self.residual.view(self.peers.size, -1) if self.residual.numel() else None

    def residual_owners(self) -> ResidualOwners | None:
        """Owners and columns of the residual; None without error feedback."""
        if not self.residual.numel():
            return None
        places = zip(self._included, self._places, strict=True)
        return ResidualOwners(
            self.members(), {parameter.name: (parameter.numel, *place) for parameter, place in places}
        )

    def report(self) -> dict[str, float]:
        """The mode's numbers of the last step, and the residual's norm."""
        if not self._report:
            return {}
        numbers = {**self._report, "residual_norm": self.residual.norm()}
        return {name: float(number) for name, number in numbers.items()}

    def state_bytes(self) -> int:
        """Bytes on the device: the residual, and what a mode remembers beside it if that is of the gradient's size."""
        return 0 if self._offloaded else self.residual.nbytes

    def tensors(self) -> list[Tensor]:
        """The residual, and what the mode remembers."""
        return [self.residual, *self.save(self._state).values()] if self.active else []

    def state_dict(self) -> dict[str, Tensor]:
        """The residual, the steps, and what the mode remembers."""
        if not self.active:
            return {}
        return {"residual": self.residual, "step": torch.tensor(self.steps), **self.save(self._state)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` holds; refuse other entries or shapes."""
        if not state:
            self.steps = 0
            self.residual.zero_()
            self._state = self.fresh()
            return
        self.check_shapes(state)
        self.residual.copy_(state["residual"])
        self.steps = int(state["step"])
        self._state = self.restored(state)

    def unpacked(self, bits: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        """Bits ``[rows, ceil(C / 8)]`` as bool ``[rows, end - begin]``, all columns by default."""
        end = self._columns if end is None else end
        first, past = begin // 8, -(-end // 8)
        part = bits[:, first:past].contiguous()
        rows = ops.unpack(part.view(-1), 8 * part.numel()).view(len(bits), -1)
        return rows[:, begin - 8 * first : end - 8 * first]

    def fresh(self) -> Any:
        """The state before the first step; None in a mode that remembers nothing but the residual."""
        return None

    def save(self, state: Any) -> dict[str, Tensor]:
        """What the mode remembers, as tensors of fixed shapes."""
        return {}

    def restored(self, saved: Mapping[str, Tensor]) -> Any:
        """The inverse of :meth:`save`."""
        return self.fresh()


class Masked(Sparse):
    """A sparse mode whose mask all peers share: values travel packed, without indices.

    All rows of the mask hold equally many elements, so no lengths travel either.
    """

    def exchanged(self, total: Tensor) -> tuple[Tensor, Any, Report]:
        """What the mode makes of it; NaN if any rank has an element that is not finite, in the mask or not."""
        # Of the least and the largest, which NaN in any element makes NaN: nothing of the gradient's size is made.
        finite = torch.stack(total.aminmax()).isfinite().all()
        reduced, state, report = super().exchanged(total)
        flags = self.peers.gather(finite.to(torch.uint8).view(1))
        reduced.masked_fill_(flags.all().logical_not(), torch.nan)
        return reduced, state, report

    def reduce_masked(self, total: Tensor, mask: Tensor, kept: int) -> Tensor:
        """Sums over the peers of what the mask holds; collective.

        Args:
            total: FP32 ``[P * C]``; what rounding leaves takes the place of what is sent.
            mask: bool ``[P, C]``.
            kept: elements that it holds in each row.

        Returns:
            FP32, zero off the mask: ``[P * C]``, or the own row.
        """
        size, own = self.peers.size, self.peers.index
        if kept == self._columns:
            return self.reduce_rows(total.view(size, kept))
        indices = positions(mask.reshape(-1), size * kept)
        packed = total[indices].view(size, kept)
        sums = self.reduce_rows(packed)
        total[indices] = packed.view(-1)
        if self.everywhere:
            return self.zeros().index_copy_(0, indices, sums)
        places = indices.view(size, kept)[own] - own * self._columns
        return total.new_zeros(self._columns).index_copy_(0, places, sums)


def counts_or_flag(counts: Tensor, *values: Tensor | None) -> Tensor:
    """A step's first counts, or -1 in place of each if a value is not finite, int64; see Note [Not a number].

    Args:
        counts: int64.
        values: contain every value of this rank that is not finite: its picks, and the values it does not pick from.
    """
    ends = [end for part in values if part is not None and len(part) for end in part.aminmax()]
    return torch.where(torch.stack(ends).isfinite().all(), counts, -1) if ends else counts


def takes_part(parameter: Parameter, config: SparseSync) -> bool:
    """Whether a parameter takes part, or is reduced densely."""
    if config.dense_vectors and parameter.dims < 2:
        return False
    fits = any(fnmatchcase(parameter.name, pattern) for pattern in config.include)
    return fits and not any(fnmatchcase(parameter.name, pattern) for pattern in config.exclude)
