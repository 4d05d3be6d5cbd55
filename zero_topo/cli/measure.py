# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo topology --measure``: every rank of a job runs it; the ranks time messages and derive the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import typer

from zero_topo.cli.output import print_json
from zero_topo.launch.env import rank_environment
from zero_topo.observe.console import bar
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.render import render_tree

WRONG_INPUT = 2
HOW = "srun zero-topo topology --measure, or torchrun --nproc-per-node 8 -m zero_topo.cli topology --measure"


def measure_command(stated: Sequence[str] | None, as_json: bool) -> None:
    """Measure the machine from inside a job and let rank 0 print it; never returns: the ranks leave together.

    Args:
        stated: what ``--from`` names; nothing, if one measures.
        as_json: print JSON that ``--from`` and the config's ``topology`` read, instead of a tree.

    Raises:
        ValueError: outside a job of several ranks, or, on rank 0, for a machine that is no regular tree.
    """
    if stated:
        raise ValueError(f"--measure detects the machine, and --from {stated[0]} describes it; give one of the two")
    os.environ.update(meeting_point(os.environ))
    import torch.distributed as dist

    from zero_topo.collectives.measure import choose_device, measure
    from zero_topo.examples.process import behave
    from zero_topo.hook.leaving import leave

    behave()
    device = choose_device(os.environ)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        with bar("measuring", quiet=dist.get_rank() > 0) as move:
            found = measure(device, lambda words, done, total: move(description=words, completed=done, total=total))
    except ValueError:  # the same on every rank; one complaint is enough
        dist.barrier()
        if dist.get_rank() == 0:
            raise
        raise typer.Exit(WRONG_INPUT) from None
    if dist.get_rank() > 0:
        leave()
    if as_json:
        print_json(found.to_json())
    else:
        print(render_tree(found))
    leave()


def meeting_point(env: Mapping[str, str]) -> dict[str, str]:
    """Return :func:`rank_environment` of a job with several ranks.

    Raises:
        ValueError: outside a job of several ranks, or where nothing says how its ranks meet.
    """
    view = launcher_view(env)
    if view is None or view.world_size == 1:
        there = "no launcher's variables are" if view is None else f"only {view.world_size} rank is"
        raise ValueError(f"--measure lets the ranks of a job talk, but {there} here; start every rank with it: {HOW}")
    return rank_environment(env)
