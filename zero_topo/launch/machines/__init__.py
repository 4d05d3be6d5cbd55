# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How ranks are started on a machine: ``*.json`` here, one file per machine, each setting with reason and source.

What a machine *is* stands in its topology preset, and the variables without which it runs badly in the doctor's table;
a file here adds what only a launch needs and names the preset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from zero_topo.topology.checks import check_int, check_keys, check_mapping, nearest
from zero_topo.topology.presets import load_machine

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[\w./,:@%+$-]*")
WORD = re.compile(r"[\w./,:=@%+-]+")


@dataclass(frozen=True)
class Setting:
    """One thing to set: an option, a module or a ``NAME=value``; what it does and who says so."""

    use: str
    reason: str
    source: str

    @property
    def name(self) -> str:
        """The option or variable without its value."""
        return self.use.partition("=")[0]

    @property
    def comment(self) -> str:
        """For the line above it."""
        return f"{self.reason} ({self.source})"

    @classmethod
    def from_json(cls, what: str, data: object, form: re.Pattern[str]) -> Setting:
        """Build from an entry of a machine's file; ``form`` is what it may look like, for a shell will read it.

        Raises:
            ValueError: if a key is unknown or missing, or a value is empty or has another form.
        """
        entry, keys = check_mapping(what, data), [item.name for item in fields(cls)]
        check_keys(what, entry, keys, required=keys)
        for key in keys:
            if not isinstance(entry[key], str) or not entry[key].strip() or "\n" in entry[key]:
                raise ValueError(f"{what}: {key} is {entry[key]!r}; it must be one line of text")
        if not form.fullmatch(entry["use"]):
            raise ValueError(f"{what}: use is {entry['use']!r}; it must be one word that needs no quotes in a script")
        return cls(**entry)


@dataclass(frozen=True)
class LaunchMachine:
    """How to start ranks on a machine.

    Attributes:
        name: what ``--machine`` calls it.
        description: one line for people.
        preset: its topology preset, or None if there is none.
        ranks_per_node: ranks of a full node; None if the user says.
        cpus_per_rank: cores of each rank.
        modules: of the environment-modules system, to load.
        sbatch: options of the job.
        srun: options of the step, its CPU and GPU binding among them.
        variables: environment variables, ``NAME=value``; a shell expands the value.
        doctors: those whose absence the doctor complains of on the preset, with what happens then; not in the file.
    """

    name: str
    description: str
    preset: str | None
    ranks_per_node: int | None
    cpus_per_rank: int
    modules: tuple[Setting, ...]
    sbatch: tuple[Setting, ...]
    srun: tuple[Setting, ...]
    variables: tuple[Setting, ...]
    doctors: tuple[Setting, ...] = ()

    @classmethod
    def from_json(cls, what: str, data: object) -> LaunchMachine:
        """Build from a file's content, the doctor's variables for the preset added.

        Raises:
            ValueError: if a key is unknown or missing, or a value does not fit.
        """
        entry, keys = check_mapping(what, data), [item.name for item in fields(cls) if item.name != "doctors"]
        check_keys(what, entry, keys, required=keys)
        if entry["ranks_per_node"] is not None:
            check_int(f"{what}: ranks_per_node", entry["ranks_per_node"])
        check_int(f"{what}: cpus_per_rank", entry["cpus_per_rank"])
        lists = {key: _settings(what, key, entry[key]) for key in ("modules", "sbatch", "srun", "variables")}
        own = {setting.name for setting in lists["variables"]}
        doctors = () if entry["preset"] is None else _doctors(load_machine(entry["preset"]).name)
        lists["doctors"] = tuple(setting for setting in doctors if setting.name not in own)
        return cls(**{**entry, **lists})


def machine_names() -> list[str]:
    """Names of the machines known here, sorted."""
    return sorted(entry.name[:-5] for entry in resources.files(__package__).iterdir() if entry.name.endswith(".json"))


def load_launch_machine(setting: str) -> LaunchMachine:
    """A machine by its name, or by the path of a JSON file of the same form (ends in ``.json``).

    Raises:
        ValueError: if there is none, or its file is broken.
    """
    if setting.endswith(".json"):
        try:
            return LaunchMachine.from_json(setting, json.loads(Path(setting).read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"--machine {setting}: cannot be read ({error.strerror}); give a name or a file") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"--machine {setting}: no JSON ({error})") from None
    names = machine_names()
    if setting not in names:
        raise ValueError(
            f"--machine {setting}: unknown; did you mean {nearest(setting, names)!r}? (known: {', '.join(names)}; or a "
            "path to a .json file)"
        )
    text = resources.files(__package__).joinpath(f"{setting}.json").read_text(encoding="utf-8")
    return LaunchMachine.from_json(f"machine {setting!r}", json.loads(text))


def _settings(what: str, key: str, entries: object) -> tuple[Setting, ...]:
    if not isinstance(entries, list):
        raise ValueError(f"{what}: {key} is {entries!r}; it must be a list of objects")
    form = VARIABLE if key == "variables" else WORD
    return tuple(Setting.from_json(f"{what}: {key} {number}", one, form) for number, one in enumerate(entries))


def _doctors(preset: str) -> list[Setting]:
    from zero_topo.doctor.variables import load_rules

    rules = [rule for rule in load_rules() if preset in rule.machines and rule.unset]
    once = {rule.variable: rule for rule in rules}.values()
    return [Setting(f"{rule.variable}={rule.wanted}", rule.reason, rule.source) for rule in once]


def bash_value(setting: Setting) -> str:
    """``NAME="value"`` of a variable, for a shell that is to expand the value."""
    name, _, value = setting.use.partition("=")
    return f'{name}="{value}"'


def without(settings: tuple[Setting, ...], given: Mapping[str, Any]) -> list[Setting]:
    """The settings whose option the user has not given (``given``: option -> value or None)."""
    return [setting for setting in settings if given.get(setting.name) is None]
