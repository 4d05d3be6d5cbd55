# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables and figures of README and docs are what the formulas, the records or the commands say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zero_topo
from benchmarks.removed_keys import removed_rows
from tests import deepspeed_suite
from tests.documents import PAGES, README, record, row, tables
from tests.launching import ROOT
from tests.matrix import recorded
from tests.plans import NEOX, resolve
from tests.tables_of_losses import TABLES, decay_sentences, fragment_sentences, loss_sentences
from tests.tables_of_plans import plan_rows
from tests.tables_of_speed import (
    SPEEDS,
    cluster_sentences,
    fsdp_sentences,
    muon_sentences,
    scale_sentences,
    stock_sentences,
    turns_sentences,
)
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
from zero_topo.cost.job import Job
from zero_topo.topology import preset_names
from zero_topo.topology.presets import load_preset
from zero_topo.units import format_bytes

PARAMETERS, RANKS, MICRO_BATCHES = 20 * 10**9, 384, 4
LONGEST_SECTION = 300


def place(config: ResolvedConfig, role: str) -> str:
    """Where a role is stored: its domain, and the bits it is sent in."""
    degree = config.plan.degrees()[role]
    if degree is None:
        return "-"
    spec = {
        "weights": config.weights_spec,
        "secondary": config.secondary_spec,
        "gradients": config.gradients_spec,
    }
    quantized, stored = (
        spec.get(role),
        " stored" if role == "weights" and config.resident_spec else "",
    )
    return config.topology.domain(degree) + (
        f", {quantized.name.upper()}{stored}" if quantized else ""
    )


ROWS: dict[str, dict[str, Any]] = {f"`{name}`": {"scheme": name} for name in SCHEMES}
ROWS["`topo` with NF4 sync"] = {"sync": {"mode": "quantized"}}


def scheme_cells(name: str) -> list[str]:
    """A row of the table of schemes, from the formulas."""
    config = resolve(load_preset("frontier", RANKS), **ROWS[name])
    work = Workload.uniform([PARAMETERS], micro_batches=MICRO_BATCHES)
    stored = sum(memory_bytes(config, work, accumulation_itemsize=2).values())
    sent = by_domain(step_bytes(config, work))
    numbers = [stored, *(sent.get(domain, 0) for domain in ("gpu", "node", "world"))]
    return [
        name,
        *(place(config, role) for role in ROLES),
        *(format_bytes(n) if n else "-" for n in numbers),
    ]


def scheme_rows(short: bool = False) -> list[str]:
    """The table of schemes; in short without the secondary copy and what is sent inside a node."""
    found = [scheme_cells(name) for name in ROWS]
    return [row([*cells[:2], *cells[3:6], cells[8]] if short else cells) for cells in found]


def suite_rows() -> list[str]:
    """How DeepSpeed's own tests ended, from the record committed."""
    known, ways = (
        json.loads(deepspeed_suite.EXPECTED.read_text()),
        ("passed", "refused", "failed", "hung"),
    )
    found = known["results"].items()
    return [
        row([f"`{name}`", of["when"], *(str(of.get(way, 0)) for way in ways)]) for name, of in found
    ]


def suite_reasons() -> list[str]:
    """The reasons why some of its tests do not pass; every reason explains at least one."""
    known = json.loads(deepspeed_suite.EXPECTED.read_text())
    counts = [
        sum(bool(re.search(reason["ids"], id)) for id in known["tests"])
        for reason in known["reasons"]
    ]
    assert all(counts)
    return [
        row([str(count), ", ".join(f"`{name}`" for name in reason["blocks"]), reason["why"]])
        for count, reason in zip(counts, known["reasons"], strict=True)
    ]


def feature_rows() -> list[str]:
    """The features and what happens under every scheme, from the record committed."""
    rows = []
    for name, cells in recorded()["cells"].items():
        (said,) = set(cells.values())
        rows.append(row([name, said]))
    return rows


