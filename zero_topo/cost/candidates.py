# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Lists the plans among which the planner chooses: the named schemes, and free combinations of
aligned degrees.

Note [What is tried]
    Degrees are those of the machine's units: the divisors of a node that do not cut a GPU apart,
    two and four nodes, the world. Weights, gradients and optimizer follow the dependency rule; the
    optimizer is sharded over the world, or replicated between the smallest whole nodes that hold a
    gradient buffer. Each placement is tried unquantized, with the bits of the ZeRO-topo paper, and
    additionally with sync and publish in INT4. If weights are sent in INT8, it is also tried with
    resident INT8 weights, whose publish is exact and needs no INT4. Where GPUs have several ranks,
    each plan whose collectives inside a node can go through the GPU is tried with that too
    (``"two_hop": "gpu"``). Sparse modes change how training converges, so they are tried only if
    asked for. Keys that the user wrote override those of every candidate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from zero_topo.config import (
    AUTO,
    ROLES,
    SCHEMES,
    DenseSync,
    ResolvedConfig,
    ZeroTopoConfig,
    is_automatic,
)
from zero_topo.config.resolve import resolve_config
from zero_topo.plan import PHASES, divisors
from zero_topo.topology.model import DOMAINS, Topology
from zero_topo.topology.presets import load_machine, preset_names

Block = Mapping[str, Any]
QUANTIZED: Block = {"weights": "int8", "secondary": "int8", "gradients": "nf4"}
RING: Block = {"sync": {"mode": "dense", "reduce": "ring"}}
FEW_BITS: Block = {"sync": {"mode": "quantized"}, "publish": {"delta": "int4"}}


@dataclass(frozen=True)
class Candidate:
    """Describes a plan that may be chosen.

    Attributes:
        name: name of the scheme, or a description in words.
        settings: the keys of the ``zero_topo`` block that select it.
        chosen: the user's block with these keys.
        config: the block resolved on the machine.
    """

    name: str
    settings: Block
    chosen: ZeroTopoConfig
    config: ResolvedConfig

    @cached_property
    def losses(self) -> tuple[tuple[str, ...], ...]:
        """Return what the plan quantizes or leaves out, inside a node and between nodes; empty if
        it is lossless.

        Each part is written as in ``("int8 weights", "int4 gradients")``.
        """
        used = _used(self.config)
        sync, publish = used.pop("sync"), used.pop("publish")
        inside = tuple(f"{spec.name} {what}" for what, spec in used.items() if spec is not None)
        between = (
            [] if publish is None or publish.spec is None else [f"{publish.spec.name} publish"]
        )
        if sync is not None and sync.MODE != DenseSync.MODE:
            few_bits = sync.spec
            between.insert(0, f"{sync.MODE if few_bits is None else few_bits.name} sync")
        return tuple(part for part in (inside, tuple(between)) if part)

    @property
    def words(self) -> list[str]:
        """Return the words of :attr:`losses`."""
        return [word for part in self.losses for word in part]

    def allowed_by(self, asked: ZeroTopoConfig) -> bool:
        """Return whether the block is lossy, or the plan quantizes only what its keys ask for."""
        wanted = asked.quantize.model_fields_set | (asked.model_fields_set & {"sync", "publish"})
        return asked.lossy or all(word.split()[-1] in wanted for word in self.words)

    @property
    def named(self) -> bool:
        """Return whether it is a named scheme, possibly with a few other keys."""
        return "scheme" in self.settings


def candidates(
    asked: ZeroTopoConfig, topology: Topology, sparse: tuple[str, ...] = ()
) -> tuple[Candidate, ...]:
    """Return all plans of different effect that keep the user's keys, named ones first; see Note
    [What is tried].

    Args:
        asked: the user's block; its scheme and its key ``lossy`` are ignored.
        topology: the machine.
        sparse: modes of sync to try in addition to dense and quantized.

    Raises:
        ValueError: if the user's keys fit no plan, with the reason.
    """
    return _candidates(
        asked.model_dump_json(exclude_unset=True, exclude={"scheme", "lossy"}), topology, sparse
    )


@lru_cache(maxsize=4)  # jobs with and without recomputation have the same
def _candidates(asked: str, topology: Topology, sparse: tuple[str, ...]) -> tuple[Candidate, ...]:
    fixed = json.loads(asked)
    found: dict[object, Candidate] = {}
    refusal: ValueError | None = None
    plans = (*_schemes(sparse), *_free_forms(topology, sparse))
    by_gpu = (
        [{**settings, "two_hop": "gpu"} for settings in plans] if topology.ranks_per_gpu > 1 else []
    )
    for settings in (*plans, *by_gpu):
        try:
            chosen = ZeroTopoConfig.parse({**settings, **fixed})
            config = resolve_config(chosen, topology)
        except ValueError as error:
            refusal = refusal or error
            continue
        own = {key: value for key, value in settings.items() if key not in fixed}
        found.setdefault(_effect(config), Candidate(_name(own, config), own, chosen, config))
    if not found:
        raise ValueError(
            f'"scheme": "{AUTO}": no plan keeps the other keys of the block: {refusal}'
        )
    return tuple(found.values())


def before_a_model(block: ZeroTopoConfig, topology: Topology) -> ResolvedConfig:
    """Resolve the block while no model is known; for an automatic block, return the first plan that
    may be chosen.

    Raises:
        ValueError: raised by :func:`candidates` and ``resolve_config``.
    """
    if not is_automatic(block, topology):
        return resolve_config(block, topology)
    return candidates(block, replace(topology, order=None, hosts=None))[0].config


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


