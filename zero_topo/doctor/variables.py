# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks of environment variables known to hurt; what is known is in ``variables.json``, one row each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from zero_topo.doctor.finding import FAIL, OK, STATES, WARN, Finding
from zero_topo.doctor.surroundings import Surroundings
from zero_topo.topology.checks import check_keys, check_strings


@dataclass(frozen=True)
class Rule:
    """What is known of one variable.

    Attributes:
        machines: presets it holds on; empty for every machine.
        variable: its name.
        bad: values that hurt; each is compared whole, or as a beginning if it ends in ``*``.
        unset: whether it hurts too if it is not set.
        wanted: the value to set.
        state: "warn" or "fail", how much it hurts.
        reason: what happens.
        source: who says so.
    """

    machines: tuple[str, ...]
    variable: str
    bad: tuple[str, ...]
    unset: bool
    wanted: str
    state: str
    reason: str
    source: str

    def judge(self, env: Mapping[str, str]) -> Finding:
        """How an environment stands."""
        value = env.get(self.variable, "")
        hurts = any(value.startswith(bad[:-1]) if bad.endswith("*") else value == bad for bad in self.bad)
        if not value and self.unset:
            return Finding(self.state, self.variable, f"not set: {self.reason}", self._fix())
        if value and hurts:
            return Finding(self.state, f"{self.variable}={value}", self.reason, self._fix())
        return Finding(OK, self.variable, f"={value}" if value else "not set")

    def _fix(self) -> str:
        return f"export {self.variable}={self.wanted} ({self.source})"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rule:
        """Build from a row of the file.

        Raises:
            ValueError: if a key is unknown or missing, or a value does not fit.
        """
        keys = list(cls.__dataclass_fields__)
        check_keys("variables.json", data, keys, required=keys)
        what = f"variables.json: {data['variable']}"
        if data["state"] not in STATES[1:]:
            raise ValueError(f"{what}: state is {data['state']!r}; it must be one of {STATES[1:]}")
        lists = {key: check_strings(f"{what}: {key}", data[key]) for key in ("machines", "bad")}
        return cls(**{**data, **lists})


def load_rules() -> list[Rule]:
    """All rows of ``variables.json``."""
    text = resources.files(__package__).joinpath("variables.json").read_text(encoding="utf-8")
    return [Rule.from_json(row) for row in json.loads(text)]


def variables(seen: Surroundings) -> Iterator[Finding]:
    """Each variable that hurts on this machine, and one line for all that do not."""
    machine = seen.machine_name()
    rules = [rule for rule in load_rules() if not rule.machines or machine in rule.machines]
    judged = [rule.judge(seen.env) for rule in rules]
    problems = [finding for finding in judged if finding.state in (WARN, FAIL)]
    yield from problems
    where = machine or "no machine that is known"
    yield Finding(OK, "variables", f"{len(judged) - len(problems)} of {len(judged)} known to matter are well ({where})")
