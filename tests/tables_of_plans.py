# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The table of ``docs/when-it-helps.md``: plans and bounds of 12 jobs, by the code of the command
``plan``.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.documents import row
from zero_topo.cli.plan import costs_of_schemes
from zero_topo.cli.tables import degrees
from zero_topo.config import AUTO
from zero_topo.cost.bounds import Cost
from zero_topo.cost.job import Job
from zero_topo.cost.model_files import load_model
from zero_topo.topology.presets import load_preset


class Case(NamedTuple):
    """A job."""

    machine: str
    ranks: int
    model: str
    micro_batches: int


CASES = (
    Case("frontier", 384, "gpt-neox-20b", 1),
    Case("frontier", 384, "gpt-neox-20b", 8),
    Case("frontier", 64, "gpt-neox-20b", 8),
    Case("frontier", 64, "llama-2-7b", 1),
    Case("lumi-g", 128, "llama-2-13b", 4),
    Case("perlmutter", 128, "llama-2-7b", 1),
    Case("perlmutter", 128, "llama-2-7b", 8),
    Case("dgx-a100", 128, "llama-2-13b", 4),
    Case("dgx-h100", 64, "llama-2-70b", 1),
    Case("dgx-h100", 64, "llama-2-70b", 8),
    Case("dgx-h100", 512, "llama-2-70b", 1),
    Case("dgx-h100", 8, "llama-2-7b", 4),
)


def plan_rows() -> list[str]:
    """Bounds of ZeRO-3, the rule's plan and topo."""
    return [row(_cells(case)) for case in CASES]


def _cells(case: Case) -> list[str]:
    machine = load_preset(case.machine, case.ranks)
    job = Job(load_model(case.model), micro_batches=case.micro_batches)
    costs, _ = costs_of_schemes(machine, machine, job)
    rule = costs[AUTO]
    topo = "-"
    if machine.ranks_per_gpu > 1:
        topo = _seconds(costs["topo"])
    return [
        case.machine,
        str(case.ranks),
        case.model,
        str(case.micro_batches),
        _seconds(costs["zero3"]),
        degrees(rule.config),
        _seconds(rule),
        topo,
    ]


def _seconds(cost: Cost) -> str:
    assert cost.bounds is not None
    return f"{cost.bounds.at_least:.2f} - {cost.bounds.at_most:.2f}"
