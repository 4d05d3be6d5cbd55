# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The base of all sparse modes: which elements take part, the residual, the state, and delivery to the optimizer.

Note [A sparse step]
    Let ``g`` be this rank's gradient shard, reduced inside the node, without the loss scale, and ``e`` its residual.
    The mode splits ``a = g + e`` into the sum ``u`` that the owner of an element receives, and a new residual ``e'``.
    Nothing is lost: summed over the peers, ``a = u + e'`` element by element. ``e'`` and the mode's other state
    (thresholds, regions, counts) take effect only when the step is known not to be skipped; until then ``e`` is
    unchanged. If the run is reopened instead, ``e'`` is added to the gradients. It contains ``e``, so ``e`` is not
    added again when the run is started again in this step.

Note [Not a number]
    A value that is not finite must reach the optimizer, so that DeepSpeed skips the step or reports it: a mode that
    dropped it would train on. NaN counts as the largest value and as above every threshold, so a rank that has values
    that are not finite selects one of them. No mode therefore reads a whole gradient to check it, except a row from
    which a rank selects nothing. Where ranks exchange the counts of their selected elements, such a rank sends -1 in
    place of its counts (:func:`counts_or_flag`): all ranks stop there and write NaN. If packets have a fixed length,
    the sums contain the value. Under a mask ranks exchange a flag, and the device writes NaN into the sums.

Note [Host synchronizations]
    A host that reads a number from the device waits for all queued work, and then the GPU idles. A mode therefore needs
    few synchronizations (:meth:`Sparse.to_host`), independent of the number of peers.

Note [Peers]
    Each rank is one of ``P`` peers that store the same ``n`` gradient elements: row ``p`` of its table ``[P, C]``
    belongs to the optimizer shard of peer ``p``. In plain data parallelism every rank is a peer and all need all rows.

Note [Rounding]
    If values are sent in 16 bits, a rank's residual keeps the rounding errors of its values, and the owner's residual
    keeps those of the sums.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.config import DenseSync
from zero_topo.config.sparse_config import SparseSync
from zero_topo.mesh import Route
from zero_topo.quant import ops
from zero_topo.quant.operands import DTYPES, Range, packed_ranges
from zero_topo.sync.base import Parameter, ResidualOwners, SyncContext
from zero_topo.sync.crossing import EXACT, Crossing, spread_back
from zero_topo.sync.dense import Dense
from zero_topo.sync.picks import added_rows, positions, share

Report = Mapping[str, float | Tensor]
"""A mode's numbers of one step; tensors stay on the device until :meth:`Sparse.report` reads them."""


