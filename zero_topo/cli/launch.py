# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo launch``: print a job's script for Slurm, Flux or PBS, or a machine's variables for a
shell.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from zero_topo.launch.batch import SCHEDULERS, BatchJob, script
from zero_topo.launch.env import PORT, first_host
from zero_topo.launch.machines import load_launch_machine

launch = typer.Typer(
    help="Print a batch script, or a machine's variables.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
MachineName = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="A preset with a launch file, such as frontier; generic; or a machine file.",
    ),
]


def batch(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND", help="Program that each rank runs, and its arguments."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    machine: MachineName = "generic",
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node; default: the machine's.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(help="Account, Flux's bank or PBS's project.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Partition or queue; default: the machine's.")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="H:MM:SS", help="Time limit.")] = None,
    environment: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.tar.gz",
            help="Python environment (conda pack, or tar of a venv) to unpack on each node's disk.",
        ),
    ] = None,
) -> None:
    """Print a batch script. Read it, then submit it, for example: zero-topo launch slurm ... |
    sbatch.
    """
    scheduler = context.info_name
    assert scheduler in SCHEDULERS, "the command's name"
    target = load_launch_machine(machine)
    asked = ranks_per_node, account, partition, time, environment
    print(script(BatchJob(scheduler, target, nodes, command or [], *asked)), end="")


for name in SCHEDULERS:
    # The options of the program are its own
    launch.command(name, context_settings={"allow_interspersed_args": False})(batch)


@launch.command()
def env(machine: MachineName = "generic") -> None:
    """Print a machine's variables for a shell. Use: eval "$(zero-topo launch env --machine NAME)".

    Variables that are set already are left out. Inside of a Slurm job MASTER_ADDR and MASTER_PORT
    come with them, for torchrun.
    """
    known = load_launch_machine(machine)
    for setting in (*known.variables, *known.doctors):
        if setting.name not in os.environ:
            print(f"# {setting.reason} ({setting.source})\nexport {setting.bash}")
    host = first_host(os.environ)
    if host is not None and "MASTER_ADDR" not in os.environ:
        print("# The ranks meet on the first node of the job.")
        print(f"export MASTER_ADDR={host} MASTER_PORT={PORT}")
