# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks convergence``: the loss of every scheme against stock ZeRO-3, run by run the same data.

Every scheme starts from the same weights as stock and sees the same batches, once for each seed. A difference says
something only beside the *chaos floor*: stock against itself after a change of the initial weights by 1e-6, which
training amplifies as it amplifies any rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.ranks import Ranks, on_loopback
from benchmarks.training_setup import TrainingSetup
from zero_topo.bench.records import GrowingRecord, Tick, record
from zero_topo.bench.schemes import BenchScheme
from zero_topo.topology.presets import emulated

PROGRAM = "benchmarks.training:train_all"
STOCK = "stock"
CHAOS = "chaos"
CHANGE = 1e-6
LAST_PART = 10  # the last tenth of a run
Curves = Mapping[str, Mapping[int, Mapping[str, Any]]]


@dataclass(frozen=True)
class Convergence:
    """What to train.

    Attributes:
        schemes: compared with stock, which is trained in any case, as is the chaos floor.
        setup: model, batch and learning rate.
        steps: optimizer steps of each run.
        seeds: of weights and data, one run each.
        warmup: steps until the full learning rate.
        micro_batches: per optimizer step.
        shape: nodes, GPUs of a node, dies of a GPU.
        floors: the first so many seeds also train the chaos floor.

    Raises:
        ValueError: for a scheme that the config refuses, or too few steps or seeds.
    """

    schemes: tuple[BenchScheme, ...]
    setup: TrainingSetup
    steps: int
    seeds: tuple[int, ...]
    warmup: int = 10
    micro_batches: int = 1
    shape: tuple[int, int, int] = (2, 2, 2)
    floors: int = 3

    def __post_init__(self) -> None:
        if self.steps < LAST_PART or not self.seeds:
            raise ValueError(f"{self.steps} steps with {len(self.seeds)} seeds: train at least {LAST_PART} with one")
        for scheme in self.schemes:
            scheme.resolve(emulated(*self.shape))

    def runs(self) -> list[tuple[BenchScheme, float]]:
        """Each scheme with the change of its initial weights."""
        stock = BenchScheme(STOCK, None)
        others = [scheme for scheme in self.schemes if scheme.name != STOCK]
        return [(stock, 0.0), (BenchScheme(CHAOS, None), CHANGE), *((scheme, 0.0) for scheme in others)]

    def settings(self) -> dict[str, Any]:
        """In JSON types, for the ranks and the record."""
        nodes, gpus, dies = self.shape
        topology = {"emulated": {"nodes": nodes, "gpus_per_node": gpus, "gcds_per_gpu": dies}}
        jobs = [
            {**scheme.job_on(topology), "seed": seed, "change": change}
            for index, seed in enumerate(self.seeds)
            for scheme, change in self.runs()
            if not change or index < self.floors
        ]
        common = {"steps": self.steps, "warmup": self.warmup, "micro_batches": self.micro_batches}
        return {"setup": asdict(self.setup), **common, "jobs": jobs}

    def ticks(self) -> int:
        """Optimizer steps that :func:`run` announces, one tick each."""
        return self.steps * len(self.settings()["jobs"])


def run(wanted: Convergence, tick: Tick) -> GrowingRecord:
    """Train everything.

    Args:
        wanted: what.
        tick: called after each step, with a few words and the steps done since.

    Yields:
        The record so far, after each run: ``results``, one for each scheme; ``curves``, scheme -> seed -> losses; and
        how it was measured.

    Raises:
        ValueError: if a scheme is refused.
        RuntimeError: if a rank fails.
    """
    settings = wanted.settings()
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    nodes, gpus, dies = wanted.shape

    def stepped(job: Mapping[str, Any], event: str) -> None:
        tick(f"{job['scheme']}, seed {job['seed']}", 1)

    tick("starting the ranks", 0)
    with Ranks(PROGRAM, settings, on_loopback(nodes * gpus * dies, gpus * dies)) as ranks:
        for job, curve in ranks.results(settings["jobs"], stepped):
            curves.setdefault(job["scheme"], {})[job["seed"]] = curve
            losses = {
                scheme: {str(seed): found["losses"] for seed, found in seeds.items()}
                for scheme, seeds in curves.items()
            }
            yield record("convergence", settings, {"results": compare(curves), "curves": losses})


def compare(curves: Curves) -> list[dict[str, Any]]:
    """For each scheme its losses and their relative differences from stock with the same seed.

    Args:
        curves: scheme -> seed -> ``losses`` of the steps and ``evaluation`` loss.

    Returns:
        One object for each scheme, stock first: for the last tenth of the run (``last``), all of it (``overall``) and
        the evaluation at its end (``evaluation``) the mean ``loss`` over seeds, and the ``difference``: ``mean`` over
        seeds, ``worst`` (of the largest magnitude), and ``by_seed``, as shares of stock's loss; and ``crossing_bytes``,
        what a rank sent out of its node in a step for sync and publish, the mean over ranks, steps and seeds, or None.
    """
    measures: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "last": lambda run: _mean(run["losses"][-max(1, len(run["losses"]) // LAST_PART) :]),
        "overall": lambda run: _mean(run["losses"]),
        "evaluation": lambda run: float(run["evaluation"]),
    }
    results = []
    for scheme, seeds in curves.items():
        row: dict[str, Any] = {"scheme": scheme}
        for name, measure in measures.items():
            by_seed = {seed: measure(run) / measure(curves[STOCK][seed]) - 1 for seed, run in seeds.items()}
            difference: dict[str, Any] = {
                "mean": _mean(list(by_seed.values())),
                "worst": max(by_seed.values(), key=abs),
            }
            row[name] = {"loss": _mean([measure(run) for run in seeds.values()]), "difference": difference}
            difference["by_seed"] = by_seed
        crossing = [run["crossing_bytes"] for run in seeds.values()]
        row["crossing_bytes"] = None if None in crossing else _mean(crossing)
        results.append(row)
    return results


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
