# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Breaks a copy of the package at random, one operator, number or branch at a time, and asks whether a test sees it.

python -m tests.mutants [--rooms ROOM,...] [--draw N] [--jobs N] [TEST...]

Cosmic Ray makes the mutants. `.coverage`, which `make test-coverage` leaves, says which tests run a line: they are what
a mutant of that line is run against, the most specific first; launches, if none of those that the coverage saw did.
Without `--draw`, what is left in the record is run: what waits, and what survived and is not judged. It can be ended at
any time.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import importlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests/data/mutants.json"
ROOMS = {
    "plan": "plan.py",
    "quant": "quant/[!t]*.py",  # not Triton's kernels, which the interpreter runs in minutes
    "collectives": "collectives/*.py",
    "sync": "sync/*.py",
    "engine": "engine/*.py",
    "hook": "hook/*.py",
}
SEED = 17
TESTS = 60
"""At most so many tests for one mutant."""
LAUNCHED = {
    "collectives/measure.py": ("tests/e2e/test_measure.py",),
    "collectives/transport.py": ("tests/e2e/test_mpi.py",),
    "": (
        "tests/e2e/test_launcher_suite.py",
        "--launcher-ranks=4",
        "--launcher-k=test_parity or test_monitor or test_saving or test_accounting",
    ),
}
"""The tests of what launched ranks alone run, by how a file's name ends."""
CPU_SECONDS, SECONDS, BYTES = 120, 900, 24 << 30
"""Limits of one mutant's tests."""


class Mutant(NamedTuple):
    """One change of one file: the lines that go and those that come instead, from a line on."""

    room: str
    file: str
    line: int
    was: str
    now: str

    def text(self) -> str:
        """The file with the change; the place that is nearest, if the lines stand in several."""
        lines = (ROOT / self.file).read_text().splitlines()
        old = self.was.splitlines()
        found = [i for i in range(len(lines)) if lines[i : i + len(old)] == old]
        if not found:
            sys.exit(f"{self.file}:{self.line} is no longer {self.was!r}: draw a new sample")
        at = min(found, key=lambda i: abs(i + 1 - self.line))
        return "\n".join([*lines[:at], *self.now.splitlines(), *lines[at + len(old) :]]) + "\n"


def drawn(room: str, each: int) -> list[Mutant]:
    """A sample of a room: places in the code, each once, and one of the mutations there."""
    from cosmic_ray.commands.init import _all_work_items

    files = sorted((ROOT / "zero_topo").glob(ROOMS[room]))
    places = defaultdict(list)
    for item in _all_work_items(files, {}):
        (spec,) = item.mutations
        places[spec.module_path, spec.start_pos, spec.end_pos].append(spec)
    chance = random.Random(f"{SEED} {room}")
    mutants: list[Mutant] = []
    for place in chance.sample(sorted(places), len(places)):
        mutant = mutated(room, chance.choice(places[place])) if len(mutants) < each else None
        if mutant and mutant not in mutants:
            mutants.append(mutant)
    return mutants


def mutated(room: str, spec: Any) -> Mutant | None:
    """What a mutation does to the text; None if it is no Python, or if only annotations differ, which are not run."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    path = Path(spec.module_path)
    old = path.read_text()
    new = mutate_code(old, get_operator(spec.operator_name)(), spec.occurrence)
    try:
        if code_of(old) == code_of(new):
            return None
    except SyntaxError:
        return None
    before, after = old.splitlines(), new.splitlines()
    steps = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    ((_, i, j, k, m),) = [step for step in steps if step[0] != "equal"]
    return Mutant(room, str(path.relative_to(ROOT)), i + 1, "\n".join(before[i:j]), "\n".join(after[k:m]))


def code_of(text: str) -> str:
    """A module without its annotations."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(tree)


@cache
def runners() -> dict[str, dict[int, set[str]]]:
    """The tests that ran each line of each file of the package."""
    from coverage import CoverageData

    data = CoverageData(str(ROOT / ".coverage"))
    data.read()
    return {
        name[name.rindex("/zero_topo/") + 1 :]: {
            line: {test.rpartition("|")[0] for test in tests if test}
            for line, tests in data.contexts_by_lineno(name).items()
        }
        for name in data.measured_files()
    }


@cache
def lines_of(file: str = "") -> Counter[str]:
    """How many lines of a file of the package, or of all, each test ran."""
    return Counter(
        test for name, lines in runners().items() if file in ("", name) for tests in lines.values() for test in tests
    )


def tests_of(mutant: Mutant) -> list[str]:
    """The tests that ran the statement, those that ran little but its file first. If it runs when its file is imported:
    those of the smallest definition around it that tests run."""
    lines, ran, every = runners().get(mutant.file, {}), lines_of(mutant.file), lines_of()
    line = mutant.line + mutant.was.count("\n")
    nodes = [node for node in ast.walk(ast.parse((ROOT / mutant.file).read_text())) if isinstance(node, ast.stmt)]
    around = sorted((node for node in nodes if line in whole(node)), key=lambda node: len(whole(node)))
    body = getattr(around[0], "body", None) if around else None
    spans = [range(whole(node).start, body[0].lineno) if body else whole(node) for node in around[:1]]
    if not any(isinstance(node, ast.FunctionDef) for node in around[1:]):
        spans += [*map(whole, around), range(10**6)]
    found = ({test for at in span for test in lines.get(at, ())} for span in spans)
    return sorted(next(filter(None, found), ()), key=lambda test: (-ran[test] / every[test], test))[:TESTS]


