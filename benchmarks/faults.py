# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks faults``: ranks die, raise, hang, slow down, compute NaN, nodes lose their
network; then what?

Each round trains on an emulated cluster of two nodes with two ranks each, started by a launcher on
each node, and meets one fault. It measures how long the others take to say so, and compares what
the run, or its restart from the last checkpoint, computes with a run that nothing happened to: bit
for bit.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.emulated_cluster.network import EmulatedNetwork, signal_handled
from benchmarks.emulated_cluster.spec import LinkRates, Spec
from benchmarks.ranks import Address, environment, place
from benchmarks.records import GrowingRecord, Tick, record

SPEC = Spec("pairs", 2, 1, 2, LinkRates(800, 800, 400))
ANYWHERE = ("killed", "stopped", "raised")
KINDS = (*ANYWHERE, "cut", *ANYWHERE, "nan", *ANYWHERE, "cut", *ANYWHERE, "slow")
ENDED = ("killed", "raised")  # the rank, and then its node's launch
PHASES = ("forward", "backward", "gather_forward", "scatter", "sync", "publish", "save")
STEPS = (1, 2, 3)  # of five: after, before and after a checkpoint
WATCH_S = 2.0
CUT_S = 5.0
PATIENCE_S = 900.0
PORT = 29500
SAID = re.compile("the run .*did not answer|rank 0, .*(does not answer|has not answered)")
OF_KIND = {
    "slow": re.compile("every rank answers; .*faulty_training"),  # at the line that sleeps
    "raised": re.compile(
        "(every rank answers; .*ended by|cannot be written:) RuntimeError: a fault"
    ),
}
Steps = dict[int, list[Any]]


@dataclass(frozen=True)
class Fault:
    """What happens: its kind, in which phase of which step, and on which rank.

    Attributes:
        kind: one of :data:`KINDS`, or "none".
        phase: one of :data:`PHASES`; NaN and what is slow happen in forward.
        step: counted from 0.
        rank: whose fault it is; of "cut" that whose node loses its network.
    """

    kind: str = "none"
    phase: str = "forward"
    step: int = 0
    rank: int = 0


def drawn(rounds: int, seed: int) -> list[Fault]:
    """The kinds by turns, the phases of each by turns in a random order, the rest at random."""
    dice = random.Random(seed)
    phases = {kind: cycle(dice.sample(PHASES, len(PHASES))) for kind in ("cut", *ANYWHERE)}
    return [
        Fault(
            kind,
            next(phases.get(kind, cycle(("forward",)))),
            dice.choice(STEPS),
            dice.randrange(SPEC.world_size),
        )
        for kind in islice(cycle(KINDS), rounds)
    ]


def run(rounds: int, seed: int, tick: Tick) -> GrowingRecord:
    """All rounds.

    Args:
        rounds: how many faults.
        seed: of phases, steps and ranks.
        tick: called after each round.

    Yields:
        The record so far: ``results``, one for each round, see :func:`meet`; and how it was
            measured.

    Raises:
        ValueError: where no cluster can be built.
        RuntimeError: if a round ends in another way than it must.
    """
    settings = {
        "rounds": rounds,
        "seed": seed,
        "spec": SPEC.to_json(),
        "watch_s": WATCH_S,
        "cut_s": CUT_S,
    }
    results: list[dict[str, Any]] = []
    tick("building the network, starting Python", 0)
    with tempfile.TemporaryDirectory(prefix="zero-topo-faults-") as folder, cluster() as nodes:
        tick("the run that nothing happens to", 0)
        undisturbed = whole(nodes, Path(folder) / "undisturbed")
        for number, fault in enumerate(drawn(rounds, seed)):
            tick(f"{fault.kind} in {fault.phase} of step {fault.step}", 0)
            results.append(
                {**asdict(fault), **meet(nodes, Path(folder) / str(number), fault, undisturbed)}
            )
            yield record("faults", settings, {"results": results})
            tick("", 1)


def whole(nodes: Cluster, folder: Path) -> Steps:
    """What a run computes that nothing happens to, or that goes on from the checkpoint in the
    folder.

    Raises:
        RuntimeError: if it does not end well.
    """
    launch = Launch(nodes, folder, Fault())
    for _ in launch.looks():
        pass
    launch.check(0)
    return steps(folder)