class Step(NamedTuple):
    """The result of an exchange with finite values, before it is known whether the step is skipped.

    Attributes:
        residual: FP32 ``[P * C]``, the values that this rank did not deliver.
        state: the mode's state from the next step on.
        report: the numbers of this step.
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
        dtype: the dtype in which values are sent.
        residual: FP32 ``[P * C]``; empty without error feedback.
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
        # The gradient shard, if all of it takes part in FP32: it is read without a copy, and receives the sums.
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
        # The last finite exchange, until `commit` applies or drops it, or `reopen` adds its residual to the gradients:
        # a skipped step must leave residual and state unchanged.
        self._undecided: Step | None = None
        # Whether `reopen` has put the residual into the gradients, so that the next `start` must not add it again.
        self._residual_added = False
        self._state = self.fresh()
        self._report: Report = {}

    @abstractmethod
    def exchange(self, total: Tensor, state: Any) -> tuple[Tensor, Any, Report]:
        """Reduce over the peers; collective.

        Args:
            total: gradient plus residual, FP32 ``[P * C]``, finite once counts of :func:`counts_or_flag` are read; on
                return the new residual, the values that this rank did not deliver.
            state: the mode's state, which must not be changed.

        Returns:
            The sums that this rank needs, FP32 ``[P * C]`` (perhaps from :meth:`zeros`), or the own row ``[C]`` if
            optimizer shards are not replicated; the caller overwrites them. Then the state from the next step on, and
            the numbers of this step.
        """

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Exchange the elements that take part, in one run, and begin a dense reduction of all others."""
        if self.peers.size == 1:
            return Handle(None, (), lambda: None)
        dense = self._dense.start(shard, self._others, scale) if self._others else None
        if self._columns:
            self._undecided = self._step(shard, scale)
        return Handle(None, (), lambda: None if dense is None else dense.wait())

    def to_host(self, *numbers: Tensor) -> list[Any]:
        """Read tensors' numbers in one host synchronization, as ints if all are; see Note [Host synchronizations].

        Args:
            numbers: of any shape, concatenated in the result; not negative, except for flags of :func:`counts_or_flag`.
        """
        values: list[Any] = torch.cat([number.view(-1) for number in numbers]).tolist()
        if min(values, default=0) < 0:
            raise _NotFiniteError
        return values

    def _step(self, shard: Tensor, scale: float) -> Step | None:
        total = self._with_residual(shard, scale)
        try:
            if self.steps < self.config.start:  # the first steps reduce all elements
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
        """Return gradient plus residual, FP32 ``[P * C]``, a copy."""
        add_residual = self.residual.numel() and not self._residual_added
        if add_residual and self._in_place is not None and scale == 1 and not self._offloaded:
            return self._in_place + self.residual
        total = self.table(shard, self._ranges).view(-1)
        if scale != 1:
            total /= scale
        return total.add_(self.residual.to(total.device, non_blocking=True)) if add_residual else total

    def zeros(self) -> Tensor:
        """Return FP32 zeros ``[P * C]`` for the sums; this may overwrite the gradients."""
        if self._in_place is not None:
            return self._in_place.zero_()
        return torch.zeros(self.numel, device=self.context.device)

    def exchanged(self, total: Tensor) -> tuple[Tensor, Any, Report]:
        """Call :meth:`exchange` with the mode's state; values that are not finite reach the sums."""
        return self.exchange(total, self._state)

    @property
    def density(self) -> float:
        """The configured density of this step."""
        return self.config.density_at(self.steps)

    @property
    def k(self) -> int:
        """Number of elements of the density."""
        return share(self.density, self.numel)

    @property
    def since_start(self) -> int:
        """Steps synced since the first steps, which reduce all elements; negative during them."""
        return self.steps - self.config.start

    def shares(self, density: float, rows: int) -> tuple[Tensor, int]:
        """Return widths and counts of the parameters' parts of ``rows`` rows, int64 ``[2, parts]``; sum of counts."""
        if self._shared is None or self._shared[0] != density:
            widths = [past - first for first, past in self._places]
            counts = [share(density, width) for width in widths]
            parts = torch.tensor([widths, counts]).to(self.context.device, non_blocking=True).repeat(1, rows)
            self._shared = density, parts, rows * sum(counts)
        return self._shared[1:]

    def reduce_rows(self, packed: Tensor) -> Tensor:
        """Sum values ``[P, K]`` over the peers; collective. ``packed`` is overwritten with the rounding errors.

        Returns:
            FP32 ``[P * K]``, or the own row ``[K]`` if this rank needs no others.
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
        """Write the sums to the shard, and gather them inside the node if its ranks need more rows."""
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
        """Keep the delivered sum in the own row, and add the new residual to the gradients; Note [A sparse step]."""
        super().reopen(shard, ranges)
        step, self._undecided = self._undecided, None
        if step is None:
            return
        rows, left = self.rows(shard), step.residual.view(self.peers.size, -1) * step.scale
        for (begin, end), (first, past) in zip(self._ranges, self._places, strict=True):
            rows[:, begin:end] += left[:, first:past].to(rows.dtype)
        self._residual_added = True

    def commit(self, skipped: bool) -> None:
        """Apply the new residual and state of this step, or drop them if it was skipped."""
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
        """Return the residual in the columns of a gradient shard, FP32 ``[P, F]``, zero in other columns."""
        table = torch.zeros(self.peers.size, self.context.columns, device=self.context.device)
        if self.residual.numel():
            for (begin, end), (first, past) in zip(self._ranges, self._places, strict=True):
                table[:, begin:end] = self.residual.view(self.peers.size, -1)[:, first:past]
        return table

    def residual_rows(self) -> Tensor | None:
        """Return a view of the residual ``[P, C]``; None without error feedback."""
        return self.residual.view(self.peers.size, -1) if self.residual.numel() else None

    def residual_owners(self) -> ResidualOwners | None:
        """Return owners and columns of the residual; None without error feedback."""
        if not self.residual.numel():
            return None
        places = zip(self._included, self._places, strict=True)
        return ResidualOwners(
            self.members(), {parameter.name: (parameter.numel, *place) for parameter, place in places}
        )

    def report(self) -> dict[str, float]:
        """Return the mode's numbers of the last step, and the residual's norm."""
        if not self._report:
            return {}
        numbers = {**self._report, "residual_norm": self.residual.norm()}
        return {name: float(number) for name, number in numbers.items()}

    def state_bytes(self) -> int:
        """Return the bytes on the device: of the residual, and of other state of the gradient's size."""
        return 0 if self._offloaded else self.residual.nbytes

    def tensors(self) -> list[Tensor]:
        """Return the residual, and the mode's other state."""
        return [self.residual, *self.save(self._state).values()] if self.active else []

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residual, the step count, and the mode's other state."""
        if not self.active:
            return {}
        return {"residual": self.residual, "step": torch.tensor(self.steps), **self.save(self._state)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict`; raise ValueError for other entries or shapes."""
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
        """Unpack bits ``[rows, ceil(C / 8)]`` to bool ``[rows, end - begin]``, all columns by default."""
        end = self._columns if end is None else end
        first, past = begin // 8, -(-end // 8)
        part = bits[:, first:past].contiguous()
        rows = ops.unpack(part.view(-1), 8 * part.numel()).view(len(bits), -1)
        return rows[:, begin - 8 * first : end - 8 * first]

    def fresh(self) -> Any:
        """Return the state before the first step; None in a mode without state besides the residual."""
        return None

    def save(self, state: Any) -> dict[str, Tensor]:
        """Convert the mode's state to tensors of fixed shapes."""
        return {}

    def restored(self, saved: Mapping[str, Tensor]) -> Any:
        """Invert :meth:`save`."""
        return self.fresh()


class Masked(Sparse):
    """A sparse mode with a mask that all peers share: values are sent packed, without indices.

    All rows of the mask have equally many elements, so no lengths are sent either.
    """

    def exchanged(self, total: Tensor) -> tuple[Tensor, Any, Report]:
        """Call :meth:`exchange`; all sums are NaN if any rank has an element that is not finite, masked or not."""
        # Minimum and maximum are NaN if any element is: this needs no temporary of the gradient's size.
        finite = torch.stack(total.aminmax()).isfinite().all()
        reduced, state, report = super().exchanged(total)
        flags = self.peers.gather(finite.to(torch.uint8).view(1))
        reduced.masked_fill_(flags.all().logical_not(), torch.nan)
        return reduced, state, report

    def reduce_masked(self, total: Tensor, mask: Tensor, kept: int) -> Tensor:
        """Sum the masked elements over the peers; collective.

        Args:
            total: FP32 ``[P * C]``; sent elements are overwritten with their rounding errors.
            mask: bool ``[P, C]``.
            kept: number of elements that are set in each row of the mask.

        Returns:
            FP32, zero off the mask: ``[P * C]``, or the own row ``[C]`` if this rank needs no others.
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
    """Return a step's first counts, or -1 for each if a value is not finite, int64; see Note [Not a number].

    Args:
        counts: int64.
        values: the values to check: this rank's selected elements, and values from which it does not select.
    """
    ends = [end for part in values if part is not None and len(part) for end in part.aminmax()]
    return torch.where(torch.stack(ends).isfinite().all(), counts, -1) if ends else counts


def takes_part(parameter: Parameter, config: SparseSync) -> bool:
    """Return whether a parameter takes part in sparse sync; others are reduced densely."""
    if config.dense_vectors and parameter.dims < 2:
        return False
    fits = any(fnmatchcase(parameter.name, pattern) for pattern in config.include)
    return fits and not any(fnmatchcase(parameter.name, pattern) for pattern in config.exclude)
