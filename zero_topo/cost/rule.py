# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Chooses the plan of a block that names none, and checks that a named plan fits into memory.

The rule: shard weights over as few ranks as fits in memory, then gradients over as few as fits, and
optimizer states over the whole job. Keys that the user wrote are kept, and nothing is quantized
that they do not ask for. Everything is a pure function of its arguments, so that all ranks of a run
make the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter

from zero_topo.config import AUTO, ResolvedConfig, ZeroTopoConfig, is_automatic, resolve_config
from zero_topo.config.parts import ROOT
from zero_topo.cost.job import Job
from zero_topo.cost.memory import predict_memory
from zero_topo.cost.tensor import aligned_sizes
from zero_topo.plan import Degree
from zero_topo.topology import Topology
from zero_topo.topology.model import DOMAINS, MOST_RANKS
from zero_topo.topology.presets import load_machine, preset_names
from zero_topo.units import format_bytes, format_count

RESERVE = 0.1
"""Share of the memory left to the framework, the collectives' own buffers and fragmentation."""
MOST_DOUBLINGS = 6  # of the nodes, in the search for a number that suffices
SURE = ("weights", "frozen", "secondary", "gradients", "residual")
"""Roles whose bytes follow from the plan alone; an optimizer may store less than Adam."""


def usable(memory: int | None) -> int | None:
    """Return the bytes of a rank's memory that a plan may use; None if the memory is not known."""
    return None if memory is None else int(memory * (1 - RESERVE))


def needed(config: ResolvedConfig, job: Job) -> int:
    """Return the bytes of a rank at the peak of a step."""
    return sum(predict_memory(config, job.work, job).values())


def fits(config: ResolvedConfig, job: Job) -> bool:
    """Return whether a plan fits into a rank's memory; True where that is not known."""
    limit = usable(config.topology.memory_per_rank)
    return limit is None or needed(config, job) <= limit


def aligned_degrees(topology: Topology) -> list[int]:
    """Return the degrees that nest with the machine's units, ascending: parts of a node, few nodes,
    the world.
    """
    nodes = [count for count in (1, 2, 4) if topology.nodes % count == 0]
    whole_nodes = [count * topology.ranks_per_node for count in nodes]
    return sorted({*aligned_sizes(topology), *whole_nodes, topology.world_size})


def plans(block: ZeroTopoConfig, topology: Topology) -> Iterator[ResolvedConfig]:
    """Yield the plans that keep the user's keys, in the order in which the rule tries them.

    Raises:
        ValueError: if there is none, with the reason.
    """
    tried: dict[str, Sequence[Degree]] = {}
    degrees = [_place(topology, degree) for degree in aligned_degrees(topology)]
    for role in ("weights", "gradients"):
        own = getattr(block, role)
        tried[role] = degrees if own is None else [own]
    refusal: ValueError | None = None
    found = False
    for weights, gradients in product(*tried.values()):
        chosen = {
            "scheme": None,
            "weights": weights,
            "gradients": gradients,
            "optimizer": block.optimizer or "world",
        }
        try:
            config = resolve_config(block.model_copy(update=chosen), topology)
        except ValueError as error:
            refusal = error
            continue
        found = True
        yield config
    if not found:
        raise ValueError(
            f'"scheme": "{AUTO}": no plan keeps the other keys of the block: {refusal}'
        )


def _place(topology: Topology, degree: int) -> Degree:
    """Return the domain of a degree if it fills one, else the degree."""
    return next((name for name in DOMAINS if topology.degree(name) == degree), degree)


def before_a_model(block: ZeroTopoConfig, topology: Topology) -> ResolvedConfig:
    """Resolve the block while no model is known; for an automatic block, return a plan that may be
    chosen.

    Raises:
        ValueError: raised by :func:`plans` and ``resolve_config``.
    """
    if is_automatic(block, topology):
        return next(plans(block, topology))
    return resolve_config(block, topology)


def fewest_ranks(block: ZeroTopoConfig, setting: object) -> int | None:
    """Return the fewest ranks on which a block can be checked if no number of ranks is given.

    Args:
        block: the ``zero_topo`` block.
        setting: the machine: the block's ``topology``, or another in its place.

    Returns:
        Whole nodes of the preset that its numbers of ranks divide; None if the ranks are known.
    """
    presets = preset_names()
    if not isinstance(setting, str) or setting not in (AUTO, *presets):
        return None
    node = load_machine(setting).ranks_per_node if setting in presets else None
    stated = (block.weights, block.secondary, block.gradients, block.optimizer, node)
    numbers = [each for each in stated if isinstance(each, int)]
    return math.lcm(*numbers) if numbers else None


def plan_for(block: ZeroTopoConfig, topology: Topology, job: Job) -> ResolvedConfig:
    """Resolve the block for a model; the notes say why a plan was chosen, or warn that it is not
    likely to fit.

    Args:
        block: the user's block.
        topology: the tree of a data-parallel group, with the memory of a rank.
        job: what is trained.

    Raises:
        ValueError: raised by :func:`choose` and ``resolve_config``, and if the shards of weights
            and gradients alone are more than a rank's memory.
    """
    if is_automatic(block, topology):
        return choose(block, topology, job)
    config = resolve_config(block, topology)
    if fits(config, job):
        return config
    memory = topology.memory_per_rank
    assert memory is not None
    name = "the plan" if config.scheme is None else f"scheme {config.scheme}"
    way_out = (
        f'add "weights": "node", or set "scheme": "{AUTO}", which takes a plan that fits; if none '
        "fits, it says why"
    )
    sizes = predict_memory(config, job.work, job)
    sure = sum(sizes.get(role, 0) for role in SURE)
    if sure > memory:
        raise ValueError(
            f"{ROOT}: {name} leaves {format_bytes(sure)} of weights and gradients on each rank of "
            f"{topology.name}, which has {format_bytes(memory)}; {way_out}"
        )
    warning = f"warning: {name} needs {_needs(config, job)}; {way_out}"
    return replace(config, notes=(*config.notes, warning))


