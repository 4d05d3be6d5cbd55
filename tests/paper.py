# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The ZeRO-topo paper's tables of memory and volume, as formulas; the package's numbers are
compared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Term:
    """One collective of a phase, ideal: no padding, no scales.

    Attributes:
        phase: as the meter's.
        volume: what a rank sends, in units of the 16-bit message ``M = 2 psi`` bytes.
        degree: the paper's ``d``: ranks over which the phase's shards are spread.
        domain: the widest domain whose links the collective uses.
    """

    phase: str
    volume: Fraction
    degree: int
    domain: str


def paper_volume_table(
    nodes: int, ranks_per_node: int = 8, ranks_per_gpu: int = 2
) -> dict[str, tuple[Term, ...]]:
    """Table VII as printed: volume per device of forward gather, backward gather and gradient
    reduce-scatter.

    Its row for ZeRO++ counts an INT8 backward gather, where stock hpZ moves 16 bits
    (``"secondary": null``).

    Args:
        nodes: the paper's ``N``.
        ranks_per_node: its ``P``.
        ranks_per_gpu: ranks on each GPU; 2 on an MI250X, one per GCD.

    Returns:
        Row name -> terms, in units of ``M``.
    """
    world = nodes * ranks_per_node
    domain_of: Callable[[int], str] = {
        ranks_per_gpu: "gpu",
        ranks_per_node: "node",
        world: "world",
    }.__getitem__
    rows = {
        "ZeRO-3": ((1, world), (1, world), (1, world)),
        "ZeRO++": ((2, world), (2, ranks_per_node), (4, world)),
        "ZeRO-topo sec 8": ((2, ranks_per_gpu), (2, ranks_per_node), (4, ranks_per_node)),
        "ZeRO-topo sec 2": ((2, ranks_per_gpu), (2, ranks_per_gpu), (4, ranks_per_node)),
    }
    phases = ("gather_forward", "gather_backward", "scatter")
    return {
        name: tuple(
            Term(phase, Fraction(d - 1, d) / parts, d, domain_of(d))
            for phase, (parts, d) in zip(phases, row, strict=True)
        )
        for name, row in rows.items()
    }


def paper_memory_table(
    parameters: int, nodes: int, ranks_per_node: int = 8, ranks_per_gpu: int = 2
) -> dict[str, dict[str, Fraction]]:
    """The paper's memory table: bytes per device in 16-bit training with Adam (``K = 12``).

    Args:
        parameters: ``psi``.
        nodes: the paper's ``N``.
        ranks_per_node: its ``P``.
        ranks_per_gpu: ranks on each GPU; 2 on an MI250X, one per GCD.

    Returns:
        Row name -> role -> bytes.
    """
    psi, world = Fraction(parameters), nodes * ranks_per_node

    def row(weights: int, secondary: Fraction, gradients: int) -> dict[str, Fraction]:
        return {
            "weights": 2 * psi / weights,
            "secondary": secondary,
            "gradients": 2 * psi / gradients,
            "optimizer": 12 * psi / world,
        }

    return {
        "ZeRO-3": row(world, Fraction(0), world),
        "ZeRO++": row(world, 2 * psi / ranks_per_node, world),
        "ZeRO-topo sec 8": row(ranks_per_gpu, psi / ranks_per_node, ranks_per_node),
        "ZeRO-topo sec 2": row(ranks_per_gpu, psi / ranks_per_gpu, ranks_per_node),
    }