def _name(own: Block, config: ResolvedConfig) -> str:
    """Return a name: the scheme or the degrees, then what the planner, not the user, added."""
    degrees = (
        f"{role} {degree}" for role, degree in config.plan.degrees().items() if degree is not None
    )
    parts = [own["scheme"] if "scheme" in own else ", ".join(degrees)]
    quantize = own.get("quantize", {})
    if "weights" in quantize:
        parts.append("paper's formats")
    if quantize.get("resident"):
        parts.append("int8 stored")
    elif (
        "scheme" in own and "resident" in _quantized(own["scheme"]) and config.resident_spec is None
    ):
        parts.append("16-bit weights")
    if moving := [key for key in ("sync", "publish") if key in own]:
        sync = own.get("sync", FEW_BITS["sync"])
        mode = {"quantized": "nf4", "dense": "ring"}.get(sync["mode"], sync["mode"])
        parts.append(
            " and ".join({"sync": f"{mode} sync", "publish": "int4 publish"}[key] for key in moving)
        )
    if "two_hop" in own:
        parts.append("through the GPU")
    return ", ".join(parts)


def _schemes(sparse: Sequence[str]) -> Iterator[Block]:
    for name, scheme in SCHEMES.items():
        yield {"scheme": name}
        if not _quantized(name) or "sync" in scheme:
            continue
        coded = "resident" in _quantized(name)
        for codes in (False, True):
            settings: Block = (
                {} if codes == coded else {"quantize": {"resident": "int8" if codes else None}}
            )
            for more in ({}, *_between_nodes(sparse, codes)):
                yield {"scheme": name, **settings, **more}


def _quantized(scheme: str) -> Block:
    quantized: Block = SCHEMES[scheme].get("quantize", {})
    return quantized


def _between_nodes(sparse: Sequence[str], codes: bool) -> Iterator[Block]:
    """Yield the quantized and sparse settings of sync and publish; only of sync for resident INT8
    weights.
    """
    for mode in (FEW_BITS["sync"], *({"mode": name} for name in sparse)):
        yield {"sync": mode} if codes else {"sync": mode, "publish": FEW_BITS["publish"]}


def _free_forms(topology: Topology, sparse: Sequence[str]) -> Iterator[Block]:
    world = topology.world_size
    degrees = aligned_degrees(topology)
    for weights, gradients in product(degrees, repeat=2):
        replicated = max(gradients, topology.ranks_per_node)
        for optimizer in dict.fromkeys((world, replicated)) if gradients % weights == 0 else ():
            # Collectives that move nothing at these degrees have no settings.
            moving = {
                name
                for name, moves in (("sync", gradients < world), ("publish", weights < optimizer))
                if moves
            }
            for bits, secondary in _secondaries(topology, weights):
                roles = zip(ROLES, (weights, secondary, gradients, optimizer), strict=True)
                block: Block = {
                    role: _place(topology, degree) for role, degree in roles if degree is not None
                }
                if not bits:
                    yield block
                    if "sync" in moving and topology.nodes > 1:
                        yield {**block, **RING}
                    continue
                for codes in (
                    (False, True) if secondary is None and weights < optimizer else (False,)
                ):
                    quantize = {**QUANTIZED, **({"resident": "int8"} if codes else {})}
                    for more in ({}, *_between_nodes(sparse, codes)):
                        yield {
                            **block,
                            "quantize": quantize,
                            **{name: more[name] for name in more if name in moving},
                        }


def aligned_degrees(topology: Topology) -> tuple[int, ...]:
    """Return the degrees that nest with the machine's units, ascending: parts of a node, few nodes,
    the world.
    """
    gpu = topology.ranks_per_gpu
    node = topology.ranks_per_node
    inside = [d for d in divisors(node) if d % gpu == 0 or gpu % d == 0]
    nodes = [count * node for count in (1, 2, 4) if topology.nodes % count == 0]
    return tuple(sorted({*inside, *nodes, topology.world_size}))


def _secondaries(topology: Topology, weights: int) -> Iterator[tuple[bool, int | None]]:
    """Yield (whether to use the paper's bits, degree of the secondary copy).

    A copy of the weights' degree or a larger one is useful only if quantized: otherwise it is a
    view. A smaller degree is always useful.
    """
    narrower = [
        d
        for d in (topology.ranks_per_gpu, topology.ranks_per_node)
        if 1 < d < weights and weights % d == 0
    ]
    yield from ((bits, None) for bits in (False, True))
    yield from ((bits, degree) for degree in dict.fromkeys(narrower) for bits in (False, True))
    if weights > 1:
        yield True, weights
    if 1 < weights < topology.ranks_per_node:
        yield True, topology.ranks_per_node


def _place(topology: Topology, degree: int) -> str | int:
    """Return the domain of a degree if it fills one, else the degree."""
    return next((name for name in DOMAINS if topology.degree(name) == degree), degree)


def _effect(config: ResolvedConfig) -> object:
    """Return a key that distinguishes plans; formats of collectives that move nothing are
    ignored.
    """
    plan = config.plan
    stages = tuple(tuple(plan.stages(*plan.pair_of(phase))) for phase in PHASES)
    return tuple(plan.degrees().values()), stages, config.resident_spec, repr(_used(config))


def _used(config: ResolvedConfig) -> dict[str, Any]:
    """Return the formats of the gathers and the scatter, and the settings of sync and publish; None
    if nothing moves.

    INT8 weights that are not gathered still have their format.
    """
    plan = config.plan
    return {
        "weights": config.weights_spec if plan.weights > 1 else config.resident_spec,
        "secondary": config.secondary_spec,
        "gradients": config.gradients_spec if plan.gradients > 1 else None,
        "sync": config.sync if plan.gradients < plan.world_size else None,
        "publish": config.publish if plan.weights < plan.optimizer else None,
    }