# -- the rule --------------------------------------------------------------------------------------


def choose(block: ZeroTopoConfig, topology: Topology, job: Job) -> ResolvedConfig:
    """Resolve an automatic block by the rule; the first note has its numbers.

    If the memory of a rank is not known, weights are sharded over at least a node.

    Raises:
        ValueError: if the user's keys fit no plan, or no plan fits into memory: what would.
    """
    rejected: list[ResolvedConfig] = []
    for config in plans(block, topology):
        known = topology.memory_per_rank is not None
        if (known or config.plan.weights >= topology.ranks_per_node) and fits(config, job):
            return replace(config, notes=(_reason(block, config, rejected, job), *config.notes))
        rejected.append(config)
    if topology.memory_per_rank is None:  # the block's own degree of the weights
        config = rejected[0]
        return replace(config, notes=(_reason(block, config, [], job), *config.notes))
    raise ValueError(_nothing_fits(block, rejected[-1], job))


def _reason(
    block: ZeroTopoConfig, chosen: ResolvedConfig, rejected: Sequence[ResolvedConfig], job: Job
) -> str:
    """Return the numbers that made the rule choose a plan, in one line."""
    limit = usable(chosen.topology.memory_per_rank)
    plan = chosen.plan
    words = []
    for role in ("weights", "gradients"):
        degree = getattr(plan, role)
        fewer = [config for config in rejected if getattr(config.plan, role) < degree]
        if role == "gradients":
            fewer = [config for config in fewer if config.plan.weights == plan.weights]
        why = ""
        if fewer and limit is not None:  # the next smaller degree, with the least other memory
            widest = max(fewer, key=attrgetter(f"plan.{role}", "plan.gradients"))
            ranks = _ranks(getattr(widest.plan, role))
            why = f" ({ranks} would need {format_bytes(needed(widest, job))})"
        words.append(f"{role} on {_ranks(degree)}{why}")
    words.append(f"optimizer states on {_ranks(plan.optimizer)}")
    default = "" if block.scheme else ", the default here"
    return (
        f"scheme {AUTO}{default}: {', '.join(words)}; needs {_needs(chosen, job)}, counted for "
        f"{job.describe()}"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _needs(config: ResolvedConfig, job: Job) -> str:
    """Return the memory that a plan needs, and for what most of it is."""
    sizes = predict_memory(config, job.work, job)
    role = max(sizes, key=sizes.__getitem__)
    limit = usable(config.topology.memory_per_rank)
    of = "a memory that is not known"
    if limit is not None:
        of = f"the {format_bytes(limit)} that a rank may use ({RESERVE:.0%} stay free)"
    return (
        f"{format_bytes(needed(config, job))} of {of}, most of it for {role} "
        f"({format_bytes(sizes[role])})"
    )


def _nothing_fits(block: ZeroTopoConfig, leanest: ResolvedConfig, job: Job) -> str:
    """Return that no plan fits, and which changes would make the leanest plan fit: each by itself,
    else all together.
    """
    topology = leanest.topology
    changes = {
        "offload the optimizer to the host (offload_optimizer)": replace(job, offload=True),
        "use micro-batches of one sequence": replace(job, micro_batch=1),
    }
    changes = {words: changed for words, changed in changes.items() if changed != job}
    ways = [words for words, changed in changes.items() if fits(leanest, changed)]
    nodes = _enough_nodes(block, topology, job)
    if nodes is not None:
        ways.append(f"use {nodes:,} nodes")
    way_out = f"what would do, each by itself: {'; '.join(ways)}"
    if not ways:
        nodes = _enough_nodes(block, topology, replace(job, offload=True, micro_batch=1))
        way_out = "no number of nodes would do; make the model smaller, or its sequences shorter"
        if nodes is not None:
            way_out = f"what would do, all together on {nodes:,} nodes: {'; '.join(changes)}"
    plan = leanest.plan
    return (
        f"{ROOT}: no plan fits {format_count(job.model.params)} parameters on {topology.name}: "
        f"weights and gradients on {plan.weights} and {_ranks(plan.gradients)} need "
        f"{_needs(leanest, job)}; {way_out}"
    )


def _enough_nodes(block: ZeroTopoConfig, topology: Topology, job: Job) -> int | None:
    """Return the smallest number of nodes, by doubling, on which a plan fits; None if there is
    none.
    """
    for power in range(MOST_DOUBLINGS + 1):
        nodes = topology.nodes * 2**power
        if nodes * topology.ranks_per_node > MOST_RANKS:
            break
        larger = replace(topology, nodes=nodes, order=None, hosts=None)
        *_, leanest = plans(block, larger)
        if fits(leanest, job):
            return nodes
    return None
