# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks soak``: a long training with everything on, after which no rank may use
more than before.

At intervals each rank counts what it uses. After a warm-up, these counts must not grow:
descriptors, threads and process groups not by one, memory by no more than the noise of an
allocator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.ranks import Ranks, on_loopback
from benchmarks.records import GrowingRecord, Tick, record
from benchmarks.schemes import KNOWN
from benchmarks.training_setup import TrainingSetup

PROGRAM = "benchmarks.soak_training:soak"
SCHEME = "codes-q4"
SHAPE = (2, 1, 2)  # nodes, GPUs of a node, GCDs of a GPU
SETUP = TrainingSetup(layers=2, width=64, context=16, batch=1, lr=1e-3)
# A tenth, or all until after the first checkpoint, is warm-up; tenths at both ends of the rest are
# compared
PART = 10
SAVED_EVERY = 5  # counts from one checkpoint to the next
ALLOWED: Mapping[str, float] = {
    "descriptors": 0.0,
    "threads": 0.0,
    "groups": 0.0,
    "store_keys": 0.0,
    "tensors": 0.0,
    "tensor_bytes": 0.005,  # messages in flight: only the INT8 weights that changed
    "objects": 0.001,
    "blocks": 0.001,  # of Python's allocator: numbers and strings too
    "malloc_bytes": 0.001,
    "resident_bytes": 0.01,  # with what the allocators hold back and cannot fill
}
"""What is counted -> how much of it may be added over the run, as a share of what there was after
the warm-up.
"""


@dataclass(frozen=True)
class Soak:
    """What to train.

    Attributes:
        steps: optimizer steps, of two micro-batches each.
        every: steps from one count to the next, and from one evaluation to the next.
        setup: model, batch and learning rate.

    Raises:
        ValueError: for too few counts to compare their tenths.
    """

    steps: int
    every: int
    setup: TrainingSetup = SETUP

    def __post_init__(self) -> None:
        if self.steps // self.every < 2 * PART:
            raise ValueError(
                f"{self.steps} steps counted every {self.every}: take at least "
                f"{2 * PART * self.every}"
            )

    def settings(self) -> dict[str, Any]:
        """In JSON types, for the ranks and the record."""
        nodes, gpus, dies = SHAPE
        job = KNOWN[SCHEME].job_on(
            {"emulated": {"nodes": nodes, "gpus_per_node": gpus, "gcds_per_gpu": dies}}
        )
        often = {"every": self.every, "saved_every": SAVED_EVERY * self.every}
        return {
            "setup": asdict(self.setup),
            "steps": self.steps,
            **often,
            "warmup": 0,
            "jobs": [job],
        }


def run(wanted: Soak, tick: Tick) -> GrowingRecord:
    """Train.

    Args:
        wanted: what.
        tick: called after each step.

    Yields:
        The record, once: ``samples``, of each count its ``step`` and the counts of each rank;
        ``results``, see :func:`growth`; and how it was measured.

    Raises:
        RuntimeError: if a rank fails.
    """
    settings = wanted.settings()
    samples = list[dict[str, Any]]()

    def hear(job: Mapping[str, Any], event: str, **stored: Any) -> None:
        if event == "held":
            samples.append(stored)
        tick(f"step {len(samples) * wanted.every}", int(event == "step"))

    nodes, gpus, dies = SHAPE
    with (
        tempfile.TemporaryDirectory(prefix="zero-topo-soak-") as folder,
        Ranks(
            PROGRAM, {**settings, "folder": folder}, on_loopback(nodes * gpus * dies, gpus * dies)
        ) as ranks,
    ):
        for _, end in ranks.results(settings["jobs"], hear):
            yield record("soak", settings, {"results": growth(samples), "samples": samples, **end})


def growth(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was added to each thing that is counted, on the rank with the most added.

    Args:
        samples: with ``ranks``: the counts of each.

    Returns:
        For each key of :data:`ALLOWED`: ``name``; ``before`` and ``after``, means of the first and
        the last tenth of the samples after the warm-up; the share ``added``; the share ``allowed``;
        and whether it is ``flat``.
    """
    part = len(samples) // PART
    found = []
    kept = samples[max(part, SAVED_EVERY + 1) :]
    for name, allowed in ALLOWED.items():
        if name not in kept[0]["ranks"][0]:  # of a record of before it was counted
            continue
        by_rank = [
            [sample["ranks"][rank][name] for sample in kept]
            for rank in range(len(kept[0]["ranks"]))
        ]
        ends = [(sum(counts[:part]) / part, sum(counts[-part:]) / part) for counts in by_rank]
        before, after = max(ends, key=lambda pair: pair[1] / pair[0])
        added = after / before - 1
        found.append(
            {"name": name, "before": before, "after": after, "added": added, "allowed": allowed}
        )
        found[-1]["flat"] = added <= allowed
    return found
