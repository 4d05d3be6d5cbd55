# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo simulate --calibrate``: rates fitted to what was measured, steps of a cluster or single collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from zero_topo.cli.inputs import read_json, words_of
from zero_topo.cli.output import print_json
from zero_topo.cli.tables import show
from zero_topo.cost import calibrate
from zero_topo.cost.collectives import fit_rings, read_tests
from zero_topo.observe.console import figures_table
from zero_topo.strict import read_text, to_json
from zero_topo.units import format_rate, format_seconds


def fit(files: Sequence[Path], on: str, predict: str, as_json: bool) -> None:
    """Fit rates and print them with how well they explain what was measured.

    Args:
        files: records or outputs.
        on, predict: of a record, the schemes to fit to and to predict, comma-separated.
        as_json: print JSON.

    Raises:
        ValueError: if a file is neither a record nor output of rccl-tests, or the two are mixed.
    """
    records = [path for path in files if path.suffix == ".json"]
    if records and len(files) > 1:
        raise ValueError(f"--calibrate: {records[0]} is a record, which is fitted by itself; give it alone")
    if records:
        _fit_record(records[0], words_of(on), words_of(predict), as_json)
    else:
        _fit_collectives(files, as_json)


def _fit_collectives(files: Sequence[Path], as_json: bool) -> None:
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
    print(f"From {len(timed)} measurements. For 'simulate --rates FILE' and 'plan --rates FILE':")
    print(json.dumps(written, indent=2))


def _fit_record(path: Path, on: list[str], wanted: list[str], as_json: bool) -> None:
    record = read_json(read_text(path, f"record {path}"), f"record {path}")
    measured = calibrate.read_record(record)
    wanted = wanted or list(dict.fromkeys(row.scheme for row in measured if row.scheme not in on))
    fitting, others = calibrate.measured_schemes(measured, on), calibrate.measured_schemes(measured, wanted)
    if not fitting:
        raise ValueError(f"--on {','.join(on)!r} names no scheme; give one or more of the record's")
    rates = calibrate.fit(fitting, calibrate.host_rates(record))
    fitted, predicted = calibrate.predict(fitting, rates), calibrate.predict(others, rates)
    if as_json:
        told = [{**asdict(row), "ratio": row.ratio, "fitted": row in fitted} for row in (*fitted, *predicted)]
        print_json({"rates": to_json(rates), "results": told})
        return
    table = figures_table(["", "K", "measured", "model", "ratio", ""], f"{path.name}: seconds of a step")
    for rows, what in ((fitted, "fitted"), (predicted, "predicted")):
        for row in rows:
            cells = (f"{row.measured_s:.2f}", f"{row.predicted_s:.2f}", f"{row.ratio:.2f}", what)
            table.add_row(row.scheme, str(row.micro_batches), *cells)
    show(table)
    links = ", ".join(f"{domain} {share:.2f}" for domain, share in rates.link_efficiency.items())
    print(f"Rates: {rates.flops:.3g} FLOP/s, packing {rates.memory:.3g} bytes/s, share of links' rates: {links}")
