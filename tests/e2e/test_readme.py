# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The README keeps its word: its commands run, its numbers are the formulas', its keys are all there are."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmarks_command
from tests.launching import ROOT
from tests.unit.test_simulator import PAPER, ratios
from zero_topo.cli.app import run as zero_topo_command
from zero_topo.config import ROLES, SCHEMES, ResolvedConfig, ZeroTopoConfig, load_deepspeed_config, resolve_config
from zero_topo.cost import Workload, by_domain, memory_bytes, step_bytes
from zero_topo.examples.train_gpt import parse_arguments
from zero_topo.topology import preset_names
from zero_topo.topology.presets import load_preset
from zero_topo.units import format_bytes

README = (ROOT / "README.md").read_text()
COMMANDS = [line for body in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S) for line in body.splitlines()]
OF_ZERO_TOPO = [line for line in COMMANDS if line.startswith("zero-topo ")]
OF_DEEPSPEED = [line for line in COMMANDS if line.startswith("deepspeed ")]
OF_BENCHMARKS = [line for line in COMMANDS if line.startswith("python -m benchmarks ")]
OF_PYTHON = [line for line in COMMANDS if line.startswith("python -m ") and line not in OF_BENCHMARKS]
OF_MAKE = sorted({line for line in COMMANDS if line.startswith("make ")})
PARAMETERS, RANKS, MICRO_BATCHES = 20 * 10**9, 384, 4
TINY = "--layers 1 --width 32 --context 16 --steps 2 --eval-batches 1 --sample 5"


def test_every_command_is_of_a_kind_that_is_run() -> None:
    """A command in a shell block that none of the tests below would run does not slip in."""
    assert COMMANDS and sorted(set(COMMANDS)) == sorted(
        {*OF_ZERO_TOPO, *OF_BENCHMARKS, *OF_MAKE, *OF_DEEPSPEED, *OF_PYTHON}
    )
    assert {"make demo", "make test"} <= set(OF_MAKE)


# Added to a benchmark's command, so that it takes seconds.
SMALLER = {
    "zero-topo bench quantizers": "--size 65536 --repeats 1 --threads 1 --dtypes fp32 --blocks 256",
    "python -m benchmarks cluster": "--schemes topo --micro-batches 1 --steps 2 --params 1e5 --layers 1",
    "zero-topo bench scale": "--ranks 8 --schemes topo --params 2 --repeats 1 --real-ranks 0",
    "zero-topo bench sparse": "--modes oktopk --densities 0.01 --ranks 2 --numel 10000 --steps 1",
    # of an option that is given twice, the last one counts
    "python -m benchmarks convergence": "--schemes topo --steps 10 --seeds 1 --params 5e4 --layers 1",
}
LONG = ("python -m benchmarks cluster", "python -m benchmarks convergence")


def smaller(line: str, folder: Path) -> str:
    """The command as shown; of a benchmark, with less to measure and its record in a folder of ours."""
    found = [more for start, more in SMALLER.items() if line.startswith(start)]
    return f"{line} {found[0]} --record {folder}/record.json" if found else line


def marked(line: str) -> Any:
    """A benchmark that trains takes long, made smaller too."""
    return pytest.param(line, marks=[pytest.mark.long] * line.startswith(LONG))


