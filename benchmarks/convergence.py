# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks convergence``: the loss of every scheme against stock ZeRO-3, run by run
the same data.

Every scheme starts from the same weights as stock and sees the same batches, once for each seed. A
difference says something only if it exceeds the *chaos floor*: stock against itself after a change
of the initial weights by 1e-6, which training amplifies as it amplifies any rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.ranks import Ranks, on_loopback
from benchmarks.records import GrowingRecord, Tick, record
from benchmarks.schemes import PLAIN, BenchScheme
from benchmarks.training_setup import TrainingSetup
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
        shape: nodes, GPUs of a node, GCDs of a GPU.
        floors: number of seeds that also train the chaos floor.
        before: a record of trainings with the same settings: what it has of the schemes and seeds
            is kept and not trained again.
        again: schemes to train again, with stock, at every rate: for one whose code has changed.
        one_process: train in plain data parallelism, without DeepSpeed, by ranks that are threads
            (``in_process.py``).

    Raises:
        ValueError: for a scheme that the config refuses, too few steps or seeds, or a record of
            other trainings.
    """

    schemes: tuple[BenchScheme, ...]
    setup: TrainingSetup
    steps: int
    seeds: tuple[int, ...]
    warmup: int = 10
    micro_batches: int = 1
    shape: tuple[int, int, int] = (2, 2, 2)
    floors: int = 3
    before: Mapping[str, Any] | None = None
    again: tuple[str, ...] = ()
    one_process: bool = False

    def __post_init__(self) -> None:
        if self.steps < LAST_PART or not self.seeds:
            raise ValueError(
                f"{self.steps} steps with {len(self.seeds)} seeds: train at least {LAST_PART} with "
                "one"
            )
        for scheme in self.schemes:
            scheme.resolve(emulated(*self.shape))
        quantized = any(of.block and of.block.get("quantize") != PLAIN for of in self.schemes)
        if self.one_process and (
            self.setup.bf16 or self.micro_batches > 1 or self.shape[1:] != (1, 1) or quantized
        ):
            raise ValueError(
                "in one process only sync and the optimizer differ: give --fp32, a shape such as "
                "4x1x1, one micro-batch, and schemes that quantize nothing else"
            )
        unknown = set(self.again) - {_plain(scheme.name) for scheme in self.schemes if self.before}
        if unknown:
            raise ValueError(
                f"--again {', '.join(sorted(unknown))}: only what --schemes names and --more keeps"
            )
        if self.before is not None:
            mine = self.settings()
            kept = self.before["settings"]
            # Older records lack newer fields
            kept = {**kept, "setup": asdict(TrainingSetup(**kept["setup"]))}
            other = [key for key in mine if key != "jobs" and mine[key] != kept.get(key)]
            both = {job["scheme"] for job in kept["jobs"]} & {job["scheme"] for job in mine["jobs"]}
            first, before = (_first_jobs(jobs, both) for jobs in (mine["jobs"], kept["jobs"]))
            other += ["schemes"] * (first != before)
            if other:
                raise ValueError(
                    f"the record is of other trainings, its {', '.join(other)} differ: give the "
                    "same again"
                )
            if not self.left():
                raise ValueError(
                    f"the record has all {len(self.seeds)} seeds of these schemes: ask for more"
                )

    def runs(self) -> list[BenchScheme]:
        """Stock, the chaos floor, and the other schemes."""
        others = [scheme for scheme in self.schemes if scheme.name != STOCK]
        return [BenchScheme(STOCK, None), BenchScheme(CHAOS, None, change=CHANGE), *others]

    def settings(self) -> dict[str, Any]:
        """In JSON types, for the ranks and the record."""
        nodes, gpus, dies = self.shape
        topology = {"emulated": {"nodes": nodes, "gpus_per_node": gpus, "gcds_per_gpu": dies}}
        jobs = [
            {**scheme.job_on(topology), "seed": seed, "change": scheme.change}
            for index, seed in enumerate(self.seeds)
            for scheme in self.runs()
            if scheme.name != CHAOS or index < self.floors
        ]
        common = {"steps": self.steps, "warmup": self.warmup, "micro_batches": self.micro_batches}
        alone = {"one_process": True} if self.one_process else {}
        return {"setup": asdict(self.setup), **common, **alone, "jobs": jobs}

    def left(self) -> list[dict[str, Any]]:
        """The jobs that :attr:`before` lacks, those of :attr:`again`, and stock of their seeds: a
        run is compared with stock on the same machine.
        """
        jobs: list[dict[str, Any]] = self.settings()["jobs"]
        kept = self.before["curves"] if self.before else {}

        def wanted(job: Mapping[str, Any]) -> bool:
            has = str(job["seed"]) in kept.get(job["scheme"], ())
            return not has or _plain(job["scheme"]) in self.again

        seeds = {job["seed"] for job in jobs if wanted(job)}
        return [
            job for job in jobs if wanted(job) or (job["scheme"] == STOCK and job["seed"] in seeds)
        ]

    def ticks(self) -> int:
        """Optimizer steps that :func:`run` announces, one tick each."""
        return self.steps * len(self.left())


def run(wanted: Convergence, tick: Tick) -> GrowingRecord:
    """Train everything.

    Args:
        wanted: what.
        tick: called after each step, with a few words and the steps done since.

    Yields:
        The record so far, after each run: ``results``, one for each scheme; ``curves``, scheme ->
        seed -> losses; and how it was measured.

    Raises:
        ValueError: if a scheme is refused.
        RuntimeError: if a rank fails.
    """
    settings = wanted.settings()
    jobs = wanted.left()
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    nodes, gpus, dies = wanted.shape

    def stepped(job: Mapping[str, Any], event: str) -> None:
        tick(f"{job['scheme']}, seed {job['seed']}", 1)

    tick("starting the ranks", 0)
    with ExitStack() as stack:
        if wanted.one_process:
            from benchmarks.in_process import train  # imports torch

            results: Iterator[Any] = ((job, train(settings, nodes, stepped, job)) for job in jobs)
        else:
            places = on_loopback(nodes * gpus * dies, gpus * dies)
            results = stack.enter_context(
                Ranks(PROGRAM, settings | {"jobs": jobs}, places)
            ).results(jobs, stepped)
        for job, curve in results:
            curves.setdefault(job["scheme"], {})[job["seed"]] = curve
            losses = {
                scheme: {str(seed): found["losses"] for seed, found in seeds.items()}
                for scheme, seeds in curves.items()
            }
            made = record("convergence", settings, {"results": compare(curves), "curves": losses})
            yield made if wanted.before is None else joined(wanted.before, made)


def joined(before: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Two records with the same settings, of other schemes or seeds, as one, its head the newer's;
    the older's in ``before``.

    Of a run that both have the newer's is taken.
    """
    newer = {row["scheme"]: row for row in made["results"]}
    results = [_joined_row(row, newer.pop(row["scheme"], None)) for row in before["results"]]
    curves = {
        name: before["curves"].get(name, {}) | made["curves"].get(name, {})
        for name in before["curves"] | newer
    }
    head = {key: before[key] for key in ("when", "machine", "versions")}
    heads = [*before.get("before", []), head]
    newest = made["settings"]["jobs"]
    again = {(job["scheme"], job["seed"]) for job in newest}
    kept = [j for j in before["settings"]["jobs"] if (j["scheme"], j["seed"]) not in again]
    return {
        **made,
        "settings": {**made["settings"], "jobs": [*kept, *newest]},
        "results": [*results, *newer.values()],
        "curves": curves,
        "before": heads,
    }


