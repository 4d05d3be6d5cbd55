# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks cluster``: optimizer steps of every scheme on an emulated cluster, counted
by the kernel.

1. build the network, start the ranks once;
2. for every scheme and number of micro-batches: warm up on fast links, wait until no byte moves,
   read the counters, take the steps, wait and read again;
3. compare the bytes and the times with those of the cost formulas and the links' rates.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.emulated_cluster.counters import Snapshot, Traffic, between
from benchmarks.emulated_cluster.network import FAST, EmulatedNetwork, signal_handled
from benchmarks.emulated_cluster.spec import Spec
from benchmarks.ranks import Address, Place, Ranks, place
from benchmarks.records import GrowingRecord, Spread, Tick, machine, record
from benchmarks.schemes import BenchScheme
from benchmarks.training_setup import TrainingSetup
from zero_topo.config import deepspeed_problems

PROGRAM = "benchmarks.training:measure_all"
PORT = 29500


@dataclass(frozen=True)
class ClusterBench:
    """What to measure.

    Attributes:
        spec: the cluster.
        schemes: rows of the table.
        micro_batches: per optimizer step; each scheme is measured with each.
        setup: model and DeepSpeed config.
        steps: measured optimizer steps.
        warmup: steps before them, all but the last on fast links: Adam's first updates change more
            of the weights.

    Raises:
        ValueError: for a scheme that the config refuses, or numbers that are too small.
    """

    spec: Spec
    schemes: tuple[BenchScheme, ...]
    micro_batches: tuple[int, ...]
    setup: TrainingSetup
    steps: int = 5
    warmup: int = 1

    def __post_init__(self) -> None:
        if min(self.micro_batches, default=0) < 1 or len(set(self.micro_batches)) < len(
            self.micro_batches
        ):
            raise ValueError(
                f"micro-batches {list(self.micro_batches)} must be positive and different numbers"
            )
        if self.steps < 2 or self.warmup < 1:
            raise ValueError(
                f"{self.steps} steps after {self.warmup} to warm up: measure at least 2 after at "
                "least 1"
            )
        for scheme in self.schemes:
            if self.spec.gcds_per_gpu % scheme.tensor or self.setup.heads % scheme.tensor:
                raise ValueError(
                    f"scheme {scheme.name!r}: {scheme.tensor} ranks share each layer, which must "
                    f"divide the GCDs of a GPU ({self.spec.gcds_per_gpu}) and the model's heads "
                    f"({self.setup.heads}); take another --spec or --params"
                )
            config = scheme.resolve(self.spec.topology())
            dense = (
                0
                if config is None
                else getattr(config.sync, "start", 0) + getattr(config.sync, "warmup", 0)
            )
            if dense > self.warmup:
                raise ValueError(
                    f"scheme {scheme.name!r}: its first {dense} steps send more than the later "
                    "ones, and only "
                    f'{self.warmup} go before the measurement; set its "start" and "warmup" to 0'
                )
            block = scheme.job_on(self.spec.topology_block())["block"]
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
            "jobs": [
                self._job(scheme, count) for count in self.micro_batches for scheme in self.schemes
            ],
        }

    def _job(self, scheme: BenchScheme, micro_batches: int) -> dict[str, Any]:
        job = scheme.job_on(self.spec.topology_block())
        return {**job, "ring": scheme.ring, "micro_batches": micro_batches}


