# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own stage-3 tests, under the hook: `make test-deepspeed DIR=<a DeepSpeed checkout>`.

`tests/data/deepspeed_suite.json` lists the tests that build a stage-3 engine or `zero.Init` and
pass without a block (`ARGS=--select` finds them anew, for another release; `ARGS="--select PLACE"`
only those of a place). They run with each block of BLOCKS, or as in `ARGS="zero3 PLACE"`. A test
that does not pass has its reason in that file, or the run ends with exit code 1.

The module is also the pytest plugin of these runs. DeepSpeed's tests fork their ranks from a server
process, which imports this module first, and so torch and DeepSpeed once for all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tests.launching import ROOT, _free_shared_memory, free_port, rank_environment

EXPECTED = ROOT / "tests/data/deepspeed_suite.json"
PLACES = (
    "unit/runtime/zero",
    "unit/v1/zero",
    "unit/checkpoint",
    "unit/model_parallelism/test_autotp_training.py::TestAutoTpZeroStage3",
    "unit/v1/moe/test_autoep_grad_parity.py",
    "unit/v1/moe/test_autoep_integration.py",
    "unit/v1/moe/test_autoep_checkpoint.py",
)
FULL = {"weights": None, "secondary": None, "gradients": None}
BLOCKS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "zero3": {"scheme": "zero3", "quantize": FULL},
    "topo": {"scheme": "topo", "quantize": FULL, "debug_checks": True},
    "default": {},
}
"""By name: unmodified DeepSpeed; the same shards; nested shards in FP32; the defaults
with their INT8 and INT4.
"""
REFUSED = re.compile(
    r"(ValueError|ImportError|RuntimeError): .*zero_topo|zero_topo[^\n]*(not "
    r"supported|refused)|ValueError: the "
)
BLOCK, MARK, RESULTS = "ZERO_TOPO_SUITE_BLOCK", "ZERO_TOPO_SUITE_MARK", "ZERO_TOPO_SUITE_RESULTS"
SECONDS = 120  # of a test
CHANCE = "TestDynamicOffloadStates"
"""Tests that compare the memory of a process before and after, which on a CPU is anything."""


