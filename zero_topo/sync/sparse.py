# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The base of all sparse modes: which elements take part, the residual, the state, and delivery to
the optimizer.

Note [A sparse step]
    Parameters are exchanged in runs, each as soon as its gradients are final
    (``engine/gradients.py``). Let ``g`` be this rank's gradients of a run, reduced inside the node,
    without the loss scale, and ``e`` their residual. The mode splits ``a = g + e`` into the sum
    ``u`` that the owner of an element receives, and a new residual ``e'``. Nothing is
    lost: summed over the peers, ``a = u + e'`` element by element.

Note [Nothing is written before the step is decided]
    ``g`` stays in the gradient shard and ``e`` in the residual until it is known whether the step
    is skipped. A run keeps only what it sent, and a copy of those rows of ``g`` that the sums
    overwrite. :meth:`Sparse.commit` then adds ``g`` to the residual, which is ``a`` again with the
    same bits, and subtracts what was sent: run by run, in place. If the step is skipped, these
    records are dropped. If a run is reopened, ``e'`` is added to the gradients. It contains ``e``,
    so ``e`` is not added again when the run is started again in this step. Sums inside a node
    replace the gradients in the shard, in its dtype, because :meth:`Sparse.commit` cannot reduce
    them again.

Note [Not a number]
    A value that is not finite must reach the optimizer, so that DeepSpeed skips the step or reports
    it: a mode that dropped it would train on. NaN counts as the largest value and as above every
    threshold, so a rank that has values that are not finite selects one of them. No mode therefore
    reads a whole gradient to check it, except a row from which a rank selects nothing. Where ranks
    exchange the counts of their selected elements, such a rank sends -1 in place of its counts
    (:func:`counts_or_flag`): all ranks stop there and write NaN. If packets have a fixed length,
    the sums contain the value. Under a mask the device writes NaN into the first value for each
    owner.

Note [Host synchronizations]
    A host that reads a number from the device waits for all queued work, and then the GPU idles. A
    mode therefore needs few synchronizations (:meth:`Sparse.to_host`), independent of the number of
    peers.

Peers
    Each rank is one of ``P`` peers that store the same ``n`` gradient elements: row ``p`` of its
    table ``[P, C]`` belongs to the optimizer shard of peer ``p``. In plain data parallelism every
    rank is a peer and all need all rows.

Note [Rounding]
    If values are sent in 16 bits, a rank's residual keeps the rounding errors of its values, and
    the owner's residual keeps those of the sums.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import filterfalse
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.config import DenseSync
from zero_topo.config.sparse_config import SparseSync, share
from zero_topo.mesh import Hierarchy
from zero_topo.quant.operands import DTYPES, Range, merged, packed_ranges
from zero_topo.quant.ops import cast_to, quantize
from zero_topo.sync.base import Parameter, ResidualOwners, SyncContext
from zero_topo.sync.crossing import EXACT, Crossing, spread_back
from zero_topo.sync.dense import Dense
from zero_topo.sync.selection import added_rows

Report = dict[str, float | Tensor]
"""A mode's numbers of one run; tensors stay on the device until :meth:`Sparse.report` reads
them.
"""
Finish = Callable[[], Tensor]
"""Waits for a run's collectives and returns the sums that this rank needs: FP32 ``[P * m]``, or the
own row ``[m]``.
"""
Started = tuple[Finish, "Exchange"]
"""The function that ends a run's exchange, and the record for :meth:`Sparse.commit`."""


class Run(NamedTuple):
    """The parameters that are exchanged together.

    Attributes:
        number: its position in the order of columns.
        ranges: columns in the gradient shard of the parameters that take part.
        others: columns of the parameters that do not; they are reduced densely.
        first: the position of its first parameter among all that take part.
        low, past: its columns in the residual, which are adjacent.
        width: ``m``, their number.
    """

    number: int
    ranges: tuple[Range, ...]
    others: tuple[Range, ...]
    first: int
    low: int
    past: int
    width: int


@dataclass
class Exchange:
    """A run's exchange from its start until it is known whether the step is skipped.

    Attributes:
        settle: turns gradient plus residual, FP32 ``[P * m]``, into the new residual, in place.
        report: the numbers of this run, complete after the exchange.
        state: the mode's state from the next step on, in modes whose state depends on an exchange.
        settles_own_row: whether ``settle`` overwrites the own row, so that its gradients need not
            be kept.
        scale: the loss scale of the gradients.
        replaced: the gradients that the sums overwrote, ``[rows, m]`` in the dtype of the shard;
            None if not needed.
    """

    settle: Callable[[Tensor], None]
    report: Report
    state: Any = None
    settles_own_row: bool = False
    scale: float = 1.0
    replaced: Tensor | None = None