REFUSED = (
    '{"zero_topo": {"sync": {"mode": "dense", "density": 0.1}}}',
    '{"zero_topo": {"topology": "fronteir"}}',
    '{"zero_topo": {"topology": "frontier", "scheme": "topo", "weights": 3}}',
    '{"zero_topo": {"topology": "frontier", "scheme": "topo", "weights": "node", "gradients": 4}}',
    '{"zero_topo": {"topology": {"nodes": 3, "gpus_per_node": 4, "ranks_per_gpu": 2}}}',
    '{"zero_topo": {"quantize": {"weights": "int2"}}}',
    '{"zero_topo": {"sync": {"mode": "scape"}}}',
    '{"zero_optimization": {"stage": 2}}',
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
    '{"pipeline": {"stages": 2}}',
)


def refusal_rows() -> list[str]:
    """The table of refused configs, each `configs/topo.json` with some keys replaced, on 16
    ranks.
    """
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
        ("plans", plan_rows),
        ("schemes", scheme_rows),
        ("schemes, short", lambda: scheme_rows(short=True)),
        ("refusals", refusal_rows),
        ("deepspeed suite", suite_rows),
        ("deepspeed suite, reasons", suite_reasons),
        ("features", feature_rows),
        ("removed keys", removed_rows),
        *TABLES.items(),
        *SPEEDS.items(),
    ],
)
def test_a_table_is_what_the_formulas_or_the_record_say(
    table: str, rows: Callable[[], list[str]]
) -> None:
    """What is promised is computed, what was measured was recorded; on failure, paste the rows
    printed.
    """
    assert tables()[table] == rows(), "\n" + "\n".join(rows())


def scheme_sentences() -> list[str]:
    """What the tutorial takes from the table of schemes."""
    zero3, topo = scheme_cells("`zero3`"), scheme_cells("`topo`")
    sent = f"`zero3` sends {zero3[8]} across nodes in a step, and `topo` sends {topo[8]}."
    return [f"{sent} A rank's memory is {zero3[5]} with `zero3` and {topo[5]} with `topo`"]


def block_sentences() -> list[str]:
    """What the page of kernels says of the scatter's bytes, each parameter at a block against all
    as one parameter.
    """
    numels, words = Job(NEOX).work.numels, []
    for ranks in (RANKS, 4096, 75264):
        config = resolve(load_preset("frontier", ranks), **ROWS["`zero++`"])
        joined = ranks * sum(map(config.plan.shard_numel, numels))
        each, one = (_scattered(config, Workload.uniform(of)) for of in (numels, [joined]))
        words.append(f"{each / one - 1:.1%} on {ranks:,} ranks")
    topo = resolve(load_preset("frontier", RANKS), **ROWS["`topo`"])
    assert _scattered(topo, Workload.uniform(numels)) == _scattered(
        topo, Workload.uniform([sum(numels)])
    )
    return [f"{', '.join(words[:2])} and {words[2]}; with `topo`, none"]


def _scattered(config: ResolvedConfig, work: Workload) -> int:
    return sum(
        nbytes for (phase, _), nbytes in step_bytes(config, work).items() if phase == "scatter"
    )


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        (ROOT / "docs/measured.md", cluster_sentences),
        (ROOT / "docs/measured.md", scale_sentences),
        (ROOT / "docs/fsdp2.md", fsdp_sentences),
        (ROOT / "docs/optimizers.md", muon_sentences),
        (ROOT / "docs/tutorial.md", scheme_sentences),
        (ROOT / "docs/kernels.md", block_sentences),
        (ROOT / "docs/kernels.md", turns_sentences),
        (README, loss_sentences),
        (README, stock_sentences),
        (ROOT / "docs/losses.md", fragment_sentences),
        (ROOT / "docs/sparse.md", decay_sentences),
    ],
)
def test_figures_in_the_text_are_those_of_the_records(
    page: Path, sentences: Callable[[], list[str]]
) -> None:
    """A new record changes the words next to its table too."""
    text = " ".join(page.read_text().split())
    assert not [sentence for sentence in sentences() if sentence not in text]