def meet(nodes: Cluster, folder: Path, fault: Fault, undisturbed: Steps) -> dict[str, Any]:
    """One round.

    Returns:
        ``told_s``: by rank, the seconds until it reported the fault, if others can see one; where a
        rank ended, those of the other node have to. ``ended_s``: seconds until the launch of a rank
        that ended had ended, else None. ``restarted``, and whether what was computed in the end is
        ``equal``.

    Raises:
        RuntimeError: if the launch ends as it must not, or a rank says nothing.
    """
    launch = Launch(nodes, folder, fault)
    with closing(launch.looks()) as looks:
        if fault.kind == "cut":
            next((look for look in looks if launch.happened), None)
            with nodes.network.cut(fault.rank // SPEC.ranks_per_node):
                (folder / "cut").touch()
                end = time.monotonic() + CUT_S
                next((look for look in looks if time.monotonic() > end), None)
        if fault.kind == "stopped":
            next((look for look in looks if len(launch.reported) == SPEC.world_size - 1), None)
            os.kill(int((folder / "faulty").read_text()), signal.SIGCONT)
        for _ in looks:
            pass
    launch.check(int(fault.kind in ENDED))
    ended_s = time.time() - launch.happened if fault.kind in ENDED else None
    if fault.kind == "nan":
        (folder / "latest").write_text(f"global_step{fault.step // 2 * 2}")
        if fault.step < 2:
            (folder / "latest").unlink()
    restarted = fault.kind in ("nan", *ENDED)
    found = whole(nodes, folder) if restarted else steps(folder)
    return {
        "told_s": launch.reported,
        "ended_s": ended_s,
        "restarted": restarted,
        "equal": found == undisturbed,
    }


def steps(folder: Path) -> Steps:
    """Loss and digest of the weights after each step, of the last run that took it."""
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return {step: bits for step, *bits in map(json.loads, lines)}


@dataclass
class Cluster:
    """The network, and the process that forks the nodes' launchers.

    Attributes:
        launches: how many there were, each with a port of its own.
    """

    network: EmulatedNetwork
    process: subprocess.Popen[str]
    launches: int = 0

    def start(self, node: int, folder: Path, words: list[str]) -> None:
        """Start the launcher of a node; its logs and its status will be in the folder."""
        folder.mkdir(parents=True)
        meeting = Address("eth0", SPEC.address(0), PORT + self.launches)
        first = node * SPEC.ranks_per_node
        count = SPEC.ranks_per_node
        ranks = [
            place(rank, SPEC.world_size, count, meeting).env for rank in range(first, first + count)
        ]
        space = str(self.network.space(first))
        assert self.process.stdin
        job = {"folder": str(folder), "space": space, "ranks": ranks, "words": words}
        print(json.dumps(job, default=dict), file=self.process.stdin, flush=True)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster to fail on.

    Raises:
        ValueError: where none can be built.
    """
    command = [sys.executable, "-m", "benchmarks.faulty_nodes"]
    env = environment() | {"ZERO_TOPO_WATCH_S": str(WATCH_S)}
    with (
        # So that the network is taken down
        signal_handled(signal.SIGTERM, signal.default_int_handler),
        EmulatedNetwork(SPEC) as network,
        subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdout
        while (line := process.stdout.readline()) != "ready\n":
            if not line:
                raise RuntimeError("the launchers' process ended before it was ready")
        yield Cluster(network, process)


class Launch:
    """A training on all nodes, started at once.

    Args:
        nodes: where.
        folder: of the training, made if need be; what earlier launches left there is taken up.
        fault: what happens.

    Attributes:
        happened: when the fault happened, in seconds since the epoch; 0 before.
        reported: rank -> seconds after that until it said so.
    """

    def __init__(self, nodes: Cluster, folder: Path, fault: Fault) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._fault = fault
        self._logs = folder / f"logs {len(list(folder.glob('logs*')))}"
        self.happened = 0.0
        self.reported: dict[int, float] = {}
        words = [str(folder), fault.kind, fault.phase, str(fault.step), str(fault.rank), "both"]
        for node in range(SPEC.nodes):
            nodes.start(node, self._logs / str(node), words)
        nodes.launches += 1

    def looks(self) -> Generator[None, None, None]:
        """Look a few times a second until both launchers have ended, or too much time went by."""
        end = time.monotonic() + PATIENCE_S
        while len(self.statuses()) < SPEC.nodes and time.monotonic() < end:
            self._look()
            yield
            time.sleep(0.05)
        self._look()

    def statuses(self) -> list[str]:
        """Of the launchers that have ended."""
        said = [path.read_text() for path in sorted(self._logs.glob("*/status"))]
        return [status for status in said if status]  # or it is being written

    def said(self, rank: int) -> str:
        """What the rank wrote."""
        node, local = divmod(rank, SPEC.ranks_per_node)
        path = self._logs / str(node) / f"{local}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def check(self, status: int) -> None:
        """Make sure that the launchers ended so, and that each rank that can has said what
        happened.

        Raises:
            RuntimeError: with the ends of all logs.
        """
        kind = self._fault.kind
        ranks = range(SPEC.world_size)
        silent = {
            rank for rank in ranks if kind not in ("none", "nan") and rank not in self.reported
        }
        node = self._fault.rank // SPEC.ranks_per_node
        excused = {rank for rank in ranks if kind in ENDED and rank // SPEC.ranks_per_node == node}
        excused |= {self._fault.rank} if kind == "stopped" else set()
        if self.statuses() != [str(status)] * SPEC.nodes or silent > excused:
            reported = (
                f"{self._fault}: launchers ended with {self.statuses()}, ranks {silent} said "
                "nothing"
            )
            raise RuntimeError(
                "\n".join(
                    [reported, *(f"rank {rank}:\n{self.said(rank)[-2000:]}" for rank in ranks)]
                )
            )

    def _look(self) -> None:
        faulty = self._folder / "faulty"
        if self._fault.kind in ("none", "nan") or not faulty.exists():
            return
        self.happened = faulty.stat().st_mtime
        for rank in set(range(SPEC.world_size)) - set(self.reported):
            if OF_KIND.get(self._fault.kind, SAID).search(self.said(rank)):
                self.reported[rank] = time.time() - self.happened
