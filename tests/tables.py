# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README and docs, and the schema of the block: ``python -m tests.tables``.

Rows are computed by the formulas, or read from the records committed. ``make docs`` runs this, and
CI fails if a file has changed by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tests import deepspeed_suite
from tests.documents import DOCUMENTS, row
from tests.launching import ROOT
from tests.matrix import recorded
from tests.plans import resolve
from tests.schema import json_schema
from tests.tables_of_losses import LOSSES
from tests.tables_of_plans import plan_rows
from tests.tables_of_speed import SPEEDS
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
from zero_topo.topology.presets import load_preset
from zero_topo.units import format_bytes

PARAMETERS, RANKS, MICRO_BATCHES = 20 * 10**9, 384, 4
ROWS: dict[str, dict[str, Any]] = {f"`{name}`": {"scheme": name} for name in SCHEMES}
ROWS['`topo`, `"sync": {"mode": "quantized"}`'] = {"sync": {"mode": "quantized"}}


def place(config: ResolvedConfig, role: str) -> str:
    """Where a role is stored: its domain, and the bits it is sent in."""
    degree = config.plan.degrees()[role]
    if degree is None:
        return "-"
    quantized = getattr(config, f"{role}_spec", None)
    stored = " stored" if role == "weights" and config.resident_spec else ""
    bits = f", {quantized.name.upper()}{stored}" if quantized else ""
    return config.topology.domain(degree) + bits


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


def scheme_rows() -> list[str]:
    """The table of schemes."""
    return [row(scheme_cells(name)) for name in ROWS]


def suite_rows() -> list[str]:
    """How DeepSpeed's own tests ended, from the record committed."""
    ways = ("passed", "refused", "failed", "hung")
    found = json.loads(deepspeed_suite.EXPECTED.read_text())["results"].items()
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
    """What happens under every scheme, and of which features, from the record committed."""
    features: dict[str, list[str]] = {}
    for name, cells in recorded()["cells"].items():
        (said,) = set(cells.values())
        features.setdefault(said, []).append(name)
    return [row([said, "; ".join(names)]) for said, names in features.items()]


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
    """What `zero-topo check` says of a config that it rejects."""
    config = {**load_deepspeed_config(ROOT / "configs/topo.json"), **changed}
    if problems := deepspeed_problems(config):
        return problems[0]
    try:
        block = ZeroTopoConfig.parse(config["zero_topo"])
        resolve_config(block, machine(block.topology, 16))
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{changed} is not rejected: take it out of the table")


TABLES: Mapping[str, Callable[[], list[str]]] = MappingProxyType(
    {
        "plans": plan_rows,
        "schemes": scheme_rows,
        "refusals": refusal_rows,
        "deepspeed suite": suite_rows,
        "deepspeed suite, reasons": suite_reasons,
        "features": feature_rows,
        **LOSSES,
        **SPEEDS,
    }
)
"""By the name in the page's comment, ``<!-- name: ... -->``: the rows below the table's head."""

HELD_BY_TESTS = ("stage3 keys",)
"""Tables with words of their own beside what is computed; a test holds them."""

TABLE = re.compile(r"(<!-- ([\w, ]+):[^>]*-->\n(?:\|.*\n){2})((?:\|.*\n)*)(<!-- end -->)")


def written(text: str) -> str:
    """Return a page with its tables as they must be."""

    def filled(found: re.Match[str]) -> str:
        head, name, _, end = found.groups()
        if name in HELD_BY_TESTS:
            return found[0]
        return head + "".join(f"{line}\n" for line in TABLES[name]()) + end

    return TABLE.sub(filled, text)


def main() -> None:
    """Write all tables and the schema."""
    for page in DOCUMENTS:
        page.write_text(written(page.read_text()))
    schema = json.dumps(json_schema(whole_file=True), indent=2)
    (ROOT / "docs/config.schema.json").write_text(f"{schema}\n")


if __name__ == "__main__":
    main()
