# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes the bytes one rank sends in an optimizer step: exactly, as the meter counts them, and in
the paper's units.

Note [What counts as sent]
    A rank that takes part in a collective of ``d`` ranks with a message of ``b`` bytes sends
    ``(d - 1) * b``: the volume of any bandwidth-optimal all-gather, reduce-scatter or all-to-all.
    Every rank sends the same. Bytes are counted under the smallest domain that contains the
    collective's group, so "world" is what crosses nodes.

Note [Sizes]
    ``N`` ranks; a parameter of ``m`` elements is padded to ``N * n`` with ``n = ceil(m / N)``;
    ``F`` is the sum of all ``n``. A rank's shard of degree ``d`` holds ``N / d * n`` elements of
    it. No block holds values of two parameters: a gather sends one message per parameter; a scatter
    sends one per bucket and destination, in which the concatenated rows of each parameter are
    padded to whole blocks; sync and publish send one per run of parameters (``packed_runs``), in
    which each row of each parameter is padded. Unquantized values are not padded. INT8 weights are
    gathered as they are stored, rows padded to whole blocks. Publish packs them into separate runs,
    after one message with the number of blocks of each run that are sent whole. Hierarchical
    collectives (``plan.py``) forward messages unchanged.

Note [Expected changes]
    The bytes of a publish depend on which INT8 weights change (``quant/spec.py``), hence on the
    data. In a matrix whose weights have the standard deviation ``sigma``, the share
    ``7.4 lr / sigma`` of the INT8 weights changes in a step of Adam: a scale is about
    ``.0245 sigma``, an update ``.18 lr``. A hundredth is taken for ``lr / sigma``, for example 1e-4
    to .01, which describes the second half of a training. Changes are taken to be independent of
    each other, so the number of changes of a tile is binomial. Of blocks of 256, 0.15% are then
    sent whole, and no tile has a change larger than 1 (measured over 600 steps of a small model;
    where more than an eighth of the weights changes, both grow quickly).

Source: "Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning", Table
VII and section III.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import compress
from math import ceil, comb
from typing import Any, TypeVar

from zero_topo.config import ResolvedConfig
from zero_topo.config.sync_config import Move, gather_moves, reduce_moves, rows_message
from zero_topo.plan import Phase, Plan, coded_params, packed_runs
from zero_topo.quant.spec import BlockSpec, ChangeSpec

Key = tuple[str, str]
Moves = Sequence[Move]
Collectives = tuple[Phase, int, Moves]
"""Phase, how many times in a step, and what a rank sends each time."""
T = TypeVar("T")
# Per run: its blocks sent whole and its bytes of changes, which all ranks receive before its buffer
COUNT_BYTES = 16
LOWERED = 2  # bytes of an element in a lower dtype of `torch_autocast`
CHANGED = 0.074  # share of INT8 weights that change in a step
SENT_WHOLE = 0.00148  # share of blocks that are then sent whole


