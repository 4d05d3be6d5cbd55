# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo doctor``: is this installation, machine and environment fit for a run?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from zero_topo.cli.output import print_json
from zero_topo.topology.presets import load_machine

SICK = 1


def doctor(
    machine: Annotated[
        str | None,
        typer.Option(help="Preset; default: detected from Slurm and loaded modules."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Check for problems that make a run fail or slow. One line each, with the fix; exit status 1
    for a failure.
    """
    from zero_topo.doctor import FAIL, WARN, examine
    from zero_topo.doctor.variables import known_machine

    if machine is not None:
        load_machine(machine)
    name = machine or known_machine()
    findings = list(examine(name))
    states = [finding.state for finding in findings]
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print_json({"machine": name, "findings": rows, "failed": states.count(FAIL)})
    else:
        for finding in findings:
            print(f"{finding.state:<4}  {finding.subject}: {finding.line()}")
        print(
            f"{len(findings)} checks: {states.count(WARN)} warnings, {states.count(FAIL)} failures"
        )
    if FAIL in states:
        raise typer.Exit(SICK)
