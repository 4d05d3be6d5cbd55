# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables and figures of README and docs are what the formulas, the records or the commands say."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import zero_topo
from benchmarks import faults, faults_report, soak, soak_report
from benchmarks.scale_report import launches
from tests.commands import Run
from tests.documents import DOCUMENTS, README, commands, record, row, tables
from tests.launching import ROOT
from tests.matrix import recorded
from tests.mutants import figures
from tests.tables_of_losses import TABLES, loss_sentences
from tests.unit.test_simulator import PAPER, ratios
from zero_topo.cli.inputs import machine
from zero_topo.config import (
    ROLES,
    SCHEMES,
    ResolvedConfig,
    ZeroTopoConfig,
    deepspeed_problems,
    load_deepspeed_config,
    resolve_config,
)
from zero_topo.cost import Workload, by_domain, memory_bytes, step_bytes
from zero_topo.topology import preset_names
from zero_topo.topology.presets import load_preset
from zero_topo.units import format_bytes

PARAMETERS, RANKS, MICRO_BATCHES = 20 * 10**9, 384, 4


def place(config: ResolvedConfig, role: str) -> str:
    """Where a role is held: its domain, and the bits it travels in."""
    degree = config.plan.degrees()[role]
    if degree is None:
        return "-"
    spec = {"weights": config.weights_spec, "secondary": config.secondary_spec, "gradients": config.gradients_spec}
    quantized, held = spec.get(role), " held" if role == "weights" and config.resident_spec else ""
    return config.topology.domain(degree) + (f", INT{quantized.bits}{held}" if quantized else "")


ROWS: dict[str, dict[str, Any]] = {f"`{name}`": {"scheme": name} for name in SCHEMES}
ROWS["`topo` with INT4 sync"] = {"sync": {"mode": "quantized"}}
ROWS["`topo` with INT4 sync and publish"] = {"sync": {"mode": "quantized"}, "publish": {"delta": "int4"}}


def scheme_cells(name: str) -> list[str]:
    """A row of the table of schemes, from the formulas."""
    config = resolve_config(ZeroTopoConfig.parse(ROWS[name]), load_preset("frontier", RANKS))
    work = Workload.uniform([PARAMETERS], micro_batches=MICRO_BATCHES)
    held = sum(memory_bytes(config, work, accumulation_itemsize=2).values())
    sent = by_domain(step_bytes(config, work))
    numbers = [held, *(sent.get(domain, 0) for domain in ("gpu", "node", "world"))]
    return [name, *(place(config, role) for role in ROLES), *(format_bytes(n) if n else "-" for n in numbers)]


def scheme_rows(short: bool = False) -> list[str]:
    """The table of schemes; in short without the secondary copy and what is sent inside a node."""
    found = [scheme_cells(name) for name in ROWS]
    return [row([*cells[:2], *cells[3:6], cells[8]] if short else cells) for cells in found]


def cluster_rows() -> list[str]:
    """The table of the emulated cluster, from the record committed."""
    rows = []
    for (name, count), (result, faster) in _cluster().items():
        step = result["step_s"]
        spread = f"{step['median']:.2f} s ({step['min']:.2f} - {step['max']:.2f})"
        rows.append(
            row([str(count), f"`{name}`", spread, faster, format_bytes(result["uplink_bytes_per_step_per_node"])])
        )
    return rows


def cluster_rows_in_short() -> list[str]:
    """The same, a row for each scheme."""
    rows: dict[str, list[str]] = {}
    for (name, _), (result, faster) in _cluster().items():
        rows.setdefault(name, [f"`{name}`"]).extend([f"{result['step_s']['median']:.2f} s", faster])
    return [row(cells) for cells in rows.values()]