def _joined_row(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> dict[str, Any]:
    if new is None:
        return dict(old)
    seeds, newer = (set(row["last"]["difference"]["by_seed"]) for row in (old, new))
    kept = len(seeds - newer)
    come = len(newer)

    def weighed(one: float, other: float) -> float:
        return (kept * one + come * other) / (kept + come)

    row: dict[str, Any] = {"scheme": old["scheme"]}
    for name in ("last", "overall", "evaluation"):
        by_seed = old[name]["difference"]["by_seed"] | new[name]["difference"]["by_seed"]
        row[name] = {
            "loss": weighed(old[name]["loss"], new[name]["loss"]),
            "difference": _difference(by_seed),
        }
    crossing = (old["crossing_bytes"], new["crossing_bytes"])
    return {**row, "crossing_bytes": None if None in crossing else weighed(*crossing)}


def _difference(by_seed: Mapping[Any, float]) -> dict[str, Any]:
    values = list(by_seed.values())
    return {"mean": _mean(values), "worst": max(values, key=abs), "by_seed": dict(by_seed)}


def compare(curves: Curves) -> list[dict[str, Any]]:
    """For each scheme its losses and their relative differences from stock with the same seed.

    Args:
        curves: scheme -> seed -> ``losses`` of the steps and ``evaluation`` loss.

    Returns:
        One object for each scheme, stock first: for the last tenth of the run (``last``), all of it
        (``overall``) and the evaluation at its end (``evaluation``) the mean ``loss`` over seeds,
        and the ``difference``: ``mean`` over seeds, ``worst`` (of the largest magnitude), and
        ``by_seed``, as shares of stock's loss; and ``crossing_bytes``, what a rank sent out of its
        node in a step for sync and publish, the mean over ranks, steps and seeds, or None.
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
            by_seed = {
                str(seed): measure(run) / measure(curves[STOCK][seed]) - 1
                for seed, run in seeds.items()
            }
            row[name] = {
                "loss": _mean([measure(run) for run in seeds.values()]),
                "difference": _difference(by_seed),
            }
        crossing = [run["crossing_bytes"] for run in seeds.values()]
        row["crossing_bytes"] = None if None in crossing else _mean(crossing)
        results.append(row)
    return results


def _plain(name: str) -> str:
    """Of a scheme, without its rate."""
    return name.partition("@")[0]


def _first_jobs(jobs: Sequence[Mapping[str, Any]], schemes: Set[str]) -> dict[str, Any]:
    """A job of each of the schemes, the first of it, without its seed."""
    first: dict[str, Any] = {}
    for job in jobs:
        if job["scheme"] in schemes:
            first.setdefault(job["scheme"], {**job, "seed": None})
    return first


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
