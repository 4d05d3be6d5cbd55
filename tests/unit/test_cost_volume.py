# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The volume formulas: against the paper's printed numbers, and against a walk over every rank's
every message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.paper import paper_volume_table
from tests.plans import resolve
from zero_topo.config import SCHEMES, DenseSync, ResolvedConfig
from zero_topo.config.sparse_config import SparseSync
from zero_topo.config.sync_config import QuantizedSync, SyncSettings
from zero_topo.cost.volume import (
    Workload,
    change_bytes,
    gather_spec,
    largest_change_bytes,
    step_bytes,
)
from zero_topo.plan import Phase, divisors
from zero_topo.quant.spec import BlockSpec
from zero_topo.topology.model import Topology

FRONTIER = Topology("frontier", nodes=48, gpus_per_node=4, ranks_per_gpu=2)


# -- the brute force -------------------------------------------------------------------------------


def widest(topology: Topology, ranks: list[int]) -> str:
    """The smallest domain that holds all the ranks, read off their coordinates."""
    places = [topology.coordinates(rank) for rank in ranks]
    for name, depth in (("rank", 3), ("gpu", 2), ("node", 1)):
        if len({place[:depth] for place in places}) == 1:
            return name
    return "world"


class Walk:
    """Sends every message of a step, rank by rank, and counts what each sends."""

    def __init__(self, config: ResolvedConfig, work: Workload) -> None:
        self.config, self.work, self.plan = config, work, config.plan
        self.sent: list[Counter[tuple[str, str]]] = [Counter() for _ in range(self.plan.world_size)]

    def exchange(self, phase: str, lo: int, hi: int, message: int) -> None:
        for rank, sent in enumerate(self.sent):
            group = self.plan.group(rank, lo, hi)
            assert rank in group
            for peer in group:
                sent[phase, widest(self.config.topology, group)] += message if peer != rank else 0

    def groups(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """(lo, hi), or its part inside a node and that across, if going through it makes two groups
        of it.
        """
        node = self.config.topology.degree("node")
        through = node if hi > node else 0
        nests = lo < through < hi and through % lo == 0 and hi % through == 0
        return [(lo, through), (through, hi)] if nests else [(lo, hi)]

    def to_all(self, phase: str, lo: int, hi: int, message: int) -> None:
        """Every member of (lo, hi) gets every member's message; across nodes one rank of each takes
        it in.
        """
        for low, high in reversed(self.groups(lo, hi)):
            self.exchange(phase, low, high, hi // high * message)

    def to_each(self, phase: str, lo: int, hi: int, message: int) -> None:
        """Every member sends a message to each; those for ranks elsewhere are summed inside the
        node first.
        """
        for low, high in self.groups(lo, hi):
            self.exchange(phase, low, high, hi // high * message)

    def coded(self, index: int) -> bool:
        """Whether a parameter is stored as INT8: a matrix that whole blocks in each world shard
        grow by an eighth.
        """
        spec, work = self.config.resident_spec, self.work
        if spec is None or work.dims[index] < 2 or work.persistent[index] or not work.numels[index]:
            return False
        filled = sum(
            spec.block_size
            for _ in range(0, self.plan.shard_numel(work.numels[index]), spec.block_size)
        )
        return Fraction(self.plan.world_size * filled, work.numels[index]) <= Fraction(9, 8)

    def gather(self, phase: str, degree: int, spec: Any, kept: bool) -> None:
        for index, numel in enumerate(self.work.numels):
            if self.work.persistent[index] != kept:
                continue
            rows, width = len(self.plan.rows(0, degree)), self.plan.shard_numel(numel)
            if self.coded(index):
                message = self.filled(rows, [width], self.config.resident_spec, 0)
            else:
                message = spec.nbytes(rows * width) if spec else rows * width * self.work.itemsize
            self.to_all(phase, 1, degree, message)

    def publish(self) -> None:
        """Either kind in runs of its own; of codes, the size of each run, then what changed."""
        work, plan = self.work, self.plan
        rows, (lo, hi) = len(plan.rows(0, plan.optimizer)), (plan.weights, plan.optimizer)
        kinds: list[list[int]] = [[], []]
        for index, numel in enumerate(work.numels):
            kinds[self.coded(index)].append(numel)
        for widths in self.runs(kinds[False]):
            message = self.filled(rows, widths, None, work.itemsize)
            self.to_all("publish", lo, hi, message)
        runs = [widths for widths in self.runs(kinds[True]) if widths]
        self.to_all("publish", lo, hi, 16 * len(runs))
        for _, nbytes in zip(runs, work.published or (), strict=False):
            self.to_all("publish", lo, hi, nbytes)

    def scatter(self) -> None:
        """One message for each rank of a domain, in which each parameter begins a block if blocks
        have scales.
        """
        spec, rows, message = (
            self.config.gradients_spec,
            len(self.plan.rows(0, self.plan.gradients)),
            0,
        )
        widths = [self.plan.shard_numel(m) for m in self.work.numels]
        if spec:
            message = spec.nbytes(
                sum(-(-rows * width // spec.block_size) * spec.block_size for width in widths)
            )
        else:
            message = rows * sum(widths) * self.work.scatter_itemsize
        self.to_each("scatter", 1, self.plan.gradients, message)

    def runs(self, numels: Iterable[int]) -> list[list[int]]:
        """Widths of the parameters that sync or publish sends together."""
        runs: list[list[int]] = [[]]
        for numel in numels:
            width, limit = self.plan.shard_numel(numel), self.work.run_numel
            if (
                runs[-1]
                and limit is not None
                and self.plan.world_size * (sum(runs[-1]) + width) > limit
            ):
                runs.append([])
            runs[-1].append(width)
        return runs

    @staticmethod
    def filled(rows: int, widths: list[int], spec: Any, itemsize: int) -> int:
        """Bytes of some rows of some parameters, each filled up to whole blocks if quantized."""
        if spec is None:
            return rows * sum(widths) * itemsize
        blocks = sum(rows * -(-width // spec.block_size) for width in widths)
        return spec.nbytes(blocks * spec.block_size)

    def sync(self, widths: list[int]) -> None:
        plan, mode, world = self.plan, self.config.sync, self.plan.world_size
        row = sum(widths) * self.work.sync_itemsize
        if isinstance(mode, QuantizedSync):
            *inside, across = self.groups(plan.gradients, world)
            for low, high in inside:
                self.exchange("sync", low, high, world // high * row)
            self.exchange("sync", *across, self.filled(1, widths, mode.spec, 0))
            self.to_all("sync", plan.optimizer, world, row)
        else:
            assert isinstance(mode, DenseSync)
            self.to_each("sync", plan.gradients, world, row)
            self.to_all(
                "sync",
                plan.gradients if mode.reduce == "all_reduce" else plan.optimizer,
                world,
                row,
            )

    def gathers(self, frozen: bool = False) -> None:
        config, plan = self.config, self.plan
        forth = back = plan.weights, config.weights_spec
        if plan.secondary is not None:
            back = plan.secondary, config.secondary_spec
            # A copy that is filled once, for both passes
            if frozen and plan.secondary % plan.weights:
                forth = back
        for _ in range(self.work.micro_batches):
            self.gather("gather_forward", *forth, kept=False)
            self.gather("gather_backward", *back, kept=False)
        self.gather("gather_exact", plan.weights, None, kept=True)

    def step(self) -> list[dict[tuple[str, str], int]]:
        config, work = self.config, self.work
        if work.frozen is not None:
            frozen = Walk(config, work.frozen)
            frozen.gathers(frozen=True)
            self.sent = frozen.sent
        self.gathers()
        for _ in range(work.micro_batches):
            self.scatter()
        for widths in self.runs(work.numels):
            self.sync(widths)
        self.publish()
        return [{key: nbytes for key, nbytes in sent.items() if nbytes} for sent in self.sent]


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    nodes, gpus, dies = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    order = draw(st.permutations(range(nodes * gpus * dies)))
    return Topology("drawn", nodes, gpus, dies, order=tuple(order))


@st.composite
def configs(draw: st.DrawFn) -> ResolvedConfig:
    topology = draw(machines())
    units = [topology.degree("gpu"), topology.degree("node")]
    aligned = [
        d for d in divisors(topology.world_size) if all(d % u == 0 or u % d == 0 for u in units)
    ]
    optimizer = draw(st.sampled_from(aligned))
    gradients = draw(st.sampled_from([d for d in aligned if optimizer % d == 0]))
    weights = draw(st.sampled_from([d for d in aligned if gradients % d == 0]))
    secondary = draw(
        st.none() | st.sampled_from([d for d in aligned if d % weights == 0 or weights % d == 0])
    )
    bits = st.sampled_from([None, "int8"])
    quantize = {role: draw(bits) for role in ("weights", "secondary")}
    quantize["gradients"] = draw(bits | st.sampled_from(["int4", "nf4"]))
    if weights < optimizer and secondary in (None, weights) and draw(st.booleans()):
        quantize = {
            **dict.fromkeys(("weights", "secondary", "resident"), "int8"),
            "gradients": quantize["gradients"],
        }
    return resolve(
        topology,
        weights=weights,
        secondary=secondary,
        gradients=gradients,
        optimizer=optimizer,
        quantize=quantize,
        sync=draw(
            st.sampled_from(
                [
                    {"reduce": "reduce_scatter"},
                    {"reduce": "all_reduce"},
                    {"mode": "quantized", "bits": 8},
                    {"mode": "quantized"},
                ]
            )
        ),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    numels = draw(st.lists(st.integers(0, 3000) | st.integers(8000, 20000), min_size=1, max_size=4))
    sizes = [draw(st.sampled_from([2, 4])) for _ in range(3)]
    work = Workload(
        numels=tuple(numels),
        dims=tuple(draw(st.integers(1, 2)) for _ in numels),
        persistent=tuple(draw(st.booleans()) for _ in numels),
        itemsize=sizes[0],
        micro_batches=draw(st.integers(1, 3)),
        scatter_itemsize=sizes[1],
        sync_itemsize=sizes[2],
        run_numel=draw(st.sampled_from([None, 0, 2000])),
        published=tuple(draw(st.integers(0, 2**20)) for _ in numels),
    )
    frozen = replace(work, numels=tuple(reversed(numels)))
    return replace(work, frozen=frozen) if draw(st.booleans()) else work


@given(config=configs(), work=workloads())
def test_the_formula_is_what_every_rank_sends_message_by_message(
    config: ResolvedConfig, work: Workload
) -> None:
    expected = step_bytes(config, work)
    for sent in Walk(config, work).step():
        assert sent == expected


@given(topology=machines(), scheme=st.sampled_from(list(SCHEMES)), work=workloads())
def test_the_formula_holds_for_every_scheme_on_any_machine(
    topology: Topology, scheme: str, work: Workload
) -> None:
    config = resolve(topology, scheme=scheme)
    assert Walk(config, work).step()[-1] == step_bytes(config, work)


# -- by hand ---------------------------------------------------------------------------------------


def test_the_expected_bytes_of_changes() -> None:
    """0.7 bits a weight at a learning rate of 1e-4 and weights of .01; 8.2 if all blocks are sent
    whole.
    """
    spec, numel = BlockSpec("int8"), 256 * 10**6
    assert 0.63 < 8 * change_bytes(1, [numel], spec) / numel < 0.7
    assert 8 * largest_change_bytes(1, [numel], spec) <= 8.2 * numel


@pytest.mark.parametrize("base", [SyncSettings, SparseSync])
def test_a_mode_without_a_formula_is_an_error_not_a_zero(base: type[SyncSettings]) -> None:
    """When a config selects it: neither bytes nor memory are those of another mode."""

    class Odd(base):  # type: ignore[misc, valid-type]
        mode: Literal["odd"] = "odd"

    with pytest.raises(TypeError, match=r"abstract class Odd .*(volume|peer_bytes)"):
        Odd.model_validate({"mode": "odd"})


# -- the paper -------------------------------------------------------------------------------------


def table_units(config: ResolvedConfig) -> dict[tuple[str, str], Fraction]:
    """Volumes of a large model in messages of 2 psi bytes: with no padding, and scales taken
    off.
    """
    block, n = 2**15, config.plan.world_size
    specs = {
        "gather_forward": config.weights_spec,
        "gather_backward": gather_spec(config, "gather_backward"),
        "scatter": config.gradients_spec,
    }
    bits = {
        phase: Fraction(block * spec.bits, 8 * spec.nbytes(block))
        for phase, spec in specs.items()
        if spec
    }
    sent = step_bytes(config, Workload.uniform([n * block]))
    return {
        key: Fraction(nbytes, 2 * n * block) * bits.get(key[0], 1) for key, nbytes in sent.items()
    }


@pytest.mark.parametrize(
    ("row", "block"),
    [
        ("ZeRO-3", {"scheme": "zero3"}),
        ("ZeRO++", {"scheme": "zero++", "quantize": {"secondary": "int8"}}),
        ("ZeRO-topo sec 8", {"scheme": "paper", "secondary": "node"}),
        ("ZeRO-topo sec 2", {"scheme": "paper"}),
    ],
)
def test_our_plans_are_the_rows_of_table_vii(row: str, block: dict[str, Any]) -> None:
    phases: tuple[Phase, ...] = ("gather_forward", "gather_backward", "scatter")
    config = resolve(FRONTIER, **block)
    if "topo" not in row:
        # In the table they send directly between all ranks.
        config = replace(config, plan=replace(config.plan, inner=None))
    table = paper_volume_table(nodes=48, ranks_per_node=8)[row]
    ours = {key: volume for key, volume in table_units(config).items() if key[0] in phases}
    assert ours == {(term.phase, term.domain): term.volume for term in table}
    assert [config.plan.pair_of(phase)[1] for phase in phases] == [term.degree for term in table]