def launched(mutant: Mutant) -> list[str]:
    """The launches that run its file."""
    return list(next(words for name, words in LAUNCHED.items() if mutant.file.endswith(name)))


def whole(node: ast.stmt) -> range:
    """The lines of a statement, from its first decorator on."""
    decorators = getattr(node, "decorator_list", [])
    return range(min([node.lineno, *(found.lineno for found in decorators)]), (node.end_lineno or node.lineno) + 1)


def copied(to: Path) -> Path:
    """A copy of the checkout, and the bytecode of its tests."""
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in names.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    return to


def started(tree: Path, words: Sequence[str]) -> int:
    """Begin the tests in a copy, in a process that has torch and DeepSpeed already: its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    status = 3
    try:
        log = os.open(tree / ".mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "zero_topo")]:
            del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0", "--tb=line"]
        status = int(pytest.main([*options, *words]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def outcomes(mutants: Sequence[Mutant], jobs: int, words: Sequence[str]) -> Iterator[tuple[Mutant, str]]:
    """Each mutant, as it ends: `killed`, `survived`, or `unclear`: tests fail without it."""
    for name in ("torch", "deepspeed", "pytest", "hypothesis", "numpy", "pydantic", "typer", "rich.console"):
        importlib.import_module(name)
    gc.freeze()
    waiting, running = list(reversed(mutants)), dict[int, tuple[Mutant, Path, list[str], float]]()
    with tempfile.TemporaryDirectory(prefix="zero-topo-mutants-") as folder:
        trees = [copied(Path(folder) / str(number)) for number in range(jobs)]
        while waiting or running:
            while waiting and trees:
                mutant = waiting.pop()
                tests = [*words] or tests_of(mutant) or launched(mutant)
                tree = trees.pop()
                (tree / mutant.file).write_text(mutant.text())
                running[started(tree, tests)] = mutant, tree, tests, time.monotonic() + SECONDS
            for pid, (mutant, tree, tests, end) in list(running.items()):
                status = ended(pid, end)
                if status is not None:
                    del running[pid]
                    shutil.copy2(ROOT / mutant.file, tree / mutant.file)
                    trees.append(tree)
                    yield mutant, OUTCOMES.get(status) or clean(tree, tests)
            time.sleep(0.2)


OUTCOMES = {0: "survived", 1: "killed"}


def ended(pid: int, end: float) -> int | None:
    """The exit status of a mutant's tests, -9 once their time is over; None while they run. Nothing of them stays."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done and time.monotonic() < end:
        return None
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status if done else os.waitpid(pid, 0)[1])


def clean(tree: Path, tests: Sequence[str]) -> str:
    """After a limit, or if pytest found no test: the mutant did it if the same tests pass without it."""
    pid, end = started(tree, tests), time.monotonic() + SECONDS
    while (status := ended(pid, end)) is None:
        time.sleep(0.2)
    return "unclear" if status else "killed"


def main(words: Sequence[str] | None = None) -> int:
    """Draw a sample, if asked to; run what has not been killed or judged; write the record."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="which, by commas")
    parser.add_argument("--draw", type=int, metavar="N", help="first draw a new sample of N mutants of each room")
    parser.add_argument("--jobs", type=int, default=2, help="at once (2)")
    parser.add_argument("tests", nargs="*", help="these instead of those that ran the line, as for pytest")
    args = parser.parse_args(words)
    rooms = args.rooms.split(",")
    record = json.loads(RECORD.read_text())
    if args.draw:
        record |= {"seed": SEED, "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU"}
        for room in rooms:
            mutants = [mutant._asdict() | {"outcome": "waits", "judgement": ""} for mutant in drawn(room, args.draw)]
            record["rooms"][room] = {"mutants": len(mutants), "left": mutants}
        _write(record)
    rows = [row for room in rooms for row in record["rooms"][room]["left"] if not row["judgement"]]
    todo = [Mutant(*(row[name] for name in Mutant._fields)) for row in rows]
    for mutant, outcome in outcomes(todo, args.jobs, args.tests):
        print(outcome, *mutant, sep=" | ", flush=True)
        left = record["rooms"][mutant.room]["left"]
        (row,) = [row for row in left if mutant._asdict().items() <= row.items()]
        row["outcome"] = outcome
        if outcome == "killed":
            left.remove(row)
        _write(record)
    print(*(f"{room}: {killed} of {ran} killed" for room, (killed, ran) in figures(record).items()), sep="\n")
    return 0


def figures(record: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Of each room of a record: mutants killed, and mutants run."""
    counted = {}
    for name, room in record["rooms"].items():
        waiting = sum(row["outcome"] == "waits" for row in room["left"])
        counted[name] = room["mutants"] - len(room["left"]), room["mutants"] - waiting
    return counted


def _write(record: dict[str, Any]) -> None:
    record["when"] = datetime.now(UTC).date().isoformat()
    record["versions"] = {name: version(name) for name in ("torch", "deepspeed", "cosmic-ray", "coverage")}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
