# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads Slurm's variables: hosts, tasks per node and distribution of the step (``srun``) that
started the process.

``srun`` describes the step in SLURM_STEP_* and, for older programs, again in SLURM_NTASKS and the
like, which in a batch script describe the whole allocation instead; so the step's own variables are
read first.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from zero_topo.strict import SHOWN_CHARACTERS, cut
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.probes import LauncherView, first_int, read_int

NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
NTASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
NNODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
_DEVICE = re.compile(r"\d{1,3}")
_NUMBERS = r"\d{1,18}(?:-\d{1,18})?"
_PART = re.compile(rf"[^\[\],]+|\[({_NUMBERS}(?:,{_NUMBERS})*)\]", re.ASCII)
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
DISTRIBUTIONS = ("block", "cyclic", "plane", "arbitrary")


def in_step(env: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started the process or one of its parents (in a batch script it did
    not).
    """
    return any(env.get(name) for name in STEP)


def cluster(env: Mapping[str, str]) -> str | None:
    """Return the name of the Slurm cluster, or None outside Slurm."""
    return env.get("SLURM_CLUSTER_NAME", "").strip() or None


def probe(env: Mapping[str, str]) -> LauncherView | None:
    """Return Slurm's view of the step's tasks, or None if their number is not set.

    Raises:
        ValueError: if its variables contradict each other, or the hosts have unequal numbers of
            tasks.
    """
    tasks, tasks_name = first_int(env, NTASKS, least=1)
    counts_name = next((name for name in TASKS_PER_NODE if env.get(name)), "")
    hosts_name = next((name for name in NODELIST if env.get(name)), "")
    counts = expand_tasks_per_node(env[counts_name], counts_name) if counts_name else None
    if tasks is None and counts is None:
        return None
    hosts = expand_hosts(env[hosts_name], hosts_name) if hosts_name else []
    if counts is None:
        assert tasks is not None  # both missing returned above
        counts, nodes_name = _even_counts(env, tasks, hosts)
        counts_name = f"{tasks_name} / {nodes_name}"
    if tasks is None:
        tasks = sum(counts)
        tasks_name = counts_name
    _check_counts(tasks, tasks_name, counts, counts_name, hosts, hosts_name)
    order, order_name = _order(env, len(counts), counts[0], hosts)
    read = {
        "world_size": tasks_name,
        "ranks_per_node": counts_name,
        "hosts": hosts_name,
        "order": order_name,
    }
    read |= {"rank": "SLURM_PROCID", "local_rank": "SLURM_LOCALID", "node": "SLURM_NODEID"}
    return LauncherView(
        source="slurm",
        world_size=tasks,
        rank=read_int(env, "SLURM_PROCID"),
        local_rank=read_int(env, "SLURM_LOCALID"),
        node=read_int(env, "SLURM_NODEID"),
        ranks_per_node=counts[0],
        hosts=tuple(hosts) if hosts else None,
        order=order,
        origins={key: f"slurm: {name}" for key, name in read.items() if name},
    )


def expand_hosts(text: str, name: str, duplicates: bool = False) -> list[str]:
    """Expand Slurm's host list, for example ``"nid[000001-000002,000007]"``, in the order it is
    written.

    Args:
        text: the list.
        name: the variable's name, for errors.
        duplicates: keep repeated hosts.

    Raises:
        ValueError: if it is not a host list.
    """
    try:
        every = (host for part in _split(text) for host in _expanded(part))
        hosts = list(itertools.islice(every, MOST_RANKS + 1))
        if len(hosts) > MOST_RANKS:
            raise ValueError(f"more than {MOST_RANKS:,} hosts")
    except ValueError as error:
        shown = cut(text, SHOWN_CHARACTERS)
        raise ValueError(
            f"{name} is {shown!r}, which is no Slurm host list ({error}); it should look like "
            "'node[01-04,07]'"
        ) from error
    return hosts if duplicates else list(dict.fromkeys(hosts))


def _split(text: str) -> Iterator[str]:
    """Split a host list at commas outside brackets. An empty part names no host."""
    start = 0
    for comma in re.finditer(r",(?![^\[]*\])|$", text):
        if part := text[start : comma.start()]:
            yield part
        start = comma.end()


def _expanded(part: str) -> Iterator[str]:
    """Expand one part, such as ``"rack[1-2]node[01-16]"``; the last bracket varies fastest.

    Raises:
        ValueError: if the brackets do not hold ranges.
    """
    choices: list[Sequence[str]] = []
    end = 0
    while found := _PART.match(part, end):
        choices.append(_numbers(found[1]) if found[1] else [found[0]])
        end = found.end()
    if end < len(part):
        raise ValueError(
            f"{cut(part[end:], SHOWN_CHARACTERS)!r} is neither a name nor a range in brackets"
        )
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> list[str]:
    """Expand ``"08-10,12"`` to numbers with their leading zeros: 08, 09, 10, 12."""
    numbers: list[str] = []
    for written in ranges.split(","):
        first, _, last = written.partition("-")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= MOST_RANKS - len(numbers):
            raise ValueError(
                f"{written} counts down" if count < 1 else f"more than {MOST_RANKS:,} hosts"
            )
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(first) + count)]
    return numbers


def expand_tasks_per_node(text: str, name: str) -> list[int]:
    """Expand Slurm's tasks per node, for example ``"8(x2),4"`` -> ``[8, 8, 4]``.

    Raises:
        ValueError: if the text has another form.
    """
    shown = cut(text, SHOWN_CHARACTERS)
    parts = [_TASKS.fullmatch(part) for part in text.split(",")]
    read = [(int(part[1]), int(part[2] or 1)) for part in parts if part]
    if len(read) < len(parts):
        raise ValueError(
            f"{name} is {shown!r}, which is no list of tasks per node; it should look like "
            "'8(x2),4'"
        )
    if (
        sum(count * nodes for count, nodes in read) > MOST_RANKS
        or sum(nodes for _, nodes in read) > MOST_RANKS
    ):
        raise ValueError(f"{name} is {shown!r}: more than {MOST_RANKS:,} tasks")
    return [count for count, nodes in read for _ in range(nodes)]


def placement(nodes: int, per_node: int, plane: int) -> tuple[int, ...]:
    """Return the tree position of each task if the nodes get ``plane`` tasks at a time in turn.

    Cyclic distribution is a plane of one, block distribution a plane of ``per_node``; a plane that
    does not divide ``per_node`` leaves a smaller last round (``_task_layout_plane`` in Slurm's
    ``slurm_step_layout.c``).

    Args:
        nodes: number of nodes.
        per_node: tasks on each.
        plane: tasks that a node gets at once; positive.

    Returns:
        A permutation, ``[nodes * per_node]``.
    """
    rounds = range(0, per_node, plane)
    return tuple(
        node * per_node + task
        for first in rounds
        for node in range(nodes)
        for task in range(first, min(first + plane, per_node))
    )


def bound_devices(
    env: Mapping[str, str], per_node: int, numa: Sequence[int | None]
) -> tuple[tuple[int, ...] | None, str]:
    """Return the device of each local rank according to ``srun --gpu-bind``, and where it was read.

    ``map`` lists devices by local rank, and repeats when the list ends. ``closest`` gives a task
    the device next to its cores: with one task per device, and tasks that fill NUMA nodes in order,
    as ``-c`` with the default binding does, devices are taken by NUMA node. On Frontier that is the
    order 4,5,2,3,6,7,0,1 (OLCF Frontier User Guide).

    Args:
        env: environment variables.
        per_node: tasks on each node.
        numa: NUMA node of each device, None where unknown.

    Returns:
        Devices by local rank and their origin; None if the binding does not determine them.

    Raises:
        ValueError: if a ``map`` is broken.
    """
    text = env.get("SLURM_GPU_BIND", "").strip()
    origin = f"SLURM_GPU_BIND={text}"
    kind, _, listed = text.removeprefix("verbose,").removeprefix("v,").partition(":")
    if kind in ("map", "map_gpu"):
        devices = _mapped(listed, origin)
        return tuple(devices[local % len(devices)] for local in range(per_node)), origin
    if kind != "closest" or len(numa) != per_node or any(node is None for node in numa):
        return None, origin
    return tuple(
        sorted(range(per_node), key=lambda device: (numa[device], device))
    ), f"{origin}, by NUMA node"


def _mapped(listed: str, origin: str) -> list[int]:
    """Return the devices of ``map_gpu:4,5*2`` in order; ``*2`` repeats one."""
    devices: list[int] = []
    for word in listed.split(","):
        device, _, times = word.partition("*")
        if not _DEVICE.fullmatch(device) or not _DEVICE.fullmatch(times or "1"):
            raise ValueError(
                f"{origin} is no list of devices; write it as srun --gpu-bind=map_gpu:4,5,2,3"
            )
        devices += [int(device)] * int(times or 1)
    return devices


def _even_counts(env: Mapping[str, str], tasks: int, hosts: Sequence[str]) -> tuple[list[int], str]:
    """Return the tasks per node if Slurm gives only the totals: an even distribution is assumed."""
    nodes, name = first_int(env, NNODES, least=1)
    if nodes is None:
        nodes, name = (
            (len(hosts), "host list") if hosts else (1, "one node, as no number of nodes is set")
        )
    if tasks % nodes:
        raise ValueError(
            f"slurm: {tasks} tasks on {nodes} nodes ({name}) cannot be spread evenly: nodes with "
            "unequal numbers of "
            "ranks have no regular tree; start equally many on every node (srun --ntasks-per-node)"
        )
    return [tasks // nodes] * nodes, name


def _check_counts(
    tasks: int,
    tasks_name: str,
    counts: Sequence[int],
    counts_name: str,
    hosts: Sequence[str],
    hosts_name: str,
) -> None:
    if hosts and len(hosts) != len(counts):
        raise ValueError(
            f"slurm: {hosts_name} names {len(hosts)} hosts but {counts_name} has tasks on "
            f"{len(counts)}; start the ranks with srun, which describes its step in "
            "SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE"
        )
    usual = Counter(counts).most_common(1)[0][0]
    for index, count in enumerate(counts):
        if count != usual:
            host = f"host {hosts[index]!r}" if hosts else f"node {index}"
            raise ValueError(
                f"slurm: {host} has {count} tasks but others have {usual} ({counts_name}): nodes "
                "with unequal numbers of ranks have no regular tree; start equally many on every "
                "node (srun --ntasks-per-node)"
            )
    if sum(counts) != tasks:
        raise ValueError(
            f"slurm: {tasks_name} is {tasks} but {counts_name} adds up to {sum(counts)}; start the "
            "ranks with srun, or unset the variable that was set by hand"
        )


def _order(
    env: Mapping[str, str], nodes: int, per_node: int, hosts: Sequence[str]
) -> tuple[tuple[int, ...] | None, str]:
    """Return the tree position of each task and where it was read; None for block order.

    SLURM_DISTRIBUTION is ``nodes[:sockets[:cores]][,Pack|NoPack]``; only its first part places
    tasks on nodes.
    """
    text = env.get("SLURM_DISTRIBUTION", "").strip()
    if not text:
        return None, "Slurm's default distribution, block"
    origin = f"SLURM_DISTRIBUTION={text}"
    kind, _, size = text.lower().split(",")[0].split(":")[0].partition("=")
    if kind in ("*", "block", "unknown", "pack", "nopack"):
        return None, origin
    if kind == "arbitrary":
        return _arbitrary_order(env, per_node, hosts), origin
    if kind not in ("cyclic", "plane"):
        raise ValueError(
            f"SLURM_DISTRIBUTION is {text!r}, an unknown distribution of tasks (known: "
            f"{', '.join(DISTRIBUTIONS)}); "
            'choose one with srun --distribution, or give an "order" in the topology\'s JSON'
        )
    plane: int | None = 1
    if kind == "plane":
        plane = (
            int(size)
            if size.isdecimal() and int(size)
            else read_int(env, "SLURM_DIST_PLANESIZE", least=1)
        )
    if plane is None:
        raise ValueError(
            f"SLURM_DISTRIBUTION is {text!r} but neither it nor SLURM_DIST_PLANESIZE gives the "
            "plane's size; use srun --distribution=plane=SIZE"
        )
    order = placement(nodes, per_node, plane)
    return (None if order == tuple(range(len(order))) else order), origin


def _arbitrary_order(
    env: Mapping[str, str], per_node: int, hosts: Sequence[str]
) -> tuple[int, ...]:
    """Return tree positions from the hosts of all tasks, which ``srun`` derives from
    SLURM_HOSTFILE.
    """
    name = "SLURM_ARBITRARY_NODELIST"
    if not env.get(name) or not hosts:
        raise ValueError(
            f"SLURM_DISTRIBUTION is arbitrary but {name} and the step's host list, which have the "
            "host of each task, "
            'are not both set; use another distribution, or give an "order" in the topology\'s JSON'
        )
    tasks = expand_hosts(env[name], name, duplicates=True)
    if Counter(tasks) != Counter({host: per_node for host in hosts}):
        raise ValueError(
            f"{name} is {env[name]!r}, which does not put {per_node} tasks on each of "
            f"{', '.join(hosts)}; start equally many on every node"
        )
    positions = {
        host: iter(range(node * per_node, (node + 1) * per_node)) for node, host in enumerate(hosts)
    }
    return tuple(next(positions[host]) for host in tasks)