def tree_of(ranks: int) -> dict[str, int]:
    """Two nodes, of one GPU with two GCDs if there are four ranks; one or three ranks are one
    node.
    """
    nodes = 2 if ranks % 2 == 0 else 1
    return {"nodes": nodes, "gpus_per_node": 1, "gcds_per_gpu": ranks // nodes}


def _in_rank() -> None:
    """Put the block into every stage-3 config of this process, and leave a mark that there
    was one.
    """
    import deepspeed

    block: dict[str, Any] | None = json.loads(os.environ[BLOCK])
    if block is not None:
        import zero_topo  # noqa: F401

    def configured(arguments: dict[str, Any], at: int | None, args: list[Any]) -> None:
        names = ("config", "config_params", "config_dict_or_path")
        name = next((n for n in names if arguments.get(n) is not None), None)
        found = arguments[name] if name else args[at] if at is not None and len(args) > at else None
        if isinstance(found, str | os.PathLike):
            found = json.loads(Path(found).read_text())
        if not isinstance(found, dict) or found.get("zero_optimization", {}).get("stage") != 3:
            return
        Path(os.environ[MARK]).touch()
        if block is None:
            return
        where = {"topology": {"emulated": tree_of(int(os.environ.get("WORLD_SIZE", "1")))}}
        found = found | {"zero_topo": where | block}
        if name:
            arguments[name] = found
        else:
            args[at or 0] = found

    initialize, init = deepspeed.initialize, deepspeed.zero.Init.__init__

    def with_block(*args: Any, **arguments: Any) -> Any:
        configured(arguments, None, [])
        return initialize(*args, **arguments)

    def init_with_block(self: Any, *args: Any, **arguments: Any) -> None:
        Path(os.environ[MARK]).touch()
        configured(arguments, None, [])
        init(self, *args, **arguments)

    deepspeed.initialize, deepspeed.zero.Init.__init__ = with_block, init_with_block


if BLOCK in os.environ:
    _in_rank()


# -- the plugin, in pytest's own process -----------------------------------------------------------


def pytest_configure() -> None:
    """Let the ranks be forked of a process that has imported everything."""
    multiprocessing.set_forkserver_preload(["tests.deepspeed_suite"])


def pytest_runtest_setup(item: Any) -> None:
    """A port of this test's own, whose shared memory can be found again."""
    import unit.common  # type: ignore[import-not-found]

    port = free_port()
    item.zero_topo_port = port
    unit.common.get_master_port = lambda *_, **__: str(port)
    Path(os.environ[MARK]).unlink(missing_ok=True)
    with open(os.environ[RESULTS], "a") as results:
        results.write(
            json.dumps({"id": item.nodeid, "outcome": "hung", "stage3": True, "text": ""}) + "\n"
        )


def pytest_runtest_logreport(report: Any) -> None:
    """One line of JSON for each test: the last for an id holds, so one that hangs stays as setup
    wrote it.
    """
    if report.when != "call" and report.outcome == "passed":
        return
    text = "" if report.passed else str(report.longrepr)
    row = {
        "id": report.nodeid,
        "outcome": report.outcome,
        "stage3": Path(os.environ[MARK]).exists(),
        "text": text,
    }
    with open(os.environ[RESULTS], "a") as results:
        results.write(json.dumps(row) + "\n")


def pytest_runtest_teardown(item: Any) -> None:
    """DeepSpeed's CPU collectives leave 66 MB a rank."""
    if hasattr(item, "zero_topo_port"):  # else a fixture was missing
        _free_shared_memory(item.zero_topo_port)


# -- the command -----------------------------------------------------------------------------------


def run(
    checkout: Path, name: str, tests: Sequence[str], words: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Results by id of some tests with a block; a test that hangs ends pytest, which goes on with
    those after it.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        env = rank_environment(
            **{BLOCK: json.dumps(BLOCKS[name]), MARK: f"{folder}/stage3", RESULTS: str(results)},
            DS_UNITTEST_TIMEOUT=str(SECONDS),
            LOCAL_SIZE="8",
            DS_DISABLE_REUSE_DIST_ENV="1",
        )
        rows: dict[str, dict[str, Any]] = {}
        while True:
            skip = [part for id in rows for part in ("--deselect", id)]
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "tests.deepspeed_suite",
                "-q",
                "--tb=short",
                *words,
                *skip,
            ]
            subprocess.run(
                [*command, *tests], cwd=checkout, env=env, stdout=subprocess.DEVNULL, check=False
            )
            before = len(rows)
            lines = results.read_text().splitlines() if results.exists() else []
            rows |= {row["id"]: row for row in map(json.loads, lines)}
            if len(rows) == before or next(reversed(rows.values()))["outcome"] != "hung":
                return rows


def judged(row: Mapping[str, Any]) -> str:
    """How a test ended: passed, failed, refused (by a sentence of ours), skipped or hung."""
    return (
        "refused"
        if row["outcome"] == "failed" and REFUSED.search(row["text"])
        else str(row["outcome"])
    )


def unexplained(
    ended: Mapping[str, str], block: str, reasons: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Ids that did not pass and have no reason in the list for this block."""
    for id, how in ended.items():
        if how != "passed" and not any(
            block in r["blocks"] and re.search(r["ids"], id) for r in reasons
        ):
            yield f"{id}: {how}"


def main(arguments: Sequence[str]) -> int:
    """Run everything, print one table, and return the exit code."""
    checkout, *words = arguments
    known = json.loads(EXPECTED.read_text())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "tests")
        shutil.copytree(Path(checkout, "tests"), copy)
        if "--select" in words:
            places = words[words.index("--select") + 1 :] or PLACES
            stock = run(copy, "stock", places)
            passed = [
                id for id, row in stock.items() if row["stage3"] and row["outcome"] == "passed"
            ]
            again = of_places(known["tests"], places)
            kept = [id for id in known["tests"] if id not in again]
            known["tests"] = kept + [id for id in passed if CHANCE not in id]
            EXPECTED.write_text(json.dumps(known, indent=1) + "\n")
            return 0
        names = [word for word in words if word in BLOCKS] or [
            name for name in BLOCKS if name != "stock"
        ]
        places = [word for word in words if word not in BLOCKS]
        tests = of_places(known["tests"], places)
        bad = [stored(run(copy, name, tests), name, known, places) for name in names]
    EXPECTED.write_text(json.dumps(known, indent=1) + "\n")
    return 1 if any(bad) else 0


def of_places(tests: Sequence[str], places: Sequence[str]) -> list[str]:
    """Those of some folders, files or classes; all without places."""
    return [id for id in tests if not places or id.startswith(tuple(places))]


def stored(
    rows: Mapping[str, Mapping[str, Any]],
    name: str,
    known: dict[str, Any],
    places: Sequence[str] = (),
) -> int:
    """Print and note how all tests of some places ended with a block; return how many did not pass
    without a reason.
    """
    ended = {
        id: judged(rows[id]) if id in rows else "not run"
        for id in of_places(known["tests"], places)
    }
    title = " ".join([name, *places])
    known["results"][title] = {"when": date.today().isoformat(), **Counter(ended.values())}
    print(f"{title}: {known['results'][title]}")
    for reason in known["reasons"]:
        count = sum(
            how != "passed" and bool(re.search(reason["ids"], id)) for id, how in ended.items()
        )
        if name in reason["blocks"] and count:
            print(f"  {count} explained: {reason['why']}")
    missing = list(unexplained(ended, name, known["reasons"]))
    for line in missing:
        text = rows.get(line.split(": ")[0], {}).get("text", "")[-600:]
        print(f"  UNEXPLAINED {line}\n    " + text.replace("\n", "\n    "), flush=True)
    return len(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