def run(bench: ClusterBench, tick: Tick) -> GrowingRecord:
    """Measure everything.

    Args:
        bench: what.
        tick: called after each step and whenever something takes long, with a few words and the
            passes done since.

    Yields:
        The record so far, after each result: ``results``, one for each scheme and number of
        micro-batches; ``message_bytes`` (the model in 16 bits); ``spec``; and how it was measured.

    Raises:
        ValueError: where no cluster can be built, or if a scheme is refused.
        RuntimeError: if a rank fails.
    """
    host = machine()
    settings = bench.settings()
    spec = bench.spec
    results: list[dict[str, Any]] = []
    tick("building the network", 0)
    # SIGTERM ends the block as Ctrl-C does, so that the network is taken down
    with (
        signal_handled(signal.SIGTERM, signal.default_int_handler),
        EmulatedNetwork(spec) as network,
    ):
        tick("starting the ranks", 0)
        with Ranks(PROGRAM, settings, _places(network)) as ranks:
            observer = _Observer(network, ranks, tick)
            for _, measured in ranks.results(settings["jobs"], observer.hear):
                results.append(assemble(measured, observer.traffic()))
                content = {
                    "results": results,
                    "message_bytes": bench.setup.message_bytes,
                    "spec": spec.to_json(),
                    "compute_s_per_micro_batch": observer.compute_s,
                    "products_in_fp32": observer.products_in_fp32,
                }
                yield {**record("cluster", settings, content), "machine": host}


def dropped(results: Sequence[Mapping[str, Any]]) -> str | None:
    """One line that names the results spoiled by dropped packets, or None."""
    spoiled = [
        f"{row['scheme']} at {row['micro_batches']} ({row['drops']})"
        for row in results
        if row["drops"]
    ]
    return (
        f"packets were dropped, so these times are not valid: {', '.join(spoiled)}"
        if spoiled
        else None
    )


def _places(network: EmulatedNetwork) -> list[Place]:
    spec = network.spec
    address = Address("eth0", spec.address(0), PORT)
    ranks = range(spec.world_size)
    return [
        place(rank, spec.world_size, spec.ranks_per_node, address, network.space(rank))
        for rank in ranks
    ]


class _Observer:
    """Serves rank 0 during a run: sets the links' rates, and reads the counters when all ranks
    stand still.

    Attributes:
        compute_s: forward and backward pass of one micro-batch.
        products_in_fp32: whether its BF16 matrix products are computed in FP32.
    """

    def __init__(self, network: EmulatedNetwork, ranks: Ranks, tick: Tick) -> None:
        self._network = network
        self._ranks = ranks
        self._tick = tick
        self._snapshots: list[Snapshot] = []
        self.compute_s = 0.0
        self.products_in_fp32 = False

    def hear(
        self, job: Mapping[str, Any], event: str, seconds: float = 0.0, fp32: bool = False
    ) -> None:
        """Do what rank 0 asks for during a job, and answer it."""
        if event == "compute":
            self.compute_s = seconds
            self.products_in_fp32 = fp32
            return
        if event in ("step", "build"):
            count = job["micro_batches"]
            passes = count if event == "step" else 0
            self._tick(f"{job['scheme']}, {count} micro-batch{'es' * (count > 1)}", passes)
        if event == "step":
            return
        if event in ("begin", "end"):
            self._snapshots.append(self._network.at_rest())
        else:
            self._network.set_rates(FAST if event == "build" else self._network.spec.rates_mbit)
        self._ranks.reply({})

    def traffic(self) -> Traffic:
        """Between the beginning and the end of the job that has ended."""
        before, after = self._snapshots[-2:]
        return between(self._network.spec, before, after)


def assemble(measured: Mapping[str, Any], traffic: Traffic) -> dict[str, Any]:
    """One result, from what rank 0 reported and the kernel counted over the measured steps; bytes
    are per step.

    Args:
        measured: the message of ``training.measure``.
        traffic: between the two fences.
    """
    seconds = measured["step_seconds"]
    return {
        "scheme": measured["scheme"],
        "micro_batches": measured["micro_batches"],
        "step_s": Spread.of(seconds).to_json(),
        "uplink_bytes_per_step_per_node": round(traffic.uplink / measured["counted_steps"]),
        "drops": traffic.drops,
        "phases": measured["phases"],
        "uplink_formula": round(measured["formula"]),
        "loss": measured["loss"],
        "step_seconds": seconds,
    }