@dataclass(frozen=True)
class Workload:
    """Describes a model and a step, as far as bytes depend on them.

    Attributes:
        numels: elements of each parameter.
        dims: dimensions of the shape of each.
        persistent: for each parameter, whether it is a persistent parameter, unsharded between
            steps (DeepSpeed's ``stage3_param_persistence_threshold``): it is gathered once per
            step, unquantized, after publish.
        itemsize: bytes per weight as stored.
        micro_batches: forward and backward passes per optimizer step (``K``).
        scatter_itemsize: bytes per gradient in an unquantized scatter, which is of one bucket.
        sync_itemsize: bytes per gradient in a dense sync.
        run_numel: parameter elements that one collective of sync or publish carries; None is all of
            them.
        published: bytes of every rank's message in each run of a publish of INT8 weights; empty
            expects those of :func:`change_bytes`.
        loss_scaled: whether a loss scaler may skip steps (FP16).
        frozen: the parameters that no optimizer updates, which are only gathered; None if there are
            none.
        trains: whether a step has backward passes and an update; else it is one forward pass.
        whole: for each parameter, whether its update is Muon's, for which whole matrices are
            exchanged; empty if none.
        lowered: for each parameter, whether ``torch_autocast`` sends it in :data:`LOWERED` bytes;
            empty if none.
    """

    numels: tuple[int, ...]
    dims: tuple[int, ...]
    persistent: tuple[bool, ...]
    itemsize: int
    micro_batches: int
    scatter_itemsize: int
    sync_itemsize: int
    run_numel: int | None = None
    published: tuple[int, ...] = ()
    loss_scaled: bool = False
    frozen: Workload | None = None
    trains: bool = True
    whole: tuple[bool, ...] = ()
    lowered: tuple[bool, ...] = ()

    @classmethod
    def uniform(
        cls,
        numels: Iterable[int],
        itemsize: int = 2,
        micro_batches: int = 1,
        dims: Iterable[int] | None = None,
    ) -> Workload:
        """Build a model whose weights and gradients are sent in ``itemsize`` bytes, without
        persistent parameters.

        All are matrices unless ``dims`` says otherwise.
        """
        sizes = tuple(numels)
        shapes = (2,) * len(sizes) if dims is None else tuple(dims)
        kept = (False,) * len(sizes)
        return cls(sizes, shapes, kept, itemsize, micro_batches, itemsize, itemsize)

    def of_muon(self) -> tuple[int, ...]:
        """Return the elements of each parameter whose update is Muon's."""
        return tuple(numel for numel, whole in zip(self.numels, self.whole, strict=False) if whole)

    def by_itemsize(self, usual: int) -> list[tuple[int, Sequence[int]]]:
        """Return the parameters that share a collective, each group with the bytes that an
        unquantized element has there.

        Args:
            usual: the bytes where ``torch_autocast`` sends no lower dtype.
        """
        param_indices = range(len(self.numels))
        if not self.lowered:
            return [(usual, param_indices)] if self.numels else []
        found: list[tuple[int, Sequence[int]]] = []
        for lower in sorted({*self.lowered}):
            part = [
                param_index for param_index in param_indices if self.lowered[param_index] is lower
            ]
            found.append((LOWERED if lower else usual, part))
        return found

    @cached_property
    def params(self) -> int:
        """Elements of all parameters."""
        return sum(self.numels)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(self.numels, default=0)

    @cached_property
    def _known(self) -> dict[object, Any]:
        """What :meth:`once` has computed, by key."""
        return {}

    def once(self, key: object, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returned for a key when it was first asked for.

        The rule prices dozens of plans of one model: most of them ask for the same shards, and a
        model may have tens of thousands of parameters.
        """
        if key not in self._known:
            self._known[key] = compute()
        found: T = self._known[key]
        return found

    def shards(self, plan: Plan) -> Sequence[int]:
        """Return the elements of a world shard of each parameter."""
        return self.once(plan.world_size, lambda: tuple(map(plan.shard_numel, self.numels)))

    def columns(self, plan: Plan) -> int:
        """Return the elements of a world shard of all parameters."""
        return self.once(("columns", plan.world_size), lambda: sum(self.shards(plan)))

    def coded(self, config: ResolvedConfig) -> tuple[bool, ...]:
        """Return for each parameter whether it is stored as INT8."""
        plan = config.plan
        spec = config.resident_spec
        if spec is None:
            return (False,) * len(self.numels)
        size = spec.block_size
        return self.once(
            ("coded", plan.world_size, size),
            lambda: coded_params(plan, self.numels, self.dims, self.persistent, size),
        )


def step_bytes(config: ResolvedConfig, work: Workload) -> dict[Key, int]:
    """Return the bytes one rank sends per optimizer step, as the meter counts them (for Muon: on
    average).

    Args:
        config: plan and wire formats.
        work: the model and the step.

    Returns:
        ``(phase, domain) -> bytes``; entries of zero bytes are left out. See Note [What counts as
        sent].
    """
    sent: Counter[Key] = Counter()
    for phase, times, moves in collectives(config, work):
        for move in moves:
            sent[phase, config.topology.domain(move.hi)] += times * move.sent
    return {key: nbytes for key, nbytes in sent.items() if nbytes}


def collectives(config: ResolvedConfig, work: Workload) -> Iterator[Collectives]:
    """Yield the collectives of an optimizer step."""
    plan = config.plan
    coded = work.coded(config)
    trained = list(zip(work.shards(plan), coded, strict=True))

    def of(phase: Phase, part: Iterable[int], itemsize: int, message: int | None = None) -> Moves:
        shards = [trained[param_index] for param_index in part]
        return phase_moves(config, phase, shards, itemsize, message)

    yield from _gathers(config, work)
    if work.frozen is not None:
        yield from _gathers(config, work.frozen, frozen=True)
    for itemsize, part in work.by_itemsize(work.scatter_itemsize):
        yield "scatter", work.micro_batches, of("scatter", part, itemsize)
    param_indices = range(len(work.numels))
    limit = config.sync.run_numel(work.run_numel, work.params)
    for run in param_runs(plan, work, param_indices, limit):
        yield "sync", 1, of("sync", run, work.sync_itemsize)
    yield "matrices", 1, matrix_moves(plan, work.of_muon(), work.scatter_itemsize)
    plain = [i for i in param_indices if not coded[i]]
    for run in param_runs(plan, work, plain, work.run_numel):
        yield "publish", 1, of("publish", run, work.itemsize)
    int8 = [i for i in param_indices if coded[i]]
    changed = param_runs(plan, work, int8, work.run_numel)
    # The message with which ranks agree on the size of each run
    yield "publish", 1, gather_moves(plan, plan.pair_of("publish"), COUNT_BYTES * len(changed))
    for run, message in zip(changed, work.published or (None,) * len(changed), strict=False):
        yield "publish", 1, of("publish", run, work.itemsize, message)


def _gathers(config: ResolvedConfig, of: Workload, frozen: bool = False) -> Iterator[Collectives]:
    """Yield the gathers of trained or of frozen parameters."""
    own = config.of_frozen() if frozen else config
    # After the first forward pass both read the captured copy (Note [Frozen] in
    # `engine/weights.py`).
    captured = frozen and own.captured
    stored = list(zip(of.shards(config.plan), of.coded(config), strict=True))
    for itemsize, part in of.by_itemsize(of.itemsize):
        sharded = [stored[i] for i in part if not of.persistent[i]]
        passes: list[Phase] = ["gather_forward"]
        if of.trains:
            passes.append("gather_backward")
        for phase in passes:
            read: Phase = "gather_backward" if captured else phase
            yield phase, of.micro_batches, phase_moves(own, read, sharded, itemsize)
    if of.trains:
        exact = list(compress(stored, of.persistent))
        yield "gather_exact", 1, phase_moves(config, "gather_exact", exact, of.itemsize)


def param_runs(
    plan: Plan, work: Workload, param_indices: Sequence[int], limit: int | None
) -> list[list[int]]:
    """Return the parameters in ``param_indices`` in the runs in which sync or publish sends
    them.
    """
    shards = work.shards(plan)
    runs = packed_runs(
        [plan.world_size * shards[param_index] for param_index in param_indices], limit
    )
    return [[param_indices[place] for place in run] for run in runs]


def phase_moves(
    config: ResolvedConfig,
    phase: Phase,
    shards: Sequence[tuple[int, bool]],
    itemsize: int,
    published: int | None = None,
) -> Moves:
    """Return what a rank sends in one pass of a phase over some parameters.

    Args:
        config: plan and wire formats.
        phase: one of ``plan.PHASES``.
        shards: of each parameter, the elements of a world shard, and whether it is stored as INT8.
        itemsize: bytes per element where nothing is quantized.
        published: bytes of a message in a publish of INT8 weights; None expects those of
            :func:`change_bytes`.
    """
    plan = config.plan
    pair = plan.pair_of(phase)
    codes = config.resident_spec
    rows = plan.world_size // pair[1]
    if phase == "sync":
        return config.sync.volume(plan, [width for width, _ in shards], itemsize)
    if phase == "scatter":
        sizes = [rows * width for width, _ in shards]
        return reduce_moves(plan, pair, rows_message(1, sizes, config.gradients_spec, itemsize))
    plain = [width for width, coded in shards if not coded]
    int8 = [width for width, coded in shards if coded]
    if phase == "publish":
        message = rows_message(rows, plain, config.publish_spec, itemsize)
        if codes and int8:
            message += change_bytes(rows, int8, codes) if published is None else published
    else:
        spec = gather_spec(config, phase)
        alike = Counter(plain).items()  # layers are equal
        message = sum(count * message_bytes(rows * width, spec, itemsize) for width, count in alike)
        if codes:
            message += sum(rows_message(rows, (width,), codes, itemsize) for width in int8)
    return gather_moves(plan, pair, message)


def matrix_moves(plan: Plan, numels: Iterable[int], itemsize: int) -> Sequence[Move]:
    """Return what a rank sends for Muon's matrices of ``numels`` elements, each ``itemsize`` bytes.

    Each matrix's parts go to its owner and back. Owners send more back than others; this is the
    mean of the ranks.
    """
    degree = plan.optimizer
    parts = plan.world_size // degree * sum(map(plan.shard_numel, numels)) * itemsize
    return [Move(1, degree, 2 * parts * (degree - 1) // degree)]


def by_domain(sent: Mapping[Key, int]) -> dict[str, int]:
    """Sum the bytes of each domain over phases."""
    totals: Counter[str] = Counter()
    for (_, domain), nbytes in sent.items():
        totals[domain] += nbytes
    return dict(totals)


def gather_spec(config: ResolvedConfig, phase: Phase) -> BlockSpec | None:
    """Return the wire format of a gather: before a backward pass, that of the secondary copy if
    there is one.
    """
    if phase == "gather_exact":
        return None
    copied = phase == "gather_backward" and config.plan.secondary is not None
    return config.secondary_spec if copied else config.weights_spec


def message_bytes(numel: int, spec: BlockSpec | None, itemsize: int) -> int:
    return numel * itemsize if spec is None else spec.nbytes(numel)


# -- INT8 weights ----------------------------------------------------------------------------------


@cache
def bytes_of_changes(block_size: int) -> float:
    """Return the expected bytes of changes per INT8 weight, in blocks not sent whole; see Note
    [Expected changes].

    Args:
        block_size: number of values that share a scale.
    """
    tile = ChangeSpec(block_size).tile
    of_counts = (
        comb(tile, c) * CHANGED**c * (1 - CHANGED) ** (tile - c) * min(c, tile // 8 + ceil(c / 8))
        for c in range(tile + 1)
    )
    return sum(of_counts) / tile


def change_bytes(rows: int, widths: Iterable[int], spec: BlockSpec) -> int:
    """Return the expected bytes of a packed buffer with the changes of the INT8 weights of some
    rows.

    Args:
        rows: rows of one group rank.
        widths: columns of each parameter.
        spec: format of the INT8 weights.
    """
    blocks = rows * sum(map(spec.blocks, widths))
    whole = ceil(SENT_WHOLE * blocks)
    changes = ceil(bytes_of_changes(spec.block_size) * (blocks - whole) * spec.block_size)
    return ChangeSpec(spec.block_size).nbytes(blocks, whole, changes)


def largest_change_bytes(rows: int, widths: Iterable[int], spec: BlockSpec) -> int:
    """Return the bytes of the largest packed buffer that :func:`change_bytes` may need: all blocks
    are sent whole.
    """
    return ChangeSpec(spec.block_size).largest(rows * sum(map(spec.blocks, widths)))
