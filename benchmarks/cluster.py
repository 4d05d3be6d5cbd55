# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks cluster``: optimizer steps of every scheme on an emulated cluster, counted by the kernel.

1. build the network, start the ranks once;
2. for every scheme and number of micro-batches: warm up, wait until no byte moves, read the counters, take the steps,
   wait and read again;
3. put the bytes and the times beside what the cost formulas and the links' rates say.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from benchmarks.emulated_cluster.counters import Snapshot, Traffic, between
from benchmarks.emulated_cluster.network import FAST, EmulatedNetwork
from benchmarks.emulated_cluster.spec import LEVELS, Spec
from benchmarks.training_setup import TrainingSetup
from zero_topo.bench.ranks import Address, Place, Ranks, place
from zero_topo.bench.records import Spread, machine, record
from zero_topo.bench.schemes import BenchScheme
from zero_topo.config import deepspeed_problems

PROGRAM = "benchmarks.training:measure_all"
PORT = 29500
FEWEST_STEPS = 5
Tick = Callable[[str, int], None]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class ClusterBench:
    """What to measure.

    Attributes:
        spec: the cluster.
        schemes: rows of the table.
        micro_batches: per optimizer step; each scheme is measured with each.
        setup: model and DeepSpeed config.
        steps: measured optimizer steps.
        warmup: steps before them.

    Raises:
        ValueError: for a scheme that the config refuses, or numbers that are too small.
    """

    spec: Spec
    schemes: tuple[BenchScheme, ...]
    micro_batches: tuple[int, ...]
    setup: TrainingSetup
    steps: int = FEWEST_STEPS
    warmup: int = 1

    def __post_init__(self) -> None:
        if min(self.micro_batches, default=0) < 1 or len(set(self.micro_batches)) < len(self.micro_batches):
            raise ValueError(f"micro-batches {list(self.micro_batches)} must be positive and different numbers")
        if self.steps < 2 or self.warmup < 1:
            raise ValueError(f"{self.steps} steps after {self.warmup} to warm up: measure at least 2 after at least 1")
        for scheme in self.schemes:
            scheme.resolve(self.spec.topology())
            block = scheme.block_on(self.spec.topology_block())
            problems = deepspeed_problems(self.setup.deepspeed(block, 1, scheme.optimizer))
            if problems:
                raise ValueError(f"scheme {scheme.name!r}: {problems[0]}")

    def ticks(self) -> int:
        """Forward and backward passes that :func:`run` announces, one tick each."""
        return len(self.schemes) * sum(self.micro_batches) * (self.steps + 1)

    def settings(self) -> dict[str, Any]:
        """In JSON types, for the ranks and the record."""
        return {
            "spec": self.spec.to_json(),
            "setup": asdict(self.setup),
            "steps": self.steps,
            "warmup": self.warmup,
            "jobs": [self._job(scheme, count) for count in self.micro_batches for scheme in self.schemes],
        }

    def _job(self, scheme: BenchScheme, micro_batches: int) -> dict[str, Any]:
        block = scheme.block_on(self.spec.topology_block())
        how = {"ring": scheme.ring, "optimizer": scheme.optimizer, "micro_batches": micro_batches}
        return {"scheme": scheme.name, "block": block, **how}


def run(bench: ClusterBench, tick: Tick, keep: Keep) -> dict[str, Any]:
    """Measure everything.

    Args:
        bench: what.
        tick: called after each step and whenever something takes long, with a few words and the passes done since.
        keep: called with the record so far after each result: what is measured is not lost if the rest fails.

    Returns:
        The record: ``results``, one for each scheme and number of micro-batches; ``message_bytes`` (the model in 16
        bits); ``spec``; and how it was measured.

    Raises:
        ValueError: where no cluster can be built, or if a scheme is refused.
        RuntimeError: if a rank fails.
    """
    host = machine()
    settings = bench.settings()
    tick("building the network", 0)
    with _terminable(), EmulatedNetwork(bench.spec) as network:
        tick("starting the ranks", 0)
        with Ranks(PROGRAM, settings, _places(network)) as ranks:
            under_way = _Run(network, ranks, tick, settings["jobs"])
            for _ in under_way.follow():
                keep(_record(bench, host, under_way))
    return _record(bench, host, under_way)