LOSSES = [
    *("convergence", "muon-4"),
    *(
        f"sparse-{of}"
        for of in ("training", "feedback", "rates", "rates-above", "rates-aged", "denser-8")
    ),
    *(f"sparse-{of}" for of in ("20m", "3000", "fragments", "feedback-4", "feedback-8")),
    *(f"sparse-{of}-{nodes}" for of in ("aged", "sharded", "ternary") for nodes in (2, 4, 8)),
]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_compared_with_stocks(name: str) -> None:
    """With AdamW's, at the benchmark's rate, whatever the scheme's own are: never with a baseline
    of its own.
    """
    content = record(name)
    means = {result["scheme"]: result for result in content["results"]}
    stock = [job for job in content["settings"]["jobs"] if job["scheme"] == "stock"]
    assert {job.get("optimizer", "AdamW") for job in stock} == {"AdamW"}  # older records name none
    assert not any("lr" in job for job in stock)
    seeds = {name: set(result["last"]["difference"]["by_seed"]) for name, result in means.items()}
    compared = set.union(*(seeds[name] for name in means if name != "stock"))
    assert compared <= seeds["stock"]
    for result in content["results"]:
        if seeds[result["scheme"]] != seeds["stock"]:
            assert result["scheme"] == "chaos" or seeds[result["scheme"]] == compared, (
                "the floor alone may have fewer"
            )
            continue
        for measure in ("last", "evaluation"):
            share = result[measure]["loss"] / means["stock"][measure]["loss"] - 1
            assert result[measure]["difference"]["mean"] == pytest.approx(share, abs=2e-3)


def test_the_remark_on_single_micro_batches_is_true() -> None:
    """Between nodes `zero++` sends less than `topo` at one micro-batch per step, more at four, and
    more than NF4.
    """
    topology = load_preset("frontier", RANKS)
    sent = {}
    few = "`topo` with NF4 sync"
    for name in ("`zero++`", "`topo`", few):
        config = resolve(topology, **ROWS[name])
        for batches in (1, MICRO_BATCHES):
            work = Workload.uniform([PARAMETERS], micro_batches=batches)
            sent[name, batches] = by_domain(step_bytes(config, work))["world"]
    assert (
        sent[few, 1] < sent["`zero++`", 1] < sent["`topo`", 1]
        and sent["`zero++`", 4] > sent["`topo`", 4]
    )


def test_the_table_of_keys_names_every_key() -> None:
    """Each key of the block and each preset is explained, and none that does not exist."""
    section = (
        (ROOT / "docs/keys.md").read_text().partition("These are all keys")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \|", section, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(ZeroTopoConfig.model_fields)
    assert {name for name in preset_names() if f"`{name}`" in section} == set(preset_names())


def test_the_api_page_has_every_public_name() -> None:
    """Each name that ``zero_topo`` offers has its section, and no other has one."""
    named = re.findall(r"^ +heading: zero_topo\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(named) == sorted(name for name in zero_topo.__all__ if name != "__version__")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_section_is_short(page: Path) -> None:
    """A reader finds what he looks for under a heading of its own. Tables and code do not count."""
    found = section_words(page.read_text())
    assert not {heading: words for heading, words in found.items() if words > LONGEST_SECTION}


def section_words(text: str) -> dict[str, int]:
    """Heading -> words of running text up to the next heading, of a page in Markdown."""
    for left_out in (r"^```.*?^```$", r"<!--.*?-->", r"^(?:\||!\[).*?$"):
        text = re.sub(left_out, "", text, flags=re.M | re.S)
    sections = (part.partition("\n") for part in re.split(r"^(?=#+ )", text, flags=re.M))
    return {heading: len(body.split()) for heading, _, body in sections}


def test_the_readme_is_short() -> None:
    """It is for a stranger."""
    assert len(README.read_bytes()) <= 9_000
