# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks environment variables that are known to cause problems, listed in ``variables.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.doctor.surroundings import Surroundings
from zero_topo.strict import Flag, Strings, packaged, read, strict_dataclass


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
    """

    machines: Strings
    variable: str
    bad: Strings
    unset: Flag
    wanted: str
    state: Literal["warn", "fail"]
    reason: str
    source: str

    def judge(self, env: Mapping[str, str]) -> Finding:
        """Return the finding for an environment."""
        value = env.get(self.variable, "")
        hurts = any(value.startswith(bad[:-1]) if bad.endswith("*") else value == bad for bad in self.bad)
        if not value and self.unset:
            return Finding(self.state, self.variable, f"not set: {self.reason}", self._fix())
        if value and hurts:
            return Finding(self.state, f"{self.variable}={value}", self.reason, self._fix())
        return Finding(OK, self.variable, f"={value}" if value else "not set")

    def _fix(self) -> str:
        return f"export {self.variable}={self.wanted} ({self.source})"


def load_rules() -> list[Rule]:
    """Return all rows of ``variables.json``."""
    rules: list[Rule] = read(list[Rule], "variables.json", packaged(__package__, "variables.json"))
    return rules


def variables(seen: Surroundings) -> Iterator[Finding]:
    """Yield a finding for each harmful variable on this machine, and one for all others."""
    machine = seen.machine_name()
    rules = [rule for rule in load_rules() if not rule.machines or machine in rule.machines]
    judged = [rule.judge(seen.env) for rule in rules]
    problems = [finding for finding in judged if finding.state in (WARN, FAIL)]
    yield from problems
    where = machine or "the machine is not known"
    yield Finding(
        OK, "variables", f"{len(judged) - len(problems)} of {len(judged)} that can do harm are set well ({where})"
    )