@pytest.mark.parametrize("line", [marked(line) for line in (*OF_ZERO_TOPO, *OF_BENCHMARKS)])
def test_zero_topo_commands_run(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each `zero-topo` command and each benchmark succeeds in the checkout and prints something."""
    if "benchmarks cluster" in line and (os.geteuid() or not shutil.which("tc")):
        pytest.skip("the emulated cluster needs root and tc")
    monkeypatch.chdir(ROOT)
    line = smaller(line, tmp_path)
    out = io.StringIO()
    with redirect_stdout(out):
        program, words = (benchmarks_command, 3) if line.startswith("python") else (zero_topo_command, 1)
        assert program(shlex.split(line)[words:]) == 0
    assert len(out.getvalue().splitlines()) > (0 if "--dry-run" in line else 5)


@pytest.mark.parametrize("line", OF_DEEPSPEED)
def test_the_launchers_lines_give_options_that_the_example_has(line: str) -> None:
    """What they train is trained by ``test_trainers.py``, with the same functions."""
    program, *words = shlex.split(line)[shlex.split(line).index("8") + 1 :]
    options = [word for word in words if word.startswith("--")]
    done = subprocess.run([sys.executable, program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert options and all(option in done.stdout for option in options)


@pytest.mark.parametrize("line", OF_PYTHON)
def test_python_lines_run(line: str) -> None:
    """Modules that are run by themselves succeed in the checkout and print something."""
    done = subprocess.run([sys.executable, *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout, done.stderr


def dry_run(line: str) -> list[str]:
    """The commands that a `make` line would execute, but for setting up."""
    command = [*shlex.split(line), "--dry-run", f"--old-file={ROOT}/.venv/.set-up"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("line", [line for line in OF_MAKE if "demo" in line])
def test_demo_lines_start_the_example_with_a_config_that_loads(line: str) -> None:
    """Each `make demo` gives the example arguments it understands, and a config with a zero_topo block."""
    (launch,) = [text for text in dry_run(line) if "train_gpt.py" in text]
    args = parse_arguments(shlex.split(launch.partition("train_gpt.py")[2]))
    assert ZeroTopoConfig.from_ds_config(load_deepspeed_config(ROOT / args.deepspeed_config))


def test_make_test_and_test_long_run_every_test_once() -> None:
    """`make test` itself cannot run inside a test: it is what CI runs, and it leaves nothing out but the long tests."""
    with_tests = {path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests" / "launcher"}
    for folder in with_tests:  # tests/launcher is started by tests/e2e
        usual, late = (marks(line, str(folder.relative_to(ROOT))) for line in ("make test", "make test-long"))
        for long, alone in itertools.product((False, True), repeat=2):
            known = {"long": long, "alone": alone}
            runs = [eval(mark, known) for mark in usual].count(True)
            assert runs == 1 or (long and runs == 0 and any(eval(mark, known) for mark in late)), folder


def marks(line: str, folder: str) -> list[str]:
    """What the `pytest` lines of a target say of a folder after `-m`; True where they say nothing."""
    of_folder = [
        words for text in dry_run(line) if text.startswith("pytest") and folder in (words := shlex.split(text))
    ]
    return [words[words.index("-m") + 1] if "-m" in words else "True" for words in of_folder]


def test_make_demo_trains_and_reports(tmp_path: Path) -> None:
    """The first command a stranger types works, here with a small model and two steps on the demo's eight ranks."""
    words = f"{TINY} --run-dir {tmp_path / 'run'}"
    command = ["make", "demo", f"--old-file={ROOT}/.venv/.set-up", f"ARGS={words}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 steps on 8 ranks" in done.stdout and "Sent by each rank" in done.stdout
    assert (tmp_path / "run" / "bytes.png").exists()


def shown(name: str) -> list[str]:
    """The rows of the README's table that a comment of that name precedes."""
    (table,) = re.findall(rf"<!-- {name}:.*?-->\n(.*?)<!-- end -->", README, re.S)
    return str(table).splitlines()[2:]


def place(config: ResolvedConfig, role: str) -> str:
    """Where a role is held: its domain, and the bits it travels in."""
    degree = config.plan.degrees()[role]
    if degree is None:
        return "-"
    spec = {"weights": config.weights_spec, "secondary": config.secondary_spec, "gradients": config.gradients_spec}
    quantized = spec.get(role)
    return config.topology.domain(degree) + (f", INT{quantized.bits}" if quantized else "")


ROWS: dict[str, dict[str, Any]] = {f"`{name}`": {"scheme": name} for name in SCHEMES}
ROWS["`topo` with INT4 sync and publish"] = {"sync": {"mode": "quantized"}, "publish": {"delta": "int4"}}


def scheme_row(name: str) -> str:
    """A row of the README's table of schemes, from the formulas."""
    config = resolve_config(ZeroTopoConfig.parse(ROWS[name]), load_preset("frontier", RANKS))
    work = Workload.uniform([PARAMETERS], micro_batches=MICRO_BATCHES)
    held = sum(memory_bytes(config, work, accumulation_itemsize=2).values())
    sent = by_domain(step_bytes(config, work))
    numbers = [held, *(sent.get(domain, 0) for domain in ("gpu", "node", "world"))]
    cells = [name, *(place(config, role) for role in ROLES), *(format_bytes(n) if n else "-" for n in numbers)]
    return f"| {' | '.join(cells)} |"


def cluster_rows() -> list[str]:
    """The README's table of the emulated cluster, from the record committed."""
    content = json.loads((ROOT / "benchmarks/records/cluster-t8.json").read_text())
    rows = []
    for result in content["results"]:
        name, count, step = result["scheme"], result["micro_batches"], result["step_s"]
        (zero3,) = (r for r in content["results"] if (r["scheme"], r["micro_batches"]) == ("zero3", count))
        spread = f"{step['median']:.2f} s ({step['min']:.2f} - {step['max']:.2f})"
        uplink = format_bytes(result["uplink_bytes_per_step_per_node"])
        rows.append(f"| {count} | `{name}` | {spread} | {zero3['step_s']['median'] / step['median']:.2f} | {uplink} |")
    return rows


def convergence_rows() -> list[str]:
    """The README's table of losses, from the record committed."""
    content = json.loads((ROOT / "benchmarks/records/convergence.json").read_text())
    rows = []
    for result in content["results"]:
        cells = [f"{result['evaluation']['loss']:.3f}"]
        for measure in ("last", "evaluation"):
            difference = result[measure]["difference"]
            cells += [f"{100 * difference['mean']:+.2f}%", f"{100 * difference['worst']:+.2f}%"]
        rows.append(f"| `{result['scheme']}` | {' | '.join(cells)} |")
    return rows


def sparse_training_rows() -> list[str]:
    """The README's table of trainings with sparse sync, from the record committed; each against its dense optimizer."""
    content = json.loads((ROOT / "benchmarks/records/sparse-training.json").read_text())
    blocks = {job["scheme"]: job["block"] for job in content["settings"]["jobs"]}
    found = {result["scheme"]: result for result in content["results"]}
    rows = []
    for name, result in found.items():
        if name == "stock":
            continue
        dense = found["adams" if name in ("adams", "scape") else "stock"]
        cells = [f"`{name}`", _sync_cell(blocks[name]), str(len(result["last"]["difference"]["by_seed"]))]
        for measure in ("last", "evaluation"):
            of_seed = {seed: 1 + share for seed, share in dense[measure]["difference"]["by_seed"].items()}
            ours = result[measure]["difference"]["by_seed"].items()
            shares = [(1 + share) / of_seed[seed] - 1 for seed, share in ours]
            cells += [f"{100 * sum(shares) / len(shares):+.2f}%", f"{100 * max(shares, key=abs):+.2f}%"]
        crossing = result["crossing_bytes"]
        rows.append(f"| {' | '.join([*cells, '-' if crossing is None else format_bytes(round(crossing))])} |")
    return rows


def _sync_cell(block: dict[str, Any] | None) -> str:
    sync = (block or {}).get("sync", {})
    words = [f"{key} {value}" for key, value in sync.items() if key != "mode"]
    return ", ".join(words).replace("_", " ") or "-"


def quantizer_rows() -> list[str]:
    """The README's table of the kernels' speed, from the record committed."""
    results = json.loads((ROOT / "benchmarks/records/quantizers-cpu.json").read_text())["results"]
    single = [row for row in results if row["threads"] == 1]

    def cell(row: dict[str, Any]) -> str:
        return f"{row['gb_per_s']:.1f} ({row['memcpy_ratio']:.2f})"

    rows = []
    for kind in dict.fromkeys((row["dtype"], row["bits"], row["block_size"]) for row in single):
        same = [row for row in single if (row["dtype"], row["bits"], row["block_size"]) == kind]
        cells = []
        for op in ("quantize", "dequantize", "dequantize_reduce"):
            found = sorted((row for row in same if row["op"] == op), key=lambda row: -row["gb_per_s"])
            (own,) = (row for row in found if row["backend"] == "native")
            others = [row for row in found if row["backend"] not in ("native", "reference")]
            cells += [cell(own), f"{cell(others[0])} {others[0]['backend']}" if others else "-"]
        dtype, bits, block = kind
        rows.append(f"| {dtype.upper()} to INT{bits}, {block} | {' | '.join(cells)} |")
    return rows


def scale_rows() -> list[str]:
    """The README's table of launches, from the record committed."""
    results = json.loads((ROOT / "benchmarks/records/scale.json").read_text())["results"]
    found = {(row["scheme"], row["ranks"]): row["launches_per_parameter"] for row in results}
    return [
        f"| `{scheme}` | {' | '.join(f'{found[scheme, ranks]:.1f}' for ranks in (16, 384, 75264))} |"
        for scheme in dict.fromkeys(row["scheme"] for row in results)
    ]


def paper_rows() -> list[str]:
    """The README's table of the paper's ratios, from the simulator in the setting that the text states."""
    columns = [ratios(), ratios(how="full"), ratios(stock=False)]
    rows = []
    for name, published in PAPER.items():
        words = (
            name.replace("zero", "ZeRO-").replace("-++", "++").replace("paper", "ZeRO-topo").replace(" / ", " over ")
        )
        what = "ZeRO-topo from 64 to 384 GCDs" if name == "64 to 384" else f"{words} at 384 GCDs"
        rows.append(f"| {what} | {published:.2f} | {' | '.join(f'{column[name]:.2f}' for column in columns)} |")
    return rows


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("paper", paper_rows),
        ("schemes", lambda: [scheme_row(name) for name in ROWS]),
        ("cluster", cluster_rows),
        ("convergence", convergence_rows),
        ("sparse training", sparse_training_rows),
        ("quantizers", quantizer_rows),
        ("scale", scale_rows),
    ],
)
def test_a_table_is_what_the_formulas_or_the_record_say(table: str, rows: Callable[[], list[str]]) -> None:
    """What the README promises is computed, what it measured was recorded; on failure, paste the rows printed."""
    assert shown(table) == rows(), "\n" + "\n".join(rows())


def test_the_remark_on_single_micro_batches_is_true() -> None:
    """Between nodes `zero++` sends less than `topo` at one micro-batch per step, more at four, and more than INT4."""
    topology = load_preset("frontier", RANKS)
    sent = {}
    few = "`topo` with INT4 sync and publish"
    for name in ("`zero++`", "`topo`", few):
        config = resolve_config(ZeroTopoConfig.parse(ROWS[name]), topology)
        for batches in (1, MICRO_BATCHES):
            work = Workload.uniform([PARAMETERS], micro_batches=batches)
            sent[name, batches] = by_domain(step_bytes(config, work))["world"]
    assert sent[few, 1] < sent["`zero++`", 1] < sent["`topo`", 1] and sent["`zero++`", 4] > sent["`topo`", 4]


def test_the_table_of_keys_names_every_key() -> None:
    """Each key of the block and each preset is explained, and none that does not exist."""
    section = README.partition("these are all keys")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(ZeroTopoConfig.model_fields)
    assert {name for name in preset_names() if f"`{name}`" in section} == set(preset_names())
