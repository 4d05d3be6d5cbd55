# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How ranks are started on a machine: ``*.json`` here, one file per machine, each setting with
reason and source.

What a machine *is* stands in its topology preset, and the variables without which it runs badly in
the doctor's table; a file here adds what only a launch needs and names the preset.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from zero_topo.strict import (
    Count,
    did_you_mean,
    packaged,
    parse_json,
    read,
    read_text,
    strict_dataclass,
)
from zero_topo.topology.presets import load_machine


@strict_dataclass
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
    def bash(self) -> str:
        """``NAME="value"`` of a variable, for a shell that is to expand the value."""
        name, _, value = self.use.partition("=")
        return f'{name}="{value}"'


@strict_dataclass
class LaunchMachine:
    """Describes how to start ranks on a machine.

    Attributes:
        name: what ``--machine`` calls it.
        description: one line for people.
        preset: its topology preset, or None if there is none.
        ranks_per_node: ranks of a full node; None if the user says.
        cpus_per_rank: cores of each rank.
        modules: of the environment-modules system, to load.
        job: options of the job, in the scheduler's form.
        step: options of the command that starts the ranks, its CPU and GPU binding among them.
        variables: environment variables, ``NAME=value``; a shell expands the value.
        scheduler: "slurm", "flux" or "pbs", whose options those are; None if there are none and any
            will do.
        address: ``MASTER_ADDR=value`` on the first node, where the address that its own name
            resolves to will not do.
        disk: ``NODE_DISK=folder`` on a disk of each node, for a Python environment that is copied
            there.
        disk_job: options of a job that uses it.
    """

    name: str
    description: str
    preset: str | None
    ranks_per_node: Count | None
    cpus_per_rank: Count
    modules: tuple[Setting, ...]
    job: tuple[Setting, ...]
    step: tuple[Setting, ...]
    variables: tuple[Setting, ...]
    scheduler: Literal["slurm", "flux", "pbs"] | None = None
    address: tuple[Setting, ...] = ()
    disk: tuple[Setting, ...] = ()
    disk_job: tuple[Setting, ...] = ()

    def __post_init__(self) -> None:
        if self.preset is not None:
            load_machine(self.preset)

    @property
    def doctors(self) -> list[Setting]:
        """Variables whose absence the doctor complains of on the preset, with what happens then."""
        from zero_topo.doctor.variables import rules_of

        rules = [
            rule for rule in rules_of(self.preset) if rule.unset and (rule.machines or rule.others)
        ]
        own = {setting.name for setting in self.variables}
        once = {rule.variable: rule for rule in rules if rule.variable not in own}.values()
        return [
            Setting(f"{rule.variable}={rule.wanted}", rule.reason, rule.source) for rule in once
        ]


def machine_names() -> list[str]:
    """Names of the machines known here, sorted."""
    return sorted(
        entry.name[:-5]
        for entry in resources.files(__package__).iterdir()
        if entry.name.endswith(".json")
    )


def load_launch_machine(setting: str) -> LaunchMachine:
    """A machine by its name, or by the path of a JSON file of the same form (ends in ``.json``).

    Raises:
        ValueError: if there is none, or its file is broken.
    """
    if setting.endswith(".json"):
        try:
            return read(
                LaunchMachine,
                setting,
                parse_json(read_text(Path(setting), setting), f"--machine {setting}"),
            )
        except OSError as error:
            raise ValueError(
                f"--machine {setting}: cannot be read ({error.strerror}); give a name or a file"
            ) from None
    names = machine_names()
    if setting not in names:
        raise ValueError(
            f"--machine {setting}: unknown{did_you_mean(setting, names)} (known: "
            f"{', '.join(names)}; or a path to a .json file)"
        )
    return read(LaunchMachine, f"machine {setting!r}", packaged(__package__, f"{setting}.json"))