class _NotFiniteError(Exception):
    """Some rank has an element that is not finite; raised on all ranks, at the same host
    synchronization.
    """


class Sparse(Crossing):
    """A mode that sends a share of the elements.

    Attributes:
        everywhere: whether ranks need more than their own row.
        numel: ``n``, elements of the table.
        active: whether there is anything to exchange.
        dtype: the dtype in which values are sent.
        residual: FP32 ``[P * C]``, the table ``[P, m]`` of one run after the other; empty without
            error feedback.
    """

    def __init__(self, config: SparseSync, context: SyncContext) -> None:
        self.config = config
        super().__init__(context, EXACT)
        plan = context.plan
        self.dtype = DTYPES[config.value_dtype]
        self.everywhere = plan.optimizer < plan.world_size
        self.waits = config.error_feedback
        self._included = tuple(p for p in context.parameters if takes_part(p, config))
        # Their columns of the table
        self._places = packed_ranges([p.shard_range for p in self._included])
        self._columns = self._places[-1][1] if self._places else 0
        self.numel = self.peers.size * self._columns
        self.runs = self._build_runs()
        self._dense = Dense(DenseSync(), context)
        self.active = self.peers.size > 1 and self._columns > 0
        self.residual = torch.zeros(
            self.numel if self.active and config.error_feedback else 0,
            dtype=torch.float32,
            device=context.device,
        )
        self._shard_cast = cast_to(context.shard.dtype)
        # By run, the counts of :meth:`shares` for one density, on the device.
        self._shared: dict[int, tuple[float, Tensor, int]] = {}
        # By run, the exchange of this step if its values are finite, until `commit` applies or
        # drops it, or `reopen` adds the new residual to the gradients: a skipped step must leave
        # residual and state unchanged.
        self._exchanges: dict[int, Exchange] = {}
        # Runs whose gradients contain the residual because of `reopen`: the next `start` must not
        # add it again.
        self._reopened: set[int] = set()
        self._state = self.fresh()
        # The reports of the last step's runs, each with the run's share of all elements.
        self._reports: list[tuple[float, Report]] = []

    def _build_runs(self) -> dict[tuple[Range, ...], Run]:
        """Return the runs of the engine, by the ranges for which it calls :meth:`start`."""
        runs = {}
        first = 0
        low = 0
        included = {p.shard_range for p in self._included}
        for number, shard_ranges in enumerate(self.context.runs):
            ranges = tuple(filter(included.__contains__, shard_ranges))
            others = tuple(filterfalse(included.__contains__, shard_ranges))
            width = sum(end - begin for begin, end in ranges)
            runs[shard_ranges] = Run(number, ranges, others, first, low, low + width, width)
            first += len(ranges)
            low += width
        return runs

    @abstractmethod
    def exchange(self, total: Tensor, run: Run) -> Started:
        """Begin to reduce a run over the peers; collective.

        Args:
            total: gradient plus residual, FP32 ``[P * m]``, finite once counts of
                :func:`counts_or_flag` are read. The mode may overwrite it.
            run: the run; the mode must not change its state.

        Returns:
            The function that ends the exchange, and the record for :meth:`commit`.
        """

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Begin to exchange the elements of a run that take part, and a dense reduction of all
        others.
        """
        if self.peers.size == 1:
            return Handle()
        run = self.runs[tuple(ranges)]
        # Both begin before either is waited for, in this order on every rank.
        dense = self._dense.start(shard, run.others, scale) if run.others else None
        end = self._begin(shard, run, scale) if run.width else None

        def finish(_: None) -> None:
            if dense is not None:
                dense.wait()
            if end is not None:
                end()

        return Handle().then(finish)

    def _begin(self, shard: Tensor, run: Run, scale: float) -> Callable[[], None]:
        """Begin the exchange of a run; return the function that ends it. Where values are not
        finite, all are NaN.
        """
        # The first steps, in which gradients change fast, send every element.
        exchange_of = self._exchange_all if self.since_start < 0 else self.exchange
        try:
            finish, exchange = exchange_of(self._total(shard, run, scale), run)
        # All ranks stop here together: they read the same flags.
        except _NotFiniteError:
            for begin, past in run.ranges:
                shard[:, begin:past] = torch.nan
            # With other ranks of the node, whose peers may have no NaN
            return partial(self._spread_inside, shard, run)
        exchange.scale = scale
        self._exchanges[run.number] = exchange

        def end() -> None:
            reduced = finish()
            if scale != 1:
                reduced *= scale
            self._deliver(shard, run, exchange, reduced)

        return end

    def _total(self, shard: Tensor, run: Run, scale: float) -> Tensor:
        """Return gradient plus residual, FP32 ``[P * m]``, a copy."""
        table = self.table(shard, run.ranges)
        if self._inner is not None:  # `commit` reads the sums of the node again
            self.deliver(shard, run.ranges, table, slice(None))
            table = table if shard.dtype == table.dtype else self.columns(shard, run.ranges)
        return self._with_residual(table, run, scale).view(-1)

    def _exchange_all(self, total: Tensor, run: Run) -> Started:
        """Begin an exchange of all elements, as in the first steps."""
        shape = self.peers.size, run.width
        finish, settle = self.reduce_rows(total.view(shape))
        return finish, Exchange(lambda again: settle(again.view(shape)), {"density": 1.0})

    def to_host(self, *numbers: Tensor) -> list[Any]:
        """Read tensors' numbers in one host synchronization, as ints if all are; see Note [Host
        synchronizations].

        Args:
            numbers: of any shape, concatenated in the result; not negative, except for flags of
                :func:`counts_or_flag`.
        """
        values: list[Any] = torch.cat([number.view(-1) for number in numbers]).tolist()
        if min(values, default=0) < 0:
            raise _NotFiniteError
        return values

    def _with_residual(self, table: Tensor, run: Run, scale: float) -> Tensor:
        """Divide a run's gradients ``[P, m]`` by the loss scale and add the residual, in place."""
        if scale != 1:
            table /= scale
        if self.residual.numel() and run.number not in self._reopened:
            # From the host without waiting; the stream orders the copy before the sum.
            table += self._residual_of(run)
        return table

    def _residual_of(self, run: Run) -> Tensor:
        """Return a view of a run's residual ``[P, m]``."""
        size = self.peers.size
        return self.residual[size * run.low : size * run.past].view(size, run.width)

    @property
    def density(self) -> float:
        """The configured density of this step."""
        return self.config.density_at(self.steps)

    @property
    def since_start(self) -> int:
        """Steps synced since the first steps, which reduce all elements; negative during them."""
        return self.steps - self.config.start

    def shares(self, density: float, rows: int, run: Run) -> tuple[Tensor, int]:
        """Return widths and counts of the parameters' parts of ``rows`` rows, int64 ``[2, parts]``;
        sum of counts.
        """
        shared = self._shared.get(run.number)
        if shared is None or shared[0] != density:
            widths = [past - first for first, past in run.ranges]
            counts = [share(density, width) for width in widths]
            parts = torch.tensor([widths, counts], dtype=torch.int64, device="cpu")
            # Counts are copied to the device once a density, not in each step.
            parts = parts.to(self.context.device, non_blocking=True).repeat(1, rows)
            shared = self._shared[run.number] = density, parts, rows * sum(counts)
        return shared[1:]

    def reduce_rows(self, packed: Tensor) -> tuple[Finish, Callable[[Tensor], None]]:
        """Begin to sum values ``[P, K]`` over the peers; collective.

        Returns:
            The function that ends it, with the result FP32 ``[P * K]``, or the own row ``[K]`` if
            this rank needs no others; and a function that turns the values, given again, into their
            rounding errors, in place.
        """
        # One all-to-all of rows; `finish` waits for it.
        received = self.peers.begin("all_to_all", packed.to(self.dtype))
        own = self.peers.index
        rounds = self.dtype != packed.dtype
        errors: list[Tensor] = []  # of the sums of the own row

        def finish() -> Tensor:
            total = added_rows(received.wait())
            if not self.everywhere:
                return total
            rounded = total.to(self.dtype)
            if rounds:
                # What rounding takes from the sums the owner keeps: the others have the rounded
                # ones.
                errors.append(total - rounded)
            return self.peers.gather(rounded).float().view(-1)

        def settle(packed: Tensor) -> None:
            packed -= packed.to(self.dtype)
            for error in errors:
                packed[own] += error

        return finish, settle

    @property
    def _delivered(self) -> slice:
        """The rows of the table that the sums overwrite."""
        own = self.peers.index
        return slice(None) if self.everywhere else slice(own, own + 1)

    def _deliver(self, shard: Tensor, run: Run, exchange: Exchange, reduced: Tensor) -> None:
        """Write the sums to the shard."""
        which = self._delivered
        if self.everywhere or not exchange.settles_own_row:
            rows = self.rows(shard)[which, None]
            replaced = shard.new_empty(len(rows), run.width)
            # One launch copies all ranges.
            views = self.context.views(rows, run.ranges)
            quantize(views, self._shard_cast, replaced.view(torch.uint8))
            exchange.replaced = replaced
        # The own row stands at every place, if it is alone.
        table = reduced.view(-1, run.width).expand(self.peers.size, -1)
        self.deliver(shard, run.ranges, table, which)
        self._spread_inside(shard, run)

    def _spread_inside(self, shard: Tensor, run: Run) -> None:
        """Gather the sums inside the node if its ranks need more rows; collective there."""
        plan = self.context.plan
        if self._inner is not None and plan.optimizer < self._inner.hi:
            group = self.context.mesh.group(plan.optimizer, self._inner.hi)
            within = Hierarchy((group,)).metered("sync")
            back = spread_back(self.context, shard, run.ranges, within, self._dense_wire)
            if back is not None:
                back.wait()

    def _settle(self, run: Run, exchange: Exchange, left: Tensor) -> Tensor:
        """Turn a run's residual ``[P, m]`` into the new one; Note [Nothing is written before the
        step is decided].

        Args:
            run: the run.
            exchange: what it sent.
            left: the residual, changed in place, or a copy of it.
        """
        if run.number in self._reopened:
            # Its residual is in the gradients since `reopen`, and must not count twice.
            left.zero_()
        shard = self.context.shard
        shard_ranges = merged(run.ranges)
        # One range whose gradients are all in place: no copy of them is needed.
        if len(shard_ranges) == 1 and exchange.replaced is None and exchange.scale == 1:
            left += self.rows(shard)[:, slice(*shard_ranges[0])]
        else:
            table = self.columns(shard, run.ranges)
            if exchange.replaced is not None:
                # Rows that the sums overwrote, as they were.
                table[self._delivered] = exchange.replaced
            if exchange.scale != 1:
                table /= exchange.scale
            left += table
        exchange.settle(left.view(-1))
        return left

    def _zeros(self, columns: int) -> Tensor:
        """Return a table of zeros, FP32 ``[P, columns]``."""
        return self.context.shard.new_zeros(self.peers.size, columns, dtype=torch.float32)

    def reopen(self, shard: Tensor, ranges: Sequence[Range]) -> None:
        """Keep the delivered sum in the own row, and add the new residual to the gradients; Note [A
        sparse step].
        """
        run = self.runs[tuple(ranges)]
        exchange = self._exchanges.pop(run.number, None)
        if exchange is not None:
            kept = self._zeros(run.width)
            if self.residual.numel():
                kept.copy_(self._residual_of(run))
            left = self._settle(run, exchange, kept)
            left *= exchange.scale
        super().reopen(shard, ranges)
        if exchange is None:
            return
        rows = self.rows(shard)
        places = packed_ranges(run.ranges)
        for (begin, end), (first, past) in zip(run.ranges, places, strict=True):
            rows[:, begin:end] += left[:, first:past].to(rows.dtype)
        self._reopened.add(run.number)

    def commit(self, skipped: bool) -> None:
        """Apply the new residual and state of this step, or drop them if it was skipped."""
        exchanges = self._exchanges
        self._exchanges = {}
        if exchanges and not skipped:
            runs = [run for run in self.runs.values() if run.number in exchanges]
            ordered = [exchanges[run.number] for run in runs]
            self._reports = []
            for run, exchange in zip(runs, ordered, strict=True):
                if self.residual.numel():
                    self._settle(run, exchange, self._residual_of(run))
                report: Report = {"density_asked": self.density, **exchange.report}
                self._reports.append((run.width / self._columns, report))
            self._state = self.decided(ordered)
            self.steps += 1
        self._reopened.clear()
        super().commit(skipped)

    def decided(self, exchanges: Sequence[Exchange]) -> Any:
        """Return the mode's state after a step that was not skipped: by default that of its last
        exchange, if any.
        """
        state = exchanges[-1].state
        return self._state if state is None else state

    def residual_rows(self) -> Tensor | None:
        """Return a copy of the residual ``[P, C]`` in the host's memory; None without error
        feedback.
        """
        if not self.residual.numel():
            return None
        columns = [self._residual_of(run).cpu() for run in self.runs.values()]
        return torch.cat(columns, dim=1)

    def store_residual(self, rows: Tensor) -> None:
        """Invert :meth:`residual_rows`."""
        for run in self.runs.values():
            self._residual_of(run).copy_(rows[:, run.low : run.past])

    def residual_owners(self) -> ResidualOwners | None:
        """Return owners and columns of the residual; None without error feedback."""
        if not self.residual.numel():
            return None
        places = zip(self._included, self._places, strict=True)
        columns = {parameter.name: (parameter.numel, *place) for parameter, place in places}
        return ResidualOwners(self.members(), columns)

    def report(self) -> dict[str, float]:
        """Return the mode's numbers of the last step, each the mean over its runs, and the
        residual's norm.

        The host reads all of them in one synchronization.
        """
        if not self._reports:
            return {}
        numbers = [number for _, report in self._reports for number in report.values()]
        numbers.append(self.residual.norm())
        # Some modes count in tensors of one element, others in scalars.
        # In FP64, so that counts stay exact.
        scalars = [
            number.to(self.context.device, torch.float64).reshape(())
            for number in numbers
            if isinstance(number, Tensor)
        ]
        *read, norm = torch.stack(scalars).tolist()
        values = iter(read)
        means: dict[str, float] = {}
        for part, report in self._reports:
            for name, number in report.items():
                value = next(values) if isinstance(number, Tensor) else number
                means[name] = means.get(name, 0.0) + part * value
        return {**means, "residual_norm": norm}

    def state_bytes(self) -> int:
        """Return the bytes on the device: of the residual, and of other state of the gradient's
        size.
        """
        return self.residual.nbytes

    def tensors(self) -> list[Tensor]:
        """Return the residual, and the mode's other state."""
        return [self.residual, *self.save(self._state).values()] if self.active else []

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residual, the step count, and the mode's other state."""
        rows = self.residual_rows()
        return self._entries() if rows is None else self._entries() | {"residual": rows.view(-1)}

    def _entries(self) -> dict[str, Tensor]:
        """Return :meth:`state_dict` without a copy of the residual, whose elements are in the order
        of the runs.
        """
        if not self.active:
            return {}
        step = torch.tensor(self.steps, dtype=torch.int64, device="cpu")
        return {"residual": self.residual, "step": step, **self.save(self._state)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict`; raise ValueError for other entries or shapes."""
        if not state:
            self.steps = 0
            self.residual.zero_()
            self._state = self.fresh()
            return
        self.check_shapes(state, self._entries())
        if self.residual.numel():
            self.store_residual(state["residual"].view(self.peers.size, -1))
        self.steps = int(state["step"])
        self._state = self.restored(state)

    def fresh(self) -> Any:
        """Return the state before the first step; None in a mode without state besides the
        residual.
        """
        return None

    def save(self, state: Any) -> dict[str, Tensor]:
        """Convert the mode's state to tensors of fixed shapes."""
        return {}

    def restored(self, saved: Mapping[str, Tensor]) -> Any:
        """Invert :meth:`save`."""
        return self.fresh()


def counts_or_flag(counts: Tensor, *values: Tensor | None) -> Tensor:
    """Return a step's first counts, or -1 for each if a value is not finite, int64; see Note [Not a
    number].

    Args:
        counts: int64.
        values: the values to check: this rank's selected elements, and values from which it does
            not select.
    """
    ends = [end for part in values if part is not None and len(part) for end in part.aminmax()]
    if not ends:
        return counts
    finite = torch.stack(ends).isfinite().all()
    return torch.where(finite, counts, -1)


def takes_part(parameter: Parameter, config: SparseSync) -> bool:
    """Return whether a parameter takes part in sparse sync; others are reduced densely."""
    if parameter.dims < 2:
        return False
    return not any(fnmatchcase(parameter.name, pattern) for pattern in config.EXCLUDED)
