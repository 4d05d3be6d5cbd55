# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes what expert parallelism changes in a step: two plans in place of one, and the exchanges
of tokens.

Note [Expert parallelism]
    AutoEP spreads the ``E`` experts of each layer over ``e`` consecutive ranks, each of which has
    ``E / e`` whole ones. All other parameters keep their plan. Experts get a plan whose shards lie
    in the same domains, on the tree of the ranks with the same experts: every ``e``-th. A rank
    computes as before if tokens spread evenly over the experts.

    A token is sent to its ``k`` experts and back: two all-to-alls forward and two backward in each
    layer of experts, and two more if it is recomputed. Nothing can be computed meanwhile. Of
    ``b s k h`` values of ``w`` bytes a rank sends in a step of ``m`` micro-batches
    ``(4 + 2 c) L m b s k h w (e - 1) / e`` bytes; ``c`` is 1 with recomputation.

    Seconds of both plans add up. Their memory does too, although the buffers of both are rarely
    full at one time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from zero_topo.config import ResolvedConfig, on_tree
from zero_topo.cost.job import Job
from zero_topo.cost.model_files import ModuleTree
from zero_topo.cost.tensor import Exchanges, aligned_sizes
from zero_topo.cost.transformer import Model, Part, Shape
from zero_topo.plan import divisors
from zero_topo.topology.model import Topology


def stacks(part: Part) -> list[Shape]:
    """Return the shapes ``[E, rows, columns]`` of a module's stacked experts."""
    solid = [shape for shape in part.shapes if len(shape) == 3]
    count = max(solid, key=math.prod)[0] if solid else 0
    return [shape for shape in solid if shape[0] == count]


def experts_of(model: Model) -> int:
    """Return the experts that ranks can share: of the layer that has fewest; 0 if no layer has
    stacked experts.
    """
    counts = [found[0][0] for part in model.parts if (found := stacks(part))]
    return min(counts, default=0)


def expert_sizes(topology: Topology, model: Model) -> list[int]:
    """Return the numbers of ranks to spread experts over: parts of a node, or whole nodes, that
    divide the experts.
    """
    count = experts_of(model)
    node = topology.ranks_per_node
    found = [*aligned_sizes(topology), *(node * nodes for nodes in divisors(topology.nodes))]
    return [size for size in dict.fromkeys(found) if 1 < size <= count and count % size == 0]


@lru_cache  # all plans of a machine have the same parts
def split(model: Model, ranks: int) -> tuple[Model, Model]:
    """Return the model without its experts, and a rank's experts, as modules of as many parts.

    Raises:
        ValueError: if ranks do not divide the experts.
    """
    count = experts_of(model)
    if count == 0 or count % ranks:
        possible = "the models with experts, such as --model mixtral-8x7b"
        if count:
            possible = str(divisors(count)[1:])
        raise ValueError(
            f"expert parallelism over {ranks} ranks: {model.name} has layers of {count} stacked "
            f"experts; choose one of {possible}"
        )
    pairs = [_split(part, ranks) for part in model.parts]
    dense, experts = zip(*pairs, strict=True)
    nothing = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "vocab"), 0)
    return ModuleTree.of(model, dense), ModuleTree.of(model, experts, **nothing)


def _split(part: Part, ranks: int) -> tuple[Part, Part]:
    found = stacks(part)
    others = tuple(shape for shape in part.shapes if shape not in found)
    own = tuple((count // ranks, *matrix) for count, *matrix in found)
    used = chosen(part) * _one_expert(found)
    return replace(part, shapes=others, multiplied=part.multiplied - used), Part(
        part.count, own, used
    )


def _one_expert(found: Iterable[Shape]) -> int:
    return sum(math.prod(shape[1:]) for shape in found)


def chosen(part: Part) -> int:
    """Return the experts to which a token is sent: those of a module's multiplied elements that no
    matrix explains.
    """
    found = stacks(part)
    if not found:
        return 0
    matrices = sum(
        math.prod(shape) for shape in part.shapes if len(shape) == 2 and shape != found[0][:2]
    )
    return max(1, min(found[0][0], int((part.multiplied - matrices) / _one_expert(found) + 0.5)))


def token_exchanges(job: Job) -> list[Exchanges]:
    """Return the all-to-alls of tokens of one optimizer step; see Note [Expert parallelism]."""
    ranks = job.expert
    values = job.boundary_bytes * (ranks - 1) / ranks
    times = job.micro_batches * (4 + 2 * job.checkpointing)
    return [
        Exchanges(times * part.count, values * chosen(part))
        for part in job.model.parts
        if stacks(part)
    ]


def shares(config: ResolvedConfig, job: Job) -> list[tuple[ResolvedConfig, Job]]:
    """Return the plan and the job of the dense parameters, then those of a rank's experts.

    Args:
        config: the plan, on the whole machine.
        job: with expert parallelism.
    """
    dense, experts = split(job.model, job.expert)
    tree = expert_tree(config.topology, job.expert)
    of_experts = replace(on_tree(config, tree), topology=config.topology)
    return [
        (config, replace(job, model=dense, expert=1)),
        (of_experts, replace(job, model=experts, expert=1)),
    ]


def expert_tree(topology: Topology, ranks: int) -> Topology:
    """Return the tree of the ranks that have the same experts, if each ``ranks`` consecutive ones
    share them.

    Raises:
        ValueError: if these are neither a part of a node along its GPUs nor whole nodes.
    """
    sizes = aligned_sizes(topology) + [
        topology.ranks_per_node * count for count in divisors(topology.nodes)
    ]
    if ranks not in sizes:
        raise ValueError(
            f"expert parallelism over {ranks} ranks: they are neither a part of a node of "
            f"{topology.name} along its GPUs nor whole nodes; choose one of {sizes[1:]}"
        )
    return topology.among(range(0, topology.world_size, ranks))
