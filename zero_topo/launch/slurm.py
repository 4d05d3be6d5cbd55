# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes the batch script of a Slurm job.

``job.sbatch`` is the script's template, ``environment.sbatch`` that of the lines that unpack a Python environment. The
script is self-contained: it reads nothing from the environment in which it is submitted except what ``sbatch`` passes
on. Each setting follows a comment with its reason and its source.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from string import Template
from typing import Annotated

import typer

from zero_topo.cli.options import offering
from zero_topo.launch.env import PORT
from zero_topo.launch.machines import LaunchMachine, Setting, load_launch_machine, machine_names

EXPORT = "export {0.bash}"
WIDTH = 110
_PLAIN, _TIME = re.compile(r"[\w./:=@%+,-]+"), re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
MachineName = Annotated[
    str,
    typer.Option(
        autocompletion=offering(machine_names),
        metavar="NAME|FILE",
        help="frontier, lumi-g, perlmutter, dgx-a100, dgx-h100, generic, or a machine file.",
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port on which the ranks meet.")]


@dataclass(frozen=True)
class SlurmJob:
    """The options of ``zero-topo launch slurm``: a batch job."""

    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="Program that each rank runs, and its arguments.")
    ] = ()  # type: ignore[assignment]
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1
    machine: MachineName = "generic"
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node; default: the machine's.")] = None
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None
    time: Annotated[str | None, typer.Option(metavar="[H:]MM:SS", help="Time limit.")] = None
    partition: Annotated[str | None, typer.Option(help="Slurm partition; default: the machine's.")] = None
    name: Annotated[str, typer.Option(help="Job name.")] = "zero-topo"
    log: Annotated[str, typer.Option(help="Log file; %x is the job name, %j its number.")] = "%x-%j.out"
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
                "each node, and its binding is for that many; leave it out, or give --machine FILE.json"
            )
        if self.environment is not None and not target.disk:
            raise ValueError(
                f"--environment {self.environment}: machine {target.name} names no disk of a node; leave it out, "
                'or give --machine FILE.json with a "disk"'
            )
        for option in ("name", "log", "account", "time", "partition", "environment"):
            value = getattr(self, option)
            if value is not None and not _PLAIN.fullmatch(value):
                raise ValueError(f"--{option} {value!r}: use letters, digits and . / : = @ % + - only")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ValueError(f"--time {self.time!r}: Slurm does not read it; write H:MM:SS, MM:SS or D-HH:MM:SS")

    @cached_property
    def target(self) -> LaunchMachine:
        """How ranks are started on the machine."""
        return load_launch_machine(self.machine)

    @property
    def on_node(self) -> int:
        """The number of ranks on each node."""
        ranks = self.ranks_per_node or self.target.ranks_per_node
        if ranks is None:
            raise ValueError(f"--machine {self.machine} has no number of ranks per node; give --ranks-per-node")
        return ranks


def script(job: SlurmJob) -> str:
    """The batch script, ready for ``sbatch``."""
    target = job.target
    asked = {"--account": job.account, "--partition": job.partition, "--time": job.time}
    sbatch = (*target.sbatch, *(target.disk_sbatch if job.environment else ()))
    doctor = "# -- Variables that `zero-topo doctor` checks; a comment says why, or what happens without the variable."
    variables = _lines(target.variables, EXPORT, "# -- Environment of every rank.")
    unpacked = ""
    if job.environment is not None:
        unpacked = _lines(target.disk, EXPORT, "# -- The Python environment, unpacked on a disk of each node.")
        unpacked += _template("environment.sbatch").substitute(nodes=job.nodes, archive=job.environment)
    words = {
        **{name: getattr(job, name) for name in ("nodes", "on_node", "name", "log")},
        "ranks": job.nodes * job.on_node,
        "target": target.name,
        "about": _comment(f"{target.description}. The Python environment active at submission is passed on by sbatch."),
        "asked": "".join(f"#SBATCH {option}={value}\n" for option, value in asked.items() if value is not None),
        "cpus": target.cpus_per_rank,
        "resources": _lines([each for each in sbatch if asked.get(each.name) is None], "#SBATCH {0.use}", end=":"),
        "software": _lines(target.modules, "module load {0.use}", "# -- Software.") + unpacked,
        "port": job.master_port,
        "variables": variables + _lines(target.doctors, EXPORT, doctor),
        "srun": _lines(target.srun, "{0.use}", indent="  "),
        "command": shlex.join(job.command),
    }
    return _template("job.sbatch").substitute(words)


def _template(name: str) -> Template:
    return Template(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _lines(settings: Sequence[Setting], form: str, title: str = "", end: str = ".", indent: str = "") -> str:
    """Each setting in a form, under a comment with its reason; nothing, without a title too, if there are none."""
    start = f"\n{title}\n" if title and settings else ""
    written = (f"{_comment(f'{each.comment}{end}', indent)}{indent}{form.format(each)}\n" for each in settings)
    return start + "".join(written)


def _comment(text: str, indent: str = "") -> str:
    first = text.split()[0]
    text = text[:1].upper() + text[1:] if first.isalpha() else text  # a name such as kdreg2 stays as it is
    start = f"{indent}# "
    lines = textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_long_words=False)
    return "".join(f"{line}\n" for line in lines)
