# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Combines the environment variables of all launchers into one view of the job.

Note [Launchers inside launchers]
    A process often carries the variables of several launchers: ``srun`` or ``mpirun`` starts a
    ``torchrun`` or ``deepspeed`` on each node, which starts the ranks; or ``srun`` starts the ranks
    and a script sets WORLD_SIZE from Slurm's variables. The launcher closest to the process
    decides. A farther launcher has started either the closer launchers or the ranks. In the first
    case it has at most one task per node, and no data on the ranks. In the second it has as many
    tasks as there are ranks, must agree in every number that both give, and adds hosts and
    placement. Anything else is a contradiction, and an error.

Only the checks look at this process's own rank: the view's other fields come out equal on every
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zero_topo.topology.probes import LauncherView, slurm
from zero_topo.topology.probes.variables import CLOSEST, MPI, probe

WAY_OUT = (
    "start the ranks with one launcher and unset the other's variables, or describe the machine "
    "with an inline "
    'topology that has an "order"'
)


def launcher_view(env: Mapping[str, str]) -> LauncherView | None:
    """Return the combined view of the launchers, or None if there is none.

    Raises:
        ValueError: if they contradict each other, or this process's rank does not match their
            placement.
    """
    view = _combine(probe(env, CLOSEST), probe(env, MPI))
    # Outside a step Slurm describes the allocation; a launcher with its own list of nodes may use
    # any part of it.
    if view is None or view.nodes is None or slurm.in_step(env):
        view = _combine(view, slurm.probe(env))
    if view is not None:
        _check_placement(view)
    return view


def _combine(closer: LauncherView | None, farther: LauncherView | None) -> LauncherView | None:
    """Merge two views by Note [Launchers inside launchers].

    Raises:
        ValueError: if they contradict each other.
    """
    if closer is None or farther is None:
        return closer or farther
    if (
        closer.nodes is not None
        and farther.world_size <= closer.nodes
        and farther.ranks_per_node in (None, 1)
    ):
        return closer  # the farther one started launchers, at most one per node
    for key, what in (
        ("world_size", "ranks"),
        ("ranks_per_node", "ranks per node"),
        ("rank", "as this process's rank"),
    ):
        ours = getattr(closer, key)
        theirs = getattr(farther, key)
        if ours is not None and theirs is not None and ours != theirs:
            raise ValueError(
                f"two launchers disagree: {ours} {what} ({closer.origin(key)}) but {theirs} "
                f"({farther.origin(key)}); {WAY_OUT}"
            )
    # LOCAL_RANK is often set by hand to a device index; the farther launcher has the rank's number
    # on the node.
    local = farther if farther.local_rank is not None else closer
    known = {
        key: getattr(farther, key) for key in ("ranks_per_node", "hosts", "order", "rank", "node")
    }
    filled = {key: value for key, value in known.items() if getattr(closer, key) is None}
    theirs_read = {key: farther.origin(key) for key, value in filled.items() if value is not None}
    if "order" in farther.origins:
        theirs_read["order"] = farther.origin("order")
    origins = {**closer.origins, **theirs_read, "local_rank": local.origin("local_rank")}
    return replace(closer, **filled, local_rank=local.local_rank, origins=origins)


def _check_placement(view: LauncherView) -> None:
    """Check this process's rank, local rank and node number against the placement in the view.

    Raises:
        ValueError: if the launcher put the rank elsewhere.
    """
    if view.rank is None:
        return
    if view.rank >= view.world_size:
        raise ValueError(
            f"rank {view.rank} ({view.origin('rank')}) is out of range: there are "
            f"{view.world_size} ranks ({view.origin('world_size')}), counted from 0; {WAY_OUT}"
        )
    place = view.place(view.rank) or (None, None)
    for key, what, expected in zip(
        ("node", "local_rank"), ("node", "local rank"), place, strict=True
    ):
        actual = getattr(view, key)
        if None not in (actual, expected) and actual != expected:
            raise ValueError(
                f"rank {view.rank} has {what} {actual} ({view.origin(key)}), but with "
                f"{view.ranks_per_node} ranks per "
                f"node ({view.origin('ranks_per_node')}) in "
                f"{'block' if view.order is None else 'the stated'} order it "
                f"would have {what} {expected}; start the ranks node by node (mpirun --map-by "
                "slot, srun "
                "--distribution=block), or describe the placement with an inline topology that has "
                'an "order"'
            )
