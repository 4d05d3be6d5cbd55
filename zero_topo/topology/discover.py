# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Finds the :class:`Topology` from the config key ``topology``, the device tools and the launcher's
environment.

The user's setting has priority, then a preset. Then follow a device tool for packages and links,
and the launcher for ranks and hosts. ``sources`` records each field's origin. Tools run only if
packages are otherwise unknown. The result is equal on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_topo.strict import Count, did_you_mean, parse_json, read, read_text
from zero_topo.topology.captures import Ask, ask_tools
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.model import Topology
from zero_topo.topology.placement import with_devices
from zero_topo.topology.presets import (
    emulated_from_json,
    load_preset,
    machine_of_cluster,
    preset_names,
)
from zero_topo.topology.probes import LauncherView, slurm

ALONE = "one process"
"""Name of the machine if no source reports more than one process."""

INLINE_HINT = '{"nodes": N, "gpus_per_node": G, "ranks_per_gpu": R} or {"emulated": {...}}'


def discover(env: Mapping[str, str], ask: Ask = ask_tools) -> Topology:
    """Discover the topology from the launcher's environment and the node's device tools.

    GPU packages and links come from the preset whose Slurm cluster the job runs on, if its nodes
    have as many ranks; otherwise from a device tool of the node, if there is one that reports as
    many devices; otherwise every rank counts as a separate GPU. Without any launcher there is one
    rank.

    Args:
        env: environment variables, usually ``os.environ``.
        ask: queries the device tools; called at most once.

    Raises:
        ValueError: if the variables contradict each other or describe an irregular tree.
    """
    view = launcher_view(env)
    if view is None:
        why = "no launcher started this process: it is a rank by itself"
        return Topology(
            ALONE, 1, 1, 1, sources=dict.fromkeys(("nodes", "gpus_per_node", "ranks_per_gpu"), why)
        )
    found = _from_view(view, slurm.cluster(env))
    return found if found.links or found.world_size == 1 else with_devices(found, ask(), env)


def resolve_topology(
    setting: str | Mapping[str, Any],
    env: Mapping[str, str],
    world_size: int | None = None,
    ask: Ask = ask_tools,
) -> Topology:
    """Return the topology that the configuration selects, checked against the number of ranks.

    Args:
        setting: "auto"; a preset's name; a path (ends in ``.json`` or has a slash) to a JSON file;
            or an inline object. File and object hold the fields of :class:`Topology`, or
            ``{"emulated": {"nodes", "gpus_per_node", "gcds_per_gpu"}}``.
        env: environment variables, usually ``os.environ``.
        world_size: ranks of the job, if known; None takes the launcher's number.
        ask: queries the device tools of this node; called at most once, and only for "auto".

    Returns:
        A topology of exactly as many ranks, equal on every rank. If the setting has no placement of
        ranks, the launcher's placement is used.

    Raises:
        ValueError: if the setting is wrong or its number of ranks is not the job's.
    """
    if world_size is not None:
        read(Count, "world size", world_size)
    if setting == "auto":
        return _discover_world(env, world_size, ask)
    if isinstance(setting, Mapping):
        return _fit(_from_object(setting), "the inline topology", env, world_size)
    if not isinstance(setting, str):
        raise ValueError(
            f"topology is {setting!r}; it must be 'auto', a preset, a path to a JSON file or an "
            "object"
        )
    if setting.endswith(".json") or "/" in setting:
        return _fit(_from_file(setting), f"the topology in {setting}", env, world_size)
    names = ["auto", *preset_names()]
    if setting not in names:
        raise ValueError(
            f"topology {setting!r} is unknown{did_you_mean(setting, names)} (known: "
            f"{', '.join(names)}; a path to a .json file, or an object {INLINE_HINT})"
        )
    view = None if world_size else launcher_view(env)
    topology = load_preset(setting, world_size or (view.world_size if view else 1))
    return _fit(topology, f"preset {setting!r}", env, world_size)


def _discover_world(env: Mapping[str, str], world_size: int | None, ask: Ask) -> Topology:
    """Discover the topology, and check or supply the world size."""
    view = launcher_view(env)
    if view is None and world_size is not None and world_size > 1:
        caller = LauncherView("this job", world_size, origins={"world_size": "the process group"})
        return with_devices(_from_view(caller, None), ask(), env)
    topology = discover(env, ask)
    if world_size is not None and world_size != topology.world_size:
        said = "no launcher" if view is None else view.origin("world_size")
        raise ValueError(
            f"the job has {world_size} ranks but its environment describes {topology.world_size} "
            f"({said}); start all ranks with the launcher (srun, deepspeed, torchrun, mpirun), or "
            f"state the machine: {INLINE_HINT}"
        )
    return topology


