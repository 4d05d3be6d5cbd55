# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``benchmarks sparse``: every sparse mode of sync on the same gradients, in plain data
parallelism.

For comparison: torch's own all-reduce of the gradients as one vector, its PowerSGD of rank 1 and 4,
dense sync, and Ok-Topk without balancing.

What is measured
    Ranks are processes of this machine that talk over its loopback interface: bytes and errors are
    those of any network, seconds are not. ``bytes_per_rank`` is what the meter counts in a step,
    averaged over ranks and steps, and ``words_per_k`` the same in 4-byte words per selected element
    of one rank; ``bytes_busiest`` is the mean over steps of the rank that sends most. The
    all-reduces of torch are counted as ``2 (P - 1) / P`` times their length. ``error`` compares
    what a mode delivers with the sum of the ranks' gradients and residuals, as a ratio of L2 norms:
    for dense it is rounding. ``xi`` is the ratio of Ok-Topk's Figure 5 (``sparse_ranks.xi``), over
    the elements of matrices. Steps before the measured ones let residuals grow and thresholds
    settle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.ranks import Ranks, on_loopback
from benchmarks.records import GrowingRecord, Tick, record
from benchmarks.room import check_room
from benchmarks.schemes import PLAIN
from zero_topo.config import SPARSE_MODES, ZeroTopoConfig, resolve_config
from zero_topo.topology.presets import emulated

PROGRAM = "benchmarks.sparse_ranks:measure_all"
SOURCES = ("synthetic", "model")
ALL_REDUCE = "all_reduce"
DENSE = "dense"
UNBALANCED = "oktopk_unbalanced"
POWER_SGD: Mapping[str, int] = MappingProxyType({f"powersgd_{rank}": rank for rank in (1, 4)})
WHOLE = (ALL_REDUCE, DENSE, *POWER_SGD)  # without a density
# Bytes of a rank for an element: gradient, weights, residual, selected elements, and what a mode
# copies
ELEMENT = 96
MODES = (*WHOLE, *(mode.MODE for mode in SPARSE_MODES), UNBALANCED)
# Shorter than the modes' own intervals, so that the measured steps hold one of each kind.
INTERVALS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {"oktopk": {"tau": 8, "tau_prime": 8}, "radius": {"interval": 8}}
)


@dataclass(frozen=True)
class SparseBench:
    """What to measure.

    Attributes:
        modes: of sync, and those for comparison.
        densities: of the sparse ones.
        ranks: sizes of the group.
        sources: of gradients: "synthetic" (heavy tails, half of it common to all ranks) or "model"
            (the example's GPT).
        numel: elements of a synthetic gradient, and about as many of the model.
        warmup, steps: not measured, measured.

    Raises:
        ValueError: for an unknown mode or source, or what the config refuses.
    """

    modes: tuple[str, ...] = MODES
    densities: tuple[float, ...] = (0.1, 0.01, 0.001)
    ranks: tuple[int, ...] = (4, 8, 16)
    sources: tuple[str, ...] = SOURCES
    numel: int = 1 << 20
    warmup: int = 8
    steps: int = 8

    def __post_init__(self) -> None:
        for given, known in ((self.modes, MODES), (self.sources, SOURCES)):
            unknown = [word for word in given if word not in known]
            if unknown:
                raise ValueError(f"{unknown[0]!r} cannot be measured; choose of {', '.join(known)}")
        if min(self.ranks, default=0) < 2 or self.numel < 1 or self.steps < 1:
            raise ValueError(
                f"ranks {self.ranks}, {self.numel} elements, {self.steps} steps: give at least 2, "
                "1 and 1"
            )
        for block in (job["block"] for job in self.jobs()):
            resolve_config(ZeroTopoConfig.parse(block), emulated(min(self.ranks), 1, 1))

    def ticks(self) -> int:
        """Measurements that :func:`run` announces, one tick each."""
        return len(list(self.jobs())) * len(self.ranks)

    def jobs(self) -> Iterator[dict[str, Any]]:
        """Each mode at each density, on each source of gradients."""
        for source in self.sources:
            for mode in self.modes:
                for density in (1.0,) if mode in WHOLE else self.densities:
                    block = data_parallel(sync_of(mode, density))
                    yield {"source": source, "scheme": mode, "density": density, "block": block}


def sync_of(mode: str, density: float) -> dict[str, Any]:
    """The ``sync`` block of a mode at a density; that of dense sync for torch's own reductions."""
    if mode in WHOLE:
        return {"mode": DENSE}
    mode = "oktopk" if mode == UNBALANCED else mode
    share = {"theta": 1 - density} if mode == "tagc" else {"density": density}
    return {"mode": mode, **share, **INTERVALS.get(mode, {})}


def data_parallel(sync: dict[str, Any]) -> dict[str, Any]:
    """The block of plain data parallelism: every rank stores everything, nothing is quantized.

    Where sums stay with their owners (``"sharded"``), the optimizer states are sharded.
    """
    optimizer = "world" if sync.get("sharded") else "rank"
    everything = {"weights": "rank", "gradients": "rank", "optimizer": optimizer}
    return {**everything, "quantize": PLAIN, "sync": sync}


def run(wanted: SparseBench, tick: Tick) -> GrowingRecord:
    """Measure everything.

    Args:
        wanted: what.
        tick: called after each measurement, with a few words and the number done since.

    Yields:
        The record so far, after each group of ranks; ``results`` has an entry for each mode,
        density, source and number of ranks: numel, bytes_per_rank, bytes_busiest, words_per_k,
        seconds (with spread), exchange_s (the part of it in collectives that a mode begins and
        awaits in one call, median; all of it for torch's own reductions), error, xi.

    Raises:
        ValueError: if this machine's memory cannot hold the ranks.
        RuntimeError: if a rank fails.
    """
    check_room(max(wanted.ranks), wanted.numel * ELEMENT)
    results: list[dict[str, Any]] = []
    jobs = list(wanted.jobs())
    settings = {"numel": wanted.numel, "warmup": wanted.warmup, "steps": wanted.steps, "jobs": jobs}
    for size in wanted.ranks:
        tick(f"{size} ranks: starting", 0)
        with Ranks(PROGRAM, settings, on_loopback(size, 1)) as ranks:
            for job, result in ranks.results(jobs, lambda *_: None):
                results.append(result)
                tick(f"{size} ranks: {job['scheme']}, density {job['density']}, {job['source']}", 1)
        yield record("sparse", asdict(wanted), {"results": results})
