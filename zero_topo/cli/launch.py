# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo launch``: print the script of a Slurm job for a machine, or the machine's variables for a shell."""

from __future__ import annotations

import os

import typer

from zero_topo.cli.options import taking
from zero_topo.launch.env import PORT
from zero_topo.launch.machines import load_launch_machine
from zero_topo.launch.slurm import MachineName, Port, SlurmJob, script
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.presets import load_machine

launch = typer.Typer(
    help="Print a Slurm script, or a machine's variables.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@launch.command(context_settings={"allow_interspersed_args": False})  # the program's options are its own
@taking(SlurmJob)
def slurm(options: SlurmJob) -> None:
    """Print a Slurm batch script. Read it, then submit it: zero-topo launch slurm ... | sbatch."""
    target = options.target
    if target.preset is not None and load_machine(target.preset).clusters:
        missing = [f"--{name}" for name in ("account", "time") if getattr(options, name) is None]
        if missing:
            raise ValueError(f"{target.name} refuses a job without {' and '.join(missing)}; give them")
    print(script(options), end="")


@launch.command()
def env(machine: MachineName = "generic", master_port: Port = PORT) -> None:
    """Print a machine's variables for a shell. Use: eval "$(zero-topo launch env --machine NAME)".

    Variables that are set already are left out. Inside of a Slurm job MASTER_ADDR and MASTER_PORT come with them, for
    torchrun.
    """
    known = load_launch_machine(machine)
    for setting in (*known.variables, *known.doctors):
        if setting.name not in os.environ:
            print(f"# {setting.comment}\nexport {setting.bash}")
    view = launcher_view(os.environ)
    if view is not None and view.hosts and "MASTER_ADDR" not in os.environ:
        print("# The ranks meet on the first node of the job.")
        print(f"export MASTER_ADDR={view.hosts[0]} MASTER_PORT={master_port}")