def _from_object(data: Mapping[str, Any]) -> Topology:
    """Build a topology from an inline object or a file's content."""
    if set(data) == {"emulated"} and not isinstance(data["emulated"], bool):
        if not isinstance(data["emulated"], Mapping):
            raise ValueError(
                f"topology: emulated is {data['emulated']!r}; it must be an object such as "
                f"{INLINE_HINT}"
            )
        return emulated_from_json(data["emulated"])
    return Topology.from_json(data)


def _from_file(setting: str) -> Topology:
    path = Path(setting).expanduser()
    what = f"topology file {setting!r}"
    try:
        data = parse_json(read_text(path, what), what)
    except OSError as error:
        raise ValueError(
            f"{what} cannot be read ({error.strerror}; looked in {path.absolute()}); give a path "
            "that every rank can read, or a preset's name without a slash"
        ) from error
    if not isinstance(data, dict):
        raise ValueError(
            f"{what}: holds a {type(data).__name__}; it must hold an object {INLINE_HINT}"
        )
    try:
        return _from_object(data)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _fit(topology: Topology, what: str, env: Mapping[str, str], world_size: int | None) -> Topology:
    """Check a stated topology against the number of ranks and complete it with the launcher's
    placement.

    Raises:
        ValueError: if it has another number of ranks than the job.
    """
    stated = topology.emulated or topology.order is not None or topology.hosts is not None
    view = None if stated and world_size is not None else launcher_view(env)
    actual = world_size if world_size is not None else (view.world_size if view else None)
    if actual is not None and actual != topology.world_size:
        raise ValueError(
            f"{what} has {topology.nodes} nodes x {topology.gpus_per_node} GPUs x "
            f"{topology.ranks_per_gpu} ranks = "
            f"{topology.world_size} ranks but the job has {actual}; start {topology.world_size} "
            "ranks, or change the "
            'topology ("auto" takes it from the launcher)'
        )
    if stated or view is None:
        return topology
    if (view.world_size, view.ranks_per_node) != (topology.world_size, topology.ranks_per_node):
        return topology
    placed = {key: view.origin(key) for key in ("order", "hosts") if getattr(view, key) is not None}
    return replace(
        topology, order=view.order, hosts=view.hosts, sources={**topology.sources, **placed}
    )


def _from_view(view: LauncherView, cluster: str | None) -> Topology:
    """Build the tree of a launcher's view, with GPUs and links of the cluster's if its nodes have
    as many ranks.
    """
    machine = machine_of_cluster(cluster)
    per_node = view.ranks_per_node or view.world_size
    sources = {"nodes": f"ranks ({view.origin('world_size')}) / ranks per node"}
    sources["gpus_per_node"] = view.origin("ranks_per_node")
    sources["ranks_per_gpu"] = "assumed: every rank is a GPU"
    sources |= {key: view.origin(key) for key in ("order", "hosts") if key in view.origins}
    if view.doubt is not None:
        sources["warning"] = view.doubt
    if view.ranks_per_node is None:
        sources["gpus_per_node"] = "assumed: one node"
        sources["warning"] = (
            f"{view.origin('world_size')} gives {view.world_size} ranks but not their placement on "
            "nodes; they are taken for one flat node. For shards that follow the machine, describe "
            f"it: {INLINE_HINT}"
        )
    if machine is None or machine.ranks_per_node != per_node:
        if machine is not None:
            sources["ranks_per_gpu"] += (
                f"; cluster {cluster} is preset {machine.name}, but its nodes have "
                f"{machine.ranks_per_node} ranks, not {per_node}"
            )
        return Topology(
            view.source,
            view.world_size // per_node,
            per_node,
            1,
            order=view.order,
            hosts=view.hosts,
            sources=sources,
        )
    sources |= machine.origins(f" (SLURM_CLUSTER_NAME={cluster})")
    known = machine.topology(view.world_size // per_node, per_node)
    return replace(known, order=view.order, hosts=view.hosts, sources=sources)
