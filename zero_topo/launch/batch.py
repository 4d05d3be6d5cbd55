# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes the batch script of a job of Slurm, Flux or PBS.

``job.sbatch``, ``job.flux`` and ``job.pbs`` are the scripts' templates, ``environment.sbatch`` that
of the lines that unpack a Python environment. A script is self-contained: it reads nothing from the
environment in which it is submitted except what the scheduler passes on. Each setting follows a
comment with its reason and its source.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from string import Template
from typing import Annotated

import typer

from zero_topo.launch.env import PORT
from zero_topo.launch.machines import LaunchMachine, Setting, load_launch_machine, machine_names
from zero_topo.strict import offering

EXPORT = "export {0.bash}"
WIDTH = 110
ADDRESS = {
    "slurm": "MASTER_ADDR=$(hostname -i | cut -d' ' -f1)\n",
    "flux": "MASTER_ADDR=$(flux hostlist --nth=0 local)\n",
    "pbs": "MASTER_ADDR=$(hostname -i | cut -d' ' -f1)\n",
}
"""Scheduler -> the line of a script that sets the address of its own node, which is that of
rank 0.
"""
DOCTOR = (
    "# -- Variables that `zero-topo doctor` checks; a comment says why, or what happens without "
    "the variable."
)
_PLAIN = re.compile(r"[\w./:=@%+,{}-]+")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?")
MINUTE = 60
HOUR = 3600
DAY = 86400
MachineName = Annotated[
    str,
    typer.Option(
        autocompletion=offering(machine_names),
        metavar="NAME|FILE",
        help="A preset with a launch file, such as frontier; generic; or a machine file.",
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port on which the ranks meet.")]


@dataclass(frozen=True)
class Scheduler:
    """How a batch script speaks to a scheduler.

    Attributes:
        name: of its command, and of its launch machines.
        title: as people write it.
        directive: starts the lines that it reads; options follow.
        log: default name of the log; empty for the scheduler's own.
        options: our option -> the scheduler's, up to its value.
        time: a time limit in seconds -> its text.
    """

    name: str
    title: str
    directive: str
    log: str
    options: dict[str, str]
    time: Callable[[int], str]

    @property
    def template(self) -> str:
        """The file of the script's template."""
        return "job.sbatch" if self is SLURM else f"job.{self.name}"


def clock(seconds: int) -> str:
    """Return a time limit as hours, minutes and seconds."""
    hours, rest = divmod(seconds, HOUR)
    minutes, rest = divmod(rest, MINUTE)
    return f"{hours}:{minutes:02d}:{rest:02d}"


SLURM = Scheduler(
    "slurm",
    "Slurm",
    "#SBATCH",
    "%x-%j.out",
    {"log": "--output=", "account": "--account=", "partition": "--partition=", "time": "--time="},
    clock,
)
FLUX = Scheduler(
    "flux",
    "Flux",
    "# flux:",
    "{{name}}-{{id}}.out",
    {"log": "--output=", "account": "--bank=", "partition": "--queue=", "time": "--time-limit="},
    "{}s".format,
)
PBS = Scheduler(
    "pbs",
    "PBS",
    "#PBS",
    "",
    {"log": "-o ", "account": "-A ", "partition": "-q ", "time": "-l walltime="},
    clock,
)


@dataclass(frozen=True)
class BatchJob:
    """The options of ``zero-topo launch slurm``, ``flux`` and ``pbs``: a batch job."""

    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND", help="Program that each rank runs, and its arguments."
        ),
    ] = ()  # type: ignore[assignment]
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1
    machine: MachineName = "generic"
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node; default: the machine's.")
    ] = None
    account: Annotated[str | None, typer.Option(help="Account, Flux's bank or PBS's project.")] = (
        None
    )
    time: Annotated[str | None, typer.Option(metavar="[H:]MM:SS", help="Time limit.")] = None
    partition: Annotated[
        str | None, typer.Option(help="Partition or queue; default: the machine's.")
    ] = None
    name: Annotated[str, typer.Option(help="Job name.")] = "zero-topo"
    log: Annotated[
        str | None,
        typer.Option(help="Log file, in the scheduler's form; default: name and number."),
    ] = None
    master_port: Port = PORT
    environment: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.tar.gz",
            help="Python environment (conda pack, or tar of a venv) to unpack on each node's disk.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse what would end the script's lines or break them.

        Raises:
            ValueError: naming the option.
        """
        target = self.target
        if not self.command:
            raise ValueError("no command to start; put it after --, as in: -- python train.py ...")
        if target.ranks_per_node not in (None, self.on_node):
            raise ValueError(
                f"--ranks-per-node {self.on_node}: {target.name} has {target.ranks_per_node} on "
                "each node, and its binding is for that many; leave it out, or give --machine "
                "FILE.json"
            )
        if self.environment is not None and not target.disk:
            raise ValueError(
                f"--environment {self.environment}: machine {target.name} names no disk of a node; "
                "leave it out, "
                'or give --machine FILE.json with a "disk"'
            )
        for option in ("name", "log", "account", "time", "partition", "environment"):
            value = getattr(self, option)
            if value is not None and not _PLAIN.fullmatch(value):
                raise ValueError(
                    f"--{option} {value!r}: use letters, digits and . / : = @ % + - only"
                )
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ValueError(
                f"--time {self.time!r}: is no time limit; write H:MM:SS, MM:SS or D-HH:MM:SS"
            )

    @cached_property
    def target(self) -> LaunchMachine:
        """How ranks are started on the machine."""
        return load_launch_machine(self.machine)

    @property
    def on_node(self) -> int:
        """The number of ranks on each node."""
        ranks = self.ranks_per_node or self.target.ranks_per_node
        if ranks is None:
            raise ValueError(
                f"--machine {self.machine} has no number of ranks per node; give --ranks-per-node"
            )
        return ranks

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds; Slurm's forms are minutes, M:SS, H:MM:SS, D-H, D-H:MM and
        D-H:MM:SS.
        """
        found = _TIME.fullmatch(self.time or "")
        if found is None:
            return None
        days, first, second, third = (int(number or 0) for number in found.groups())
        if found[1] is not None or found[4] is not None:
            return days * DAY + first * HOUR + second * MINUTE + third
        return first * MINUTE + second