def codes_rows() -> list[str]:
    """The table of codes at a large model's learning rate; what a rank holds is by the formula."""
    content = record("cluster-t8-codes")
    blocks = {job["scheme"]: job["block"] for job in content["settings"]["jobs"]}
    rows = []
    for (name, count), (result, faster) in _cluster("cluster-t8-codes", "zero++").items():
        block = ZeroTopoConfig.parse(blocks[name])
        work = Workload.uniform([content["message_bytes"] // 2])
        held = sum(memory_bytes(resolve_config(block, machine(block.topology, 8)), work, 2).values())
        sent = format_bytes(result["uplink_bytes_per_step_per_node"])
        rows.append(row([str(count), f"`{name}`", f"{_median(result):.2f} s", faster, sent, format_bytes(held)]))
    return rows


def sparse_cluster_rows() -> list[str]:
    """The table of sparse sync on the emulated cluster, from the record committed."""
    optimizers = {job["scheme"]: job["optimizer"] for job in record("cluster-t8-sparse")["settings"]["jobs"]}
    rows = []
    for (name, _), (result, faster) in _cluster("cluster-t8-sparse", "topo").items():
        sent = format_bytes(result["uplink_bytes_per_step_per_node"])
        rows.append(row([f"`{name}`", optimizers[name], f"{_median(result):.2f} s", faster, sent]))
    return rows


def _cluster(name: str = "cluster-t8", slowest: str = "zero3") -> dict[tuple[str, int], tuple[Any, str]]:
    """Scheme and micro-batches -> result, and times faster than the slowest."""
    found = {(result["scheme"], result["micro_batches"]): result for result in record(name)["results"]}
    median = {key: result["step_s"]["median"] for key, result in found.items()}
    return {key: (result, f"{median[slowest, key[1]] / median[key]:.2f}") for key, result in found.items()}


def quantizer_rows() -> list[str]:
    """The table of the kernels' speed, from the record committed."""
    results = record("quantizers-cpu")["results"]
    single = [row for row in results if row["threads"] == 1]

    def cell(row: dict[str, Any]) -> str:
        return f"{row['gb_per_s']:.1f} ({row['memcpy_ratio']:.2f})"

    rows = []
    for kind in dict.fromkeys((r["dtype"], r["bits"], r["block_size"]) for r in single):
        same = [r for r in single if (r["dtype"], r["bits"], r["block_size"]) == kind]
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
    """The table of launches, from the record committed."""
    results = record("scale")["results"]
    found = {(row["scheme"], row["ranks"]): row["launches_per_parameter"] for row in results}
    return [
        f"| `{scheme}` | {' | '.join(f'{found[scheme, ranks]:.1f}' for ranks in (16, 384, 75264))} |"
        for scheme in dict.fromkeys(row["scheme"] for row in results)
    ]


def paper_rows() -> list[str]:
    """The table of the paper's ratios, from the simulator in the setting that the text states."""
    columns = [ratios(), ratios(how="full"), ratios(stock=False)]
    rows = []
    for name, published in PAPER.items():
        words = (
            name.replace("zero", "ZeRO-").replace("-++", "++").replace("paper", "ZeRO-topo").replace(" / ", " over ")
        )
        what = "ZeRO-topo from 64 to 384 GCDs" if name == "64 to 384" else f"{words} at 384 GCDs"
        rows.append(f"| {what} | {published:.2f} | {' | '.join(f'{column[name]:.2f}' for column in columns)} |")
    return rows


def fault_rows() -> list[str]:
    """The table of faults, from the record committed."""
    return [row(cells) for cells in faults_report.rows(record("faults")["results"])]


def soak_rows() -> list[str]:
    """The table of the long run, from the record committed."""
    return [row(cells[:-1]) for cells in soak_report.rows(record("soak")["results"])]


def feature_rows() -> list[str]:
    """The matrix of features and schemes, from the record committed."""
    return [
        row([name, *(said if said == "pass" else "refused" for said in cells.values())]) for name, cells in _cells()
    ]


def refused_feature_rows() -> list[str]:
    """What each refusal in it says: of every scheme the same."""
    refused = [(name, set(cells.values())) for name, cells in _cells() if "pass" not in cells.values()]
    return [row([name, *said]) for name, said in refused]


def _cells() -> list[tuple[str, dict[str, str]]]:
    return list(recorded()["cells"].items())


REFUSED = (
    '{"zero_topo": {"sync": {"mode": "dense", "density": 0.1}}}',
    '{"zero_topo": {"topology": "fronteir"}}',
    '{"zero_topo": {"topology": "frontier", "scheme": "topo", "weights": 3}}',
    '{"zero_topo": {"topology": "frontier", "scheme": "topo", "weights": "node", "gradients": 4}}',
    '{"zero_topo": {"topology": {"nodes": 3, "gpus_per_node": 4, "ranks_per_gpu": 2}}}',
    '{"zero_topo": {"quantize": {"weights": "int2"}}}',
    '{"zero_topo": {"sync": {"mode": "scape"}}}',
    '{"zero_optimization": {"stage": 2}}',
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
    '{"tensor_parallel": {"autotp_size": 2}}',
)


def refusal_rows() -> list[str]:
    """The table of refused configs, each `configs/topo.json` with some keys replaced, on 16 ranks."""
    return [row([f"`{text}`", refusal(json.loads(text))]) for text in REFUSED]


def refusal(changed: dict[str, Any]) -> str:
    """What `zero-topo check` says of a config."""
    config = {**load_deepspeed_config(ROOT / "configs/topo.json"), **changed}
    if problems := deepspeed_problems(config):
        return problems[0]
    with pytest.raises(ValueError) as error:
        block = ZeroTopoConfig.parse(config["zero_topo"])
        resolve_config(block, machine(block.topology, 16))
    return str(error.value)


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("paper", paper_rows),
        ("schemes", scheme_rows),
        ("schemes, short", lambda: scheme_rows(short=True)),
        ("cluster", cluster_rows),
        ("cluster, short", cluster_rows_in_short),
        ("cluster, codes", codes_rows),
        ("cluster, sparse", sparse_cluster_rows),
        ("quantizers", quantizer_rows),
        ("scale", scale_rows),
        ("refusals", refusal_rows),
        ("faults", fault_rows),
        ("soak", soak_rows),
        ("features", feature_rows),
        ("features, refused", refused_feature_rows),
        *TABLES.items(),
    ],
)
def test_a_table_is_what_the_formulas_or_the_record_say(table: str, rows: Callable[[], list[str]]) -> None:
    """What is promised is computed, what was measured was recorded; on failure, paste the rows printed."""
    assert tables()[table] == rows(), "\n" + "\n".join(rows())


