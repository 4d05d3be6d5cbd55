# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes one rank sends in an optimizer step: exactly, as the meter counts them, and in the paper's units.

Note [What counts as sent]
    A rank that takes part in a collective of ``d`` ranks with a message of ``b`` bytes sends ``(d - 1) * b``: the
    volume of any bandwidth-optimal all-gather, reduce-scatter or all-to-all. Every rank sends the same. Bytes are
    booked under the smallest domain that contains the collective's group, so "world" is what crosses nodes.

Note [Sizes]
    ``N`` ranks; a parameter of ``m`` elements is padded to ``N * n`` with ``n = ceil(m / N)``; ``F`` is the sum of all
    ``n``. A rank's shard of degree ``d`` holds ``N / d * n`` elements of it. Every parameter is a message of its own
    in a gather (blocks never straddle parameters), every bucket one per destination in a scatter, through all its hops.

Source: "Scaling Large Language Model Training on Frontier with Low-Bandwidth Partitioning", Table VII and section III.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import singledispatch

from zero_topo.config import DenseSync, ResolvedConfig
from zero_topo.plan import Plan
from zero_topo.quant.spec import BlockSpec

Key = tuple[str, str]


@dataclass(frozen=True)
class Workload:
    """A model and a step, as far as bytes are concerned.

    Attributes:
        numels: elements of each parameter.
        persistent: for each parameter, whether every rank keeps it whole between steps (DeepSpeed's
            ``stage3_param_persistence_threshold``): it is gathered once per step, exactly, after publish.
        itemsize: bytes per weight as stored.
        buckets: indices into ``numels`` of each scatter bucket; None is one bucket of all parameters.
        micro_batches: forward and backward passes per optimizer step (``K``).
        scatter_itemsize: bytes per gradient in an unquantized scatter.
        sync_itemsize: bytes per gradient in a dense sync.
        publish_itemsize: bytes per weight in publish.

    Raises:
        ValueError: if the lists differ in length, or a count or size is not positive.
    """

    numels: tuple[int, ...]
    persistent: tuple[bool, ...]
    itemsize: int
    buckets: tuple[tuple[int, ...], ...] | None
    micro_batches: int
    scatter_itemsize: int
    sync_itemsize: int
    publish_itemsize: int

    def __post_init__(self) -> None:
        if len(self.numels) != len(self.persistent):
            raise ValueError(f"{len(self.numels)} numels but {len(self.persistent)} persistent flags; give one of each")
        smallest = min(self.itemsize, self.scatter_itemsize, self.sync_itemsize, self.publish_itemsize)
        if self.micro_batches < 1 or smallest < 1 or min(self.numels, default=0) < 0:
            raise ValueError(
                f"a workload needs micro_batches and item sizes of at least 1 and no negative numel, got {self}"
            )

    @classmethod
    def uniform(cls, numels: Iterable[int], itemsize: int = 2, micro_batches: int = 1) -> Workload:
        """A model whose weights and gradients all travel in ``itemsize`` bytes, nothing kept whole, one bucket."""
        sizes = tuple(numels)
        kept = (False,) * len(sizes)
        return cls(sizes, kept, itemsize, None, micro_batches, itemsize, itemsize, itemsize)

    def parameter_buckets(self) -> tuple[tuple[int, ...], ...]:
        """The scatter buckets, each a tuple of indices into ``numels``."""
        return (tuple(range(len(self.numels))),) if self.buckets is None else self.buckets


