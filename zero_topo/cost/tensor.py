# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes a tensor parallel rank's part of a model, and the tree of its data-parallel group.

Note [Tensor parallelism]
    ``t`` consecutive ranks of a node divide each layer among them, as Megatron-LM does (Shoeybi et
    al., arXiv 1909.08053). Of ``N`` ranks, ``N / t`` are the data-parallel ranks that a plan
    counts. A rank has ``1 / t`` of each matrix and of the biases before an activation; norms and
    other biases are on each rank. It computes ``1 / t`` of the FLOPs, of the attention scores and
    of the logits, and stores 10 of a layer's 34 bytes per element and ``1 / t`` of the other 24
    (Korthikanti et al., arXiv 2205.05198, equation 2).

    Each layer all-reduces its activations twice forward and twice backward, and twice more if it
    recomputes. Nothing can be computed meanwhile. Of ``b s h`` activations of ``w`` bytes a rank
    sends in a step of ``m`` micro-batches ``2 (4 + 2 c) L m b s h w (t - 1) / t`` bytes; ``c`` is 1
    with recomputation. AutoTP all-reduces once backward for each matrix that reads a layer's input,
    which is more often where queries, keys and values are three matrices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zero_topo.cost.model_files import ModuleTree
from zero_topo.cost.transformer import Model, ModelPart, Shape
from zero_topo.plan import divisors
from zero_topo.topology.model import Topology

WHOLE = 10
DIVIDED = 24
"""Bytes per element that each tensor parallel rank stores of a layer, and bytes that the ranks
share.
"""


@lru_cache  # all plans of a machine have the same part
def part_of(model: Model, ranks: int) -> Model:
    """Return the part of a model that each of some tensor parallel ranks has."""
    if ranks == 1:
        return model
    return ModuleTree(
        model.name,
        model.layers,
        model.hidden,
        heads=-(-model.heads // ranks),
        vocab=-(-model.vocab // ranks),
        sequence=model.sequence,
        parts=tuple(_divided(part, model.hidden, ranks) for part in model.parts),
    )


def _divided(part: ModelPart, hidden: int, ranks: int) -> ModelPart:
    return ModelPart(
        part.count,
        tuple(_divided_shape(shape, hidden, ranks) for shape in part.shapes),
        part.multiplied / ranks,
        -(-part.attention // ranks),
        part.stored * (WHOLE * ranks + DIVIDED) // ((WHOLE + DIVIDED) * ranks),
    )


def _divided_shape(shape: Shape, hidden: int, ranks: int) -> Shape:
    """Return the shape of a rank's part: of a matrix, or of a vector wider than the model, which is
    such a bias.
    """
    if len(shape) > 1:
        *stack, rows, columns = shape
        return *stack, -(-rows // ranks), columns
    if shape and shape[0] > hidden:
        return (-(-shape[0] // ranks),)
    return shape


def aligned_sizes(topology: Topology) -> list[int]:
    """Return the numbers of consecutive ranks that divide a node and do not cut across its GPUs,
    ascending.
    """
    gpu = topology.ranks_per_gpu
    return [
        size for size in divisors(topology.ranks_per_node) if size % gpu == 0 or gpu % size == 0
    ]


def tree_of(topology: Topology, ranks: int) -> Topology:
    """Return the tree of each data-parallel group if every ``ranks`` consecutive ranks are tensor
    parallel.

    Raises:
        ValueError: if they do not divide a node, or cut across its GPUs.
    """
    if ranks == 1:
        return topology
    sizes = aligned_sizes(topology)
    if ranks not in sizes:
        raise ValueError(
            f"{ranks} tensor parallel ranks do not divide the {topology.ranks_per_node} ranks of a "
            f"node of {topology.name} along its GPUs; choose one of {sizes}"
        )
    if topology.order is not None:
        return topology.among(range(0, topology.world_size, ranks))
    # All nodes are cut alike: one is looked at, however many there are.
    node = replace(topology, nodes=1, hosts=None)
    tree = node.among(range(0, topology.ranks_per_node, ranks))
    return replace(tree, nodes=topology.nodes, hosts=topology.hosts)