def script(job: BatchJob, scheduler: Scheduler = SLURM) -> str:
    """The batch script, ready for the scheduler's command of submission.

    Raises:
        ValueError: if the machine has another scheduler, or a Python environment is to be copied
            without Slurm.
    """
    target = job.target
    if target.scheduler not in (None, scheduler.name):
        raise ValueError(
            f"jobs on {target.name} are not started by {scheduler.title}; use zero-topo launch "
            f"{target.scheduler}"
        )
    if job.environment is not None and scheduler is not SLURM:
        raise ValueError(
            f"--environment {job.environment}: {scheduler.title} has no sbcast to copy it to each "
            "node; leave it out"
        )
    asked, resources = _options(job, scheduler)
    variables = _lines(target.variables, EXPORT, "# -- Environment of every rank.")
    passed = f"The Python environment active at submission is passed on by {scheduler.title}."
    words = {
        **{name: getattr(job, name) for name in ("nodes", "on_node", "name")},
        "ranks": job.nodes * job.on_node,
        "target": target.name,
        "about": _comment(f"{target.description}. {passed}"),
        "asked": asked,
        "cpus": target.cpus_per_rank,
        "resources": resources,
        "software": _lines(target.modules, "module load {0.use}", "# -- Software.")
        + _unpacked(job),
        "port": job.master_port,
        "address": _lines(target.address, "{0.bash}") or ADDRESS[scheduler.name],
        "variables": variables + _lines(target.doctors, EXPORT, DOCTOR),
        "step": _lines(target.step, "{0.use}", indent="  "),
        "command": shlex.join(job.command),
    }
    return _template(scheduler.template).substitute(words)


def _options(job: BatchJob, scheduler: Scheduler) -> tuple[str, str]:
    """The scheduler's lines for the options that the user gave, then those of the machine."""
    asked = {
        "log": job.log or scheduler.log or None,
        "account": job.account,
        "partition": job.partition,
        "time": None if job.seconds is None else scheduler.time(job.seconds),
    }
    given = {
        scheduler.options[option]: value for option, value in asked.items() if value is not None
    }
    lines = [f"{scheduler.directive} {option}{value}\n" for option, value in given.items()]
    options = (*job.target.job, *(job.target.disk_job if job.environment else ()))
    others = [each for each in options if f"{each.name}=" not in given]
    return "".join(lines), _lines(others, f"{scheduler.directive} {{0.use}}", end=":")


def _unpacked(job: BatchJob) -> str:
    """The lines that unpack a Python environment, if there is one to unpack."""
    if job.environment is None:
        return ""
    title = "# -- The Python environment, unpacked on a disk of each node."
    unpack = _template("environment.sbatch")
    lines = unpack.substitute(nodes=job.nodes, archive=job.environment)
    return _lines(job.target.disk, EXPORT, title) + lines


def _template(name: str) -> Template:
    return Template(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _lines(
    settings: Sequence[Setting], form: str, title: str = "", end: str = ".", indent: str = ""
) -> str:
    """Each setting in a form, under a comment with its reason; nothing, without a title too, if
    there are none.
    """
    start = f"\n{title}\n" if title and settings else ""
    written = (
        f"{_comment(f'{each.comment}{end}', indent)}{indent}{form.format(each)}\n"
        for each in settings
    )
    return start + "".join(written)


def _comment(text: str, indent: str = "") -> str:
    first = text.split()[0]
    # A name such as kdreg2 stays as it is
    text = text[:1].upper() + text[1:] if first.isalpha() else text
    start = f"{indent}# "
    wrapper = textwrap.TextWrapper(
        WIDTH, start, start, break_long_words=False, break_on_hyphens=False
    )
    lines = wrapper.wrap(text)
    return "".join(f"{line}\n" for line in lines)