def cluster_sentences() -> list[str]:
    """What the text beside the table of the emulated cluster says, from the records."""
    few, zero3 = _cluster()["topo-q4", 8][0], _cluster()["zero3", 8][0]
    stock = {result["scheme"]: result["step_s"]["median"] for result in record("cluster-t8-stock")["results"]}
    grown = {}
    for ranks in (8, 16, 32):
        found = record(f"cluster-t{ranks}")["results"]
        grown[ranks] = next(row for row in found if (row["scheme"], row["micro_batches"]) == ("topo-q4", 1))
    seconds, links = ([one(grown[ranks]) for ranks in (16, 32)] for one in (_median, _floor))
    share = [f"{row['cpu_s_per_step'] / ranks:.2f}" for ranks, row in grown.items()]
    return [
        f"its floor with 8 micro-batches is {_floor(zero3):.1f} s",
        f"of its {_median(few):.1f} s the links need {_floor(few):.1f} s",
        f"and {few['cpu_s_per_step']:.0f} s of processor time on two cores",
        f"would allow a factor of {_floor(zero3) / _floor(few):.0f} there",
        f"took {stock['stock']:.2f} s on gloo",
        f"{stock['stock-ring']:.2f} s with a ring in its place, and `zero3` {stock['zero3']:.2f} s",
        f"`topo-q4` takes {seconds[0]:.2f} and {seconds[1]:.2f} s",
        f"the links need {links[0]:.1f} and {links[1]:.1f} s",
        f"of each rank is {share[0]}, {share[1]} and {share[2]} s",
    ]


def scale_sentences() -> list[str]:
    """What the text below the table of launches says of real ranks, from the record."""
    content = record("scale")
    stock, topo = (next(row for row in content["real"] if row["scheme"] == name) for name in ("stock", "topo"))
    per = content["settings"]["params"]
    added, own, ours = (launches(row) / per for row in (stock["phases"], stock["plain"], topo["phases"]))
    return [
        f"adds {added:.1f} launches for each parameter to the model's and AdamW's {own:.1f}, and `topo` {ours:.1f},"
    ]


def mutant_sentences() -> list[str]:
    """What CONTRIBUTING says of the sample of mutants, from its record."""
    content = json.loads((ROOT / "tests/data/mutants.json").read_text())
    rooms = [f"{killed} of {ran} in `{room}`" for room, (killed, ran) in figures(content).items()]
    left = [row for room in content["rooms"].values() for row in room["left"] if row["outcome"] != "waits"]
    judged = sum(bool(row["judgement"]) for row in left)
    killed = f"killed were {', '.join(rooms)}"
    return [f"On {content['when']} {killed}; of the {len(left)} others {judged} are judged in the record."]


def _median(result: Any) -> float:
    return float(result["step_s"]["median"])


def _floor(result: Any) -> float:
    return float(result["floor_s"]["serial"])


def scheme_sentences() -> list[str]:
    """What the tutorial takes from the table of schemes."""
    zero3, topo = scheme_cells("`zero3`"), scheme_cells("`topo`")
    sent = f"`zero3` sends {zero3[8]} across nodes in a step and `topo` {topo[8]}"
    return [f"{sent}, for {topo[5]} held instead of {zero3[5]}"]