def _record(bench: ClusterBench, host: dict[str, Any], under_way: _Run) -> dict[str, Any]:
    content = {
        "results": under_way.results,
        "message_bytes": bench.setup.message_bytes,
        "spec": bench.spec.to_json(),
        "compute_s_per_micro_batch": under_way.compute_s,
    }
    return {**record("cluster", bench.settings(), content), "machine": host}


def dropped(results: Sequence[Mapping[str, Any]]) -> str | None:
    """One line that names the results spoiled by dropped packets, or None."""
    spoiled = [f"{row['scheme']} at {row['micro_batches']} ({row['drops']})" for row in results if row["drops"]]
    return f"packets were dropped, so these times are not valid: {', '.join(spoiled)}" if spoiled else None


def _places(network: EmulatedNetwork) -> list[Place]:
    spec = network.spec
    address = Address("eth0", spec.address(0), PORT)
    ranks = range(spec.world_size)
    return [place(rank, spec.world_size, spec.ranks_per_node, address, network.space(rank)) for rank in ranks]


class _Run:
    """The benchmark's side of a run: serves rank 0 until all ranks have ended.

    Attributes:
        compute_s: forward and backward pass of one micro-batch.
        results: one for each job that has ended.
    """

    def __init__(self, network: EmulatedNetwork, ranks: Ranks, tick: Tick, jobs: Sequence[Mapping[str, Any]]) -> None:
        self._network, self._ranks, self._tick, self._jobs = network, ranks, tick, jobs
        self._snapshots: list[Snapshot] = []
        self.compute_s = 0.0
        self.results: list[dict[str, Any]] = []

    def follow(self) -> Iterator[None]:
        """Take every message; yields after each result.

        Raises:
            ValueError: if a scheme is refused.
        """
        for message in self._ranks.messages():
            known = len(self.results)
            getattr(self, f"_on_{message.pop('event')}")(**message)
            if len(self.results) > known:
                yield

    def _on_compute(self, seconds: float) -> None:
        self.compute_s = seconds

    def _on_build(self) -> None:
        self._tell(0)
        self._network.set_rates(FAST)
        self._ranks.reply({})

    def _on_built(self) -> None:
        self._network.set_rates(self._network.spec.rates_mbit)
        self._ranks.reply({})

    def _on_begin(self) -> None:
        self._snapshots.append(self._network.at_rest())
        self._ranks.reply({})

    _on_end = _on_begin

    def _on_step(self) -> None:
        self._tell(self._jobs[len(self.results)]["micro_batches"])

    def _on_measured(self, **measured: Any) -> None:
        spec = self._network.spec
        self.results.append(assemble(spec, measured, between(spec, *self._snapshots)))
        self._snapshots = []

    def _on_refused(self, scheme: str, reason: str) -> None:
        raise ValueError(f"scheme {scheme!r} is refused: {reason}")

    def _tell(self, passes: int) -> None:
        job = self._jobs[len(self.results)]
        self._tick(f"{job['scheme']}, {job['micro_batches']} micro-batch{'es' * (job['micro_batches'] > 1)}", passes)


def assemble(spec: Spec, measured: Mapping[str, Any], traffic: Traffic) -> dict[str, Any]:
    """One result, from what rank 0 told and the kernel counted over the measured steps; bytes are per step.

    Args:
        spec: the cluster.
        measured: the message of ``training.measure``.
        traffic: between the two fences.
    """
    seconds = measured["step_seconds"]
    steps, step = measured["counted_steps"], Spread.of(seconds)
    uplink = traffic.mean("node") / steps
    return {
        "scheme": measured["scheme"],
        "micro_batches": measured["micro_batches"],
        "step_s": step.to_json(),
        "uplink_bytes_per_step_per_node": round(uplink),
        "drops": traffic.drops,
        "phases": measured["phases"],
        "uplink_formula": round(measured["formula"]),
        "uplink_bytes_by_node": {
            "out": [round(nbytes / steps) for nbytes in traffic.out["node"]],
            "into": [round(nbytes / steps) for nbytes in traffic.into["node"]],
        },
        "level_bytes": {level: round(traffic.mean(level) / steps) for level in LEVELS},
        "level_rate_share": {
            level: traffic.busiest(level) / steps / step.median / spec.rates_mbit.bytes_per_s(level) for level in LEVELS
        },
        "floor_s": measured["floor_s"],
        "cpu_s_per_step": measured["cpu_s"],
        "loss": measured["loss"],
        "step_seconds": seconds,
    }


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C does, so that the network is taken down."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
