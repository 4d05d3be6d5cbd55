# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Random machines, plans, formats and models for the properties of the engine's phases."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.engine.stage3 import Stage3
from zero_topo.sync import Parameter
from zero_topo.topology.model import Topology

TREES = (
    (1, 1, 1),
    (1, 1, 2),
    (1, 2, 2),
    (2, 1, 2),
    (2, 2, 1),
    (3, 1, 2),
    (2, 2, 2),
    (2, 2, 2),
    (2, 1, 4),
    (1, 4, 2),
    (3, 2, 2),
)
"""Nodes, GPUs of a node, ranks of a GPU: 1 to 12 ranks."""


@dataclass(frozen=True)
class Case:
    """Everything that a rank needs to build its engine.

    Attributes:
        seed: which case this is.
        block: the keys of the ``zero_topo`` block, for messages.
        config: the resolved block.
        dtype: of the weights.
        scatter_dtype: in which unquantized gradients are sent.
        trained: parameters with gradients.
        frozen: parameters without.
        run_numel: most elements of a run of the sync and of the post-step all-gather.
    """

    seed: int
    block: dict[str, Any]
    config: ResolvedConfig
    dtype: torch.dtype
    scatter_dtype: torch.dtype
    trained: list[Parameter]
    frozen: list[Parameter]
    run_numel: int

    @property
    def parameters(self) -> list[Parameter]:
        """Trained ones first, as the engine counts them."""
        return [*self.trained, *self.frozen]

    def engine(self) -> Stage3:
        """This rank's engine."""
        return Stage3(
            self.config,
            self.trained,
            self.frozen,
            torch.empty(0, dtype=self.dtype),
            self.scatter_dtype,
            self.dtype,
            self.run_numel,
        )

    def __str__(self) -> str:
        sizes = [(p.numel, p.dims, p.persistent, p.sent) for p in self.parameters]
        return (
            f"case {self.seed}: {self.config.plan} {self.block} {self.dtype}, scatter "
            f"{self.scatter_dtype}, runs of {self.run_numel}, {len(self.trained)} trained of "
            f"{sizes}"
        )


def drawn_case(rng: random.Random, seed: int, wants: str = "") -> Case:
    """Draw a case.

    Args:
        rng: what it is drawn from.
        seed: the case's number.
        wants: what the case must have: "int8" weights stored as INT8 alone, a "secondary" copy,
            only "frozen" parameters, or "" anything.
    """
    machine, block, config = _drawn_config(rng, wants)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.bfloat16, torch.float16])
    lowered = torch.bfloat16 if dtype == torch.float32 and rng.random() < 0.7 else None
    scatter_dtype = rng.choice([dtype, torch.float32, torch.bfloat16])
    world = machine.world_size
    if wants == "frozen":
        config = config.without_training()
        trained = []
        frozen = _drawn_parameters(rng, world, 4, 0, lowered)
    else:
        trained = _drawn_parameters(rng, world, rng.randint(1, 5), 0, lowered)
        frozen = _drawn_parameters(rng, world, rng.choice([0, 0, 1, 3]), len(trained), lowered)
    run_numel = rng.choice([60, 600, 2000, 1 << 20])
    return Case(seed, block, config, dtype, scatter_dtype, trained, frozen, run_numel)


def _drawn_config(
    rng: random.Random, wants: str
) -> tuple[Topology, dict[str, Any], ResolvedConfig]:
    while True:
        nodes, gpus, ranks = rng.choice(TREES)
        order = list(range(nodes * gpus * ranks))
        if rng.random() < 0.5:
            rng.shuffle(order)
        machine = Topology("drawn", nodes, gpus, ranks, order=tuple(order), emulated=True)
        block = _drawn_block(rng, machine, wants)
        try:
            config = resolve_config(ZeroTopoConfig.parse(block), machine)
        except ValueError:  # degrees or formats that do not go together: draw others
            continue
        if wants == "int8" and config.resident_spec is None:
            continue
        if wants == "secondary" and config.plan.secondary is None:
            continue
        return machine, block, config


def _degrees(machine: Topology) -> list[int]:
    """Divisors of the world that nest with the GPU and the node."""
    world = machine.world_size
    found = [degree for degree in range(1, world + 1) if world % degree == 0]
    for unit in (machine.degree("gpu"), machine.degree("node")):
        found = [degree for degree in found if degree % unit == 0 or unit % degree == 0]
    return found


def _drawn_block(rng: random.Random, machine: Topology, wants: str) -> dict[str, Any]:
    degrees = _degrees(machine)
    weights = rng.choice(degrees)
    gradients = rng.choice([degree for degree in degrees if degree % weights == 0])
    optimizer = rng.choice([degree for degree in degrees if degree % gradients == 0])
    block: dict[str, Any] = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "overlap": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        block["accumulation_dtype"] = "fp32"
    if rng.random() < 0.3:
        block["sync"] = {"mode": "dense", "dtype": "bf16"}
    quantize: dict[str, Any] = {"gradients": rng.choice([None, None, "int8", "int4", "nf4"])}
    block["quantize"] = quantize
    if wants == "int8" and weights < optimizer:
        quantize["weights"] = "int8"
        quantize["resident"] = "int8"
        return block
    quantize["weights"] = rng.choice([None, "int8"])
    quantize["secondary"] = rng.choice([None, "int8"])
    related = [degree for degree in degrees if degree % weights == 0 or weights % degree == 0]
    if weights > 1 and (wants == "secondary" or rng.random() < 0.5):
        block["secondary"] = rng.choice(related)
    return block


def _drawn_parameters(
    rng: random.Random, world: int, count: int, first_place: int, lowered: torch.dtype | None
) -> list[Parameter]:
    """Parameters of sizes around one block per rank, in a random order of need."""
    odd = rng.randrange(64)
    sizes = [1, 7, 63, 501, 8 * world, 64 * world - 5, 130 * world, 256 * world, 300 * world - odd]
    places = list(range(first_place, first_place + count))
    rng.shuffle(places)
    found = []
    for place in places:
        numel = rng.choice(sizes)
        is_vector = numel < 64 or rng.random() < 0.2
        parameter = Parameter(f"p{place}", numel, 1 if is_vector else 2, place=place)
        persistent = rng.random() < 0.2
        sent = lowered if rng.random() < 0.6 else None
        found.append(replace(parameter, persistent=persistent, sent=sent))
    return found