def test_the_tutorials_block_is_what_its_command_recommends(run: Run) -> None:
    """The text above it says so."""
    text = (ROOT / "docs/tutorial.md").read_text()
    (line,) = [line for line in commands() if "plan --params 1.3B" in line]
    status, printed, _ = run(*shlex.split(line)[1:])
    recommended = json.loads(printed[printed.index("\n{") :])
    (config,) = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    assert status == 0 and json.loads(config)["zero_topo"] == recommended["zero_topo"]


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        (ROOT / "docs/measured.md", cluster_sentences),
        (ROOT / "docs/measured.md", scale_sentences),
        (ROOT / "docs/tutorial.md", scheme_sentences),
        (README, loss_sentences),
        (ROOT / "CONTRIBUTING.md", mutant_sentences),
    ],
)
def test_figures_in_the_text_are_those_of_the_records(page: Path, sentences: Callable[[], list[str]]) -> None:
    """A new record changes the words beside its table too."""
    text = " ".join(page.read_text().split())
    assert not [sentence for sentence in sentences() if sentence not in text]


def test_faults_twenty_in_a_row_changed_no_bit() -> None:
    """Each kind is among them; every rank that could, said so, and no launch of a killed rank had to be ended."""
    content = record("faults")
    drawn = faults.drawn(content["settings"]["rounds"], content["settings"]["seed"])
    assert len(drawn) == len(content["results"]) >= 20
    for fault, found in zip(drawn, content["results"], strict=True):
        assert {key: found[key] for key in ("kind", "phase", "step", "rank")} == asdict(fault)
        assert found["equal"] and (found["ended_s"] is not None) == (fault.kind == "killed")
        assert len(found["told_s"]) >= {"killed": 2, "stopped": 3, "nan": 0}.get(fault.kind, 4)
    assert {fault.kind for fault in drawn} == set(faults.KINDS)


def test_nothing_grew_in_the_long_run() -> None:
    """Of two thousand steps, by the samples of the record, and by the bounds of today."""
    content = record("soak")
    assert content["settings"]["steps"] == content["samples"][-1]["step"] == 2000
    assert content["results"] == soak.growth(content["samples"])
    assert all(row["flat"] for row in content["results"])


def test_what_grows_in_the_long_run_is_not_flat() -> None:
    """One descriptor is enough, on one rank."""
    samples = [{"ranks": [dict.fromkeys(soak.ALLOWED, 1000) for _ in range(2)]} for _ in range(20)]
    assert all(row["flat"] for row in soak.growth(samples))
    samples[-1]["ranks"][1]["descriptors"] += 1
    assert [row["name"] for row in soak.growth(samples) if not row["flat"]] == ["descriptors"]


@pytest.mark.parametrize("name", ["convergence", "sparse-training", *(f"sparse-aged-{nodes}" for nodes in (2, 4, 8))])
def test_every_loss_is_compared_with_stocks(name: str) -> None:
    """With AdamW's, at the same rate, whatever optimizer the scheme has: never with a baseline of its own."""
    content = record(name)
    means = {result["scheme"]: result for result in content["results"]}
    stock = [job for job in content["settings"]["jobs"] if job["scheme"] == "stock"]
    assert {job.get("optimizer", "AdamW") for job in stock} == {"AdamW"}  # older records name none
    for result in content["results"]:
        for measure in ("last", "evaluation"):
            share = result[measure]["loss"] / means["stock"][measure]["loss"] - 1
            assert result[measure]["difference"]["mean"] == pytest.approx(share, abs=2e-3)


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
    section = (ROOT / "docs/keys.md").read_text().partition("These are all keys")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(ZeroTopoConfig.model_fields)
    assert {name for name in preset_names() if f"`{name}`" in section} == set(preset_names())


def test_the_api_page_has_every_public_name() -> None:
    """Each name that ``zero_topo`` offers has its section, and no other has one."""
    named = re.findall(r"^ +heading: zero_topo\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(named) == sorted(name for name in zero_topo.__all__ if name != "__version__")


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.name)
def test_a_page_is_short(page: Path) -> None:
    """The README is for a stranger; a page is about one thing. Tables of keys and hazards may be longer."""
    limit = {README: 9_000, ROOT / "docs/hazards.md": 20_000}.get(page, 6_500)
    assert len(page.read_bytes()) <= limit