def step_bytes(config: ResolvedConfig, work: Workload) -> dict[Key, int]:
    """Bytes one rank sends per optimizer step, exactly as the meter counts them.

    Args:
        config: plan and wire formats.
        work: the model and the step.

    Returns:
        ``(phase, domain) -> bytes``; entries of zero bytes are left out. See Note [What counts as sent].

    Raises:
        ValueError: if no formula is registered for the mode of sync.
    """
    plan = config.plan
    shards = [plan.shard_numel(m) for m in work.numels]
    gathered = [n for n, kept in zip(shards, work.persistent, strict=True) if not kept]
    kept_whole = [n for n, kept in zip(shards, work.persistent, strict=True) if kept]
    backward_degree, backward_spec = _backward_source(config)

    sent: Counter[Key] = Counter()

    def book(phase: str, degree: int, nbytes: int) -> None:
        sent[phase, config.topology.domain(degree)] += nbytes

    def gather(degree: int, sizes: Iterable[int], spec: BlockSpec | None) -> int:
        return (degree - 1) * sum(_message(plan.world_size // degree * n, spec, work.itemsize) for n in sizes)

    forward = gather(plan.weights, gathered, config.weights_spec)
    backward = gather(backward_degree, gathered, backward_spec)
    book("gather_forward", plan.weights, work.micro_batches * forward)
    book("gather_backward", backward_degree, work.micro_batches * backward)
    book("gather_exact", plan.weights, gather(plan.weights, kept_whole, None))
    for lo, hi in plan.hop_chain():
        book("scatter", hi, work.micro_batches * _scatter_hop(config, work, shards, (lo, hi)))
    columns = sum(shards)
    book("sync", plan.world_size, sync_rows(config.sync, plan) * columns * work.sync_itemsize)
    publish_rows = (plan.optimizer // plan.weights - 1) * (plan.world_size // plan.optimizer)
    book("publish", plan.optimizer, publish_rows * columns * work.publish_itemsize)
    return {key: nbytes for key, nbytes in sent.items() if nbytes}


def by_domain(sent: Mapping[Key, int]) -> dict[str, int]:
    """Bytes per domain, summed over phases."""
    totals: Counter[str] = Counter()
    for (_, domain), nbytes in sent.items():
        totals[domain] += nbytes
    return dict(totals)


@singledispatch
def sync_rows(mode: object, plan: Plan) -> int:
    """World shards a rank sends in one sync, for modes that send whole ones; dispatches on the mode's settings.

    Raises:
        ValueError: for a mode without a formula.
    """
    raise ValueError(f"there is no volume formula for the sync mode {type(mode).__name__}; register one in sync_rows")


@sync_rows.register
def _(mode: DenseSync, plan: Plan) -> int:
    """Reduce-scatter to one row each, then all-gather to the optimizer shard, or to the whole gradient shard."""
    target = plan.gradients if mode.reduce == "all_reduce" else plan.optimizer
    return (plan.world_size // plan.gradients - 1) + (plan.world_size // target - 1)


def _backward_source(config: ResolvedConfig) -> tuple[int, BlockSpec | None]:
    """Degree and wire format of the gather before a backward: the secondary copy's if there is one."""
    plan = config.plan
    if plan.secondary is None or plan.weights == 1:
        return plan.weights, config.weights_spec
    return plan.secondary, config.secondary_spec


def _scatter_hop(config: ResolvedConfig, work: Workload, shards: list[int], hop: tuple[int, int]) -> int:
    """Bytes of one micro-batch in one hop of the scatter: a message for each destination behind each other member."""
    lo, hi = hop
    plan = config.plan
    rows = plan.world_size // plan.gradients
    messages = (rows * sum(shards[i] for i in bucket) for bucket in work.parameter_buckets())
    sent = (hi // lo - 1) * (plan.gradients // hi)
    return sent * sum(_message(numel, config.gradients_spec, work.scatter_itemsize) for numel in messages)


def _message(numel: int, spec: BlockSpec | None, itemsize: int) -> int:
    return numel * itemsize if spec is None else spec.nbytes(numel)


# -- the paper's units -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """One collective of a phase, ideal: no padding, no scales.

    Attributes:
        phase: as the meter's.
        volume: what a rank sends, in units of the 16-bit message ``M = 2 psi`` bytes.
        degree: the paper's ``d``: ranks over which the phase's shards are spread.
        domain: the widest domain whose links the collective uses.
    """

    phase: str
    volume: Fraction
    degree: int
    domain: str


def table_units(config: ResolvedConfig) -> tuple[Term, ...]:
    """The paper's Table VII for any plan: per micro-batch gathers and scatter, per step sync and publish.

    Unquantized values are counted as 16 bits; phases in which nothing moves are left out.
    """
    plan, domain = config.plan, config.topology.domain
    n = plan.world_size

    def term(phase: str, hi: int, shards: Fraction, spec: BlockSpec | None) -> Term:
        return Term(phase, shards * _share_of_16_bits(spec), hi, domain(hi))

    backward_degree, backward_spec = _backward_source(config)
    terms = [
        term("gather_forward", plan.weights, _spread(1, plan.weights), config.weights_spec),
        term("gather_backward", backward_degree, _spread(1, backward_degree), backward_spec),
        *(term("scatter", hi, _spread(lo, hi), config.gradients_spec) for lo, hi in plan.hop_chain()),
        term("sync", n, Fraction(sync_rows(config.sync, plan), n), None),
        term("publish", plan.optimizer, _spread(plan.weights, plan.optimizer), None),
    ]
    return tuple(t for t in terms if t.volume)


def _spread(lo: int, hi: int) -> Fraction:
    """Share of the model that a rank sends in a hop: ``hi / lo - 1`` messages of ``1 / hi`` each."""
    return Fraction(hi // lo - 1, hi)


def _share_of_16_bits(spec: BlockSpec | None) -> Fraction:
    return Fraction(1) if spec is None else Fraction(spec.bits, 16)


def paper_volume_table(nodes: int, ranks_per_node: int = 8, ranks_per_gpu: int = 2) -> dict[str, tuple[Term, ...]]:
    """Table VII as printed: volume per device of forward gather, backward gather and gradient reduce-scatter.

    Its row for ZeRO++ counts an INT8 backward gather, where stock hpZ moves 16 bits (``"secondary": null``).

    Args:
        nodes: the paper's ``N``.
        ranks_per_node: its ``P``.
        ranks_per_gpu: dies of a GPU; 2 on an MI250X.

    Returns:
        Row name -> terms, in units of ``M``.
    """
    world = nodes * ranks_per_node
    domain_of: Callable[[int], str] = {ranks_per_gpu: "gpu", ranks_per_node: "node", world: "world"}.__getitem__
    rows = {
        "ZeRO-3": ((1, world), (1, world), (1, world)),
        "ZeRO++": ((2, world), (2, ranks_per_node), (4, world)),
        "ZeRO-topo sec 8": ((2, ranks_per_gpu), (2, ranks_per_node), (4, ranks_per_node)),
        "ZeRO-topo sec 2": ((2, ranks_per_gpu), (2, ranks_per_gpu), (4, ranks_per_node)),
    }
    phases = ("gather_forward", "gather_backward", "scatter")
    return {
        name: tuple(
            Term(phase, Fraction(d - 1, d) / parts, d, domain_of(d))
            for phase, (parts, d) in zip(phases, row, strict=True)
        )
        for name, row in rows.items()
    }
