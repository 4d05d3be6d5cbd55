# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo simulate --calibrate``: rings fitted to measured collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from zero_topo.cli.output import print_json
from zero_topo.cli.tables import show
from zero_topo.cost.collectives import fit_rings, read_tests
from zero_topo.observe.console import figures_table
from zero_topo.observe.documents import Document
from zero_topo.strict import to_json
from zero_topo.topology.rates import Ring
from zero_topo.units import format_rate, format_seconds


class _Rings(Document):
    rings: dict[str, dict[str, Ring]]


class Collectives(Document):
    """``simulate --calibrate``."""

    rates: _Rings
    measurements: int


def fit(files: Sequence[Path], as_json: bool) -> None:
    """Fit rings to outputs of rccl-tests or nccl-tests, and print them with their errors.

    Raises:
        ValueError: if a file is no such output.
    """
    if records := [path for path in files if path.suffix == ".json"]:
        raise ValueError(
            f"{records[0]} is no output of rccl-tests; a record of the emulated cluster is fitted in a "
            f"checkout: python -m benchmarks fit {records[0]}"
        )
    timed = [row for path in files for row in read_tests(path)]
    rings = fit_rings(timed)
    written = {"rings": {name: {domain: to_json(ring) for domain, ring in of.items()} for name, of in rings.items()}}
    if as_json:
        print_json({"rates": written, "measurements": len(timed)})
        return
    table = figures_table(["", "", "bandwidth", "step", "small", "its step", "error"], "Rings, as measured")
    for name, of in rings.items():
        for domain, ring in of.items():
            few = (format_seconds(ring.small_step), f"{ring.small:,} B") if ring.small_step else ("-", "-")
            cells = (format_rate(ring.bandwidth), format_seconds(ring.step), few[1], few[0], f"{ring.spread:.0%}")
            table.add_row(name, domain, *cells)
    show(table)
    print(f"From {len(timed)} measurements. For --set rates=FILE of plan, simulate and check:")
    print(json.dumps(written, indent=2))
