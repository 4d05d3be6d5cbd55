# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes the batch script of a job of Slurm, Flux or PBS.

``job.sbatch``, ``job.flux`` and ``job.pbs`` are the scripts' templates, ``environment.sbatch`` that
of the lines that unpack a Python environment. The machine's settings each follow a comment with
reason and source. A script reads nothing from the environment in which it is submitted except what
the scheduler passes on.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template

from zero_topo.launch.machines import LaunchMachine, Setting
from zero_topo.topology.presets import load_machine

EXPORT = "export {0.bash}"
WIDTH = 110
DOCTOR = (
    "# -- Variables that `zero-topo doctor` checks; a comment says why, or what happens without "
    "the variable."
)
_PLAIN = re.compile(r"[\w./:=@%+,{}-]+")
_TIME = re.compile(r"(\d+):(\d\d):(\d\d)")


@dataclass(frozen=True)
class Scheduler:
    """What differs between schedulers outside their templates.

    Attributes:
        title: as people write it.
        directive: starts the lines that it reads; options follow.
        account, partition, time: options up to their values.
        template: file of the script's template.
        address: sets MASTER_ADDR to the first node, which is that of rank 0.
        in_seconds: whether a time limit is in seconds, else H:MM:SS.
    """

    title: str
    directive: str
    account: str
    partition: str
    time: str
    template: str
    address: str
    in_seconds: bool = False


HOST_ADDRESS = "MASTER_ADDR=$(hostname -i | cut -d' ' -f1)\n"
SCHEDULERS = {
    "slurm": Scheduler(
        "Slurm", "#SBATCH", "--account=", "--partition=", "--time=", "job.sbatch", HOST_ADDRESS
    ),
    "flux": Scheduler(
        "Flux",
        "# flux:",
        "--bank=",
        "--queue=",
        "--time-limit=",
        "job.flux",
        "MASTER_ADDR=$(flux hostlist --nth=0 local)\n",
        in_seconds=True,
    ),
    "pbs": Scheduler("PBS", "#PBS", "-A ", "-q ", "-l walltime=", "job.pbs", HOST_ADDRESS),
}


@dataclass(frozen=True)
class BatchJob:
    """A batch job.

    Attributes:
        scheduler: a key of :data:`SCHEDULERS`.
        target: the machine.
        nodes: number of nodes.
        command: the program that each rank runs, and its arguments.
        ranks_per_node: None takes the machine's.
        account, partition, time: options of the scheduler, or None; the time as H:MM:SS.
        environment: archive of a Python environment to unpack on each node, or None.
    """

    scheduler: str
    target: LaunchMachine
    nodes: int
    command: Sequence[str]
    ranks_per_node: int | None = None
    account: str | None = None
    partition: str | None = None
    time: str | None = None
    environment: str | None = None


def script(job: BatchJob) -> str:
    """The batch script, ready for the scheduler's command of submission.

    Raises:
        ValueError: naming the option that is missing or does not fit.
    """
    _check(job)
    target = job.target
    scheduler = SCHEDULERS[job.scheduler]
    on_node = job.ranks_per_node or target.ranks_per_node or 1
    asked = _asked(job)
    settings = (*target.job, *(target.disk_job if job.environment else ()))
    # An option of the user takes the place of the machine's
    others = [each for each in settings if f"{each.name}=" not in asked]
    directives = [f"{scheduler.directive} {option}{value}\n" for option, value in asked.items()]
    passed = f"The Python environment active at submission is passed on by {scheduler.title}."
    words = {
        "target": target.name,
        "about": _comment(f"{target.description}. {passed}"),
        "nodes": job.nodes,
        "on_node": on_node,
        "ranks": job.nodes * on_node,
        "cpus": target.cpus_per_rank,
        "asked": "".join(directives),
        "resources": _lines(others, f"{scheduler.directive} {{0.use}}", end=":"),
        "software": _lines(target.modules, "module load {0.use}", "# -- Software.")
        + _unpacked(job),
        "address": _lines(target.address, "{0.bash}") or scheduler.address,
        "variables": _lines(target.variables, EXPORT, "# -- Environment of every rank.")
        + _lines(target.doctors, EXPORT, DOCTOR),
        "step": _lines(target.step, "{0.use}", indent="  "),
        "command": shlex.join(job.command),
    }
    return _template(scheduler.template).substitute(words)


def _check(job: BatchJob) -> None:
    """Refuse a job that its machine would refuse, and what would break the script's lines."""
    target = job.target
    title = SCHEDULERS[job.scheduler].title
    if target.scheduler not in (None, job.scheduler):
        raise ValueError(
            f"jobs on {target.name} are not started by {title}; use zero-topo launch "
            f"{target.scheduler}"
        )
    if not job.command:
        raise ValueError("no command to start; put it after --, as in: -- python train.py ...")
    given, known = job.ranks_per_node, target.ranks_per_node
    if given is None and known is None:
        raise ValueError(f"{target.name} has no number of ranks per node; give --ranks-per-node")
    if given and known and given != known:
        raise ValueError(
            f"--ranks-per-node {given}: {target.name} has {known} on each node, and its binding is "
            "for that many; leave it out, or give --machine FILE.json"
        )
    if job.environment is not None and (job.scheduler != "slurm" or not target.disk):
        raise ValueError(
            f"--environment {job.environment}: it is copied by Slurm's sbcast to a disk of each "
            f"node, which {title} on {target.name} lacks; leave it out"
        )
    needed = []
    if target.preset and load_machine(target.preset).clusters:
        needed = ["account", "time"]
    if target.scheduler == "pbs":
        needed = ["account", "time", "partition"]
    missing = [f"--{option}" for option in needed if getattr(job, option) is None]
    if missing:
        raise ValueError(f"{target.name} refuses a job without {' and '.join(missing)}; give them")
    for option in ("account", "partition", "environment"):
        value = getattr(job, option)
        if value is not None and not _PLAIN.fullmatch(value):
            raise ValueError(f"--{option} {value!r}: use letters, digits and . / : = @ % + - only")
    if job.time is not None and not _TIME.fullmatch(job.time):
        raise ValueError(f"--time {job.time!r}: is no time limit; write H:MM:SS")


def _asked(job: BatchJob) -> dict[str, str]:
    """The scheduler's option, up to its value -> the value that the user gave."""
    scheduler = SCHEDULERS[job.scheduler]
    time = job.time
    if time is not None and scheduler.in_seconds:
        hours, minutes, seconds = (int(part) for part in time.split(":"))
        time = f"{3600 * hours + 60 * minutes + seconds}s"
    given = {
        scheduler.account: job.account,
        scheduler.partition: job.partition,
        scheduler.time: time,
    }
    return {option: value for option, value in given.items() if value is not None}


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
    lines = [f"\n{title}\n"] if title and settings else []
    for each in settings:
        comment = _comment(f"{each.reason} ({each.source}){end}", indent)
        lines.append(f"{comment}{indent}{form.format(each)}\n")
    return "".join(lines)


def _comment(text: str, indent: str = "") -> str:
    # A name such as kdreg2 stays as it is
    if text.split()[0].isalpha():
        text = text[:1].upper() + text[1:]
    start = f"{indent}# "
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=start,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "".join(f"{line}\n" for line in lines)
