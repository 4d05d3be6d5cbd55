# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks environment variables that are known to cause problems, listed in ``variables.json``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Literal

from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.strict import Strings, packaged, read, strict_dataclass
from zero_topo.topology.presets import machine_of_cluster, preset_names

_QUOTED = re.compile(r"[ ^]")


@strict_dataclass
class Other:
    """What another machine's site wants in place of a row's value, and the document that says
    so.
    """

    wanted: str
    source: str


@strict_dataclass
class Rule:
    """One environment variable: values that cause trouble, why, and what to set.

    Attributes:
        machines: presets to which the rule applies; empty for every machine.
        variable: its name.
        bad: values that cause trouble; one that ends in ``*`` stands for all values that begin so.
        unset: whether an unset variable causes trouble too.
        wanted: the value to set.
        state: "warn" or "fail".
        reason: the trouble.
        source: the document that describes it.
        others: presets with the same trouble whose sites document a value of their own.
    """

    machines: Strings
    variable: str
    bad: Strings
    unset: bool
    wanted: str
    state: Literal["warn", "fail"]
    reason: str
    source: str
    others: Mapping[str, Other] = field(default_factory=dict)

    def on(self, machine: str | None) -> Rule | None:
        """Return the rule of one machine, with its site's value; None if the row does not concern
        it.
        """
        if machine is not None and machine in self.others:
            other = self.others[machine]
            return replace(self, wanted=other.wanted, source=other.source)
        return self if not self.machines or machine in self.machines else None

    def judge(self, env: Mapping[str, str]) -> Finding:
        """Return the finding for an environment."""
        value = env.get(self.variable, "")
        hurts = any(
            value.startswith(bad[:-1]) if bad.endswith("*") else value == bad for bad in self.bad
        )
        if not value and self.unset:
            return Finding(self.state, self.variable, f"not set: {self.reason}", self._fix())
        if value and hurts:
            return Finding(self.state, f"{self.variable}={value}", self.reason, self._fix())
        return Finding(OK, self.variable, f"={value}" if value else "not set")

    def _fix(self) -> str:
        value = f'"{self.wanted}"' if _QUOTED.search(self.wanted) else self.wanted
        return f"export {self.variable}={value} ({self.source})"


def load_rules() -> list[Rule]:
    """Return all rows of ``variables.json``."""
    rules: list[Rule] = read(list[Rule], "variables.json", packaged(__package__, "variables.json"))
    return rules


def rules_of(machine: str | None) -> list[Rule]:
    """Return the rules of a machine, those of every machine among them; None for an unknown one."""
    return [rule for row in load_rules() if (rule := row.on(machine)) is not None]


def variables(machine: str | None) -> Iterator[Finding]:
    """Yield a finding for each harmful variable on a machine, and one for all others."""
    judged = [rule.judge(os.environ) for rule in rules_of(machine)]
    problems = [finding for finding in judged if finding.state in (WARN, FAIL)]
    yield from problems
    where = machine or "the machine is not known"
    yield Finding(
        OK,
        "variables",
        f"{len(judged) - len(problems)} of {len(judged)} that can do harm are set well ({where})",
    )


def known_machine() -> str | None:
    """Return the preset of the machine that this runs on, or None."""
    known = machine_of_cluster(os.environ.get("SLURM_CLUSTER_NAME"))
    if known is not None:
        return known.name
    # Set by the modules of OLCF's machines.
    system = os.environ.get("LMOD_SYSTEM_NAME", "").lower()
    return system if system in preset_names() else None
