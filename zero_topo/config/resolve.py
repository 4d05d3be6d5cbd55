# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Resolves settings to a plan: scheme defaults, then the user's keys, then the machine's degrees.

1. The scheme gives every degree, what is quantized, and how sync reduces.
2. A key the user wrote replaces the scheme's, even if its value is null. Degrees that are defined
   as equal to ``weights`` take the user's value of it.
3. The machine turns domains into degrees, and :class:`~zero_topo.plan.Plan` checks the dependency
   rule.
4. Each choice made for the user becomes one note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_topo.config.models import AUTO, ZeroTopoConfig
from zero_topo.config.parts import ROOT, QuantizeConfig
from zero_topo.config.schemes import DEFAULT_SCHEME, SAME, SCHEMES
from zero_topo.config.sync_config import DenseSync, SyncSettings
from zero_topo.plan import Degree, Plan
from zero_topo.quant.spec import BlockSpec
from zero_topo.strict import as_json
from zero_topo.topology.groups import Groups
from zero_topo.topology.model import Topology

ROLES = ("weights", "secondary", "gradients", "optimizer")
UNCHANGED = (
    "accumulation_dtype",
    "overlap",
    "report",
    "debug_checks",
)
"""Keys of the block whose value a scheme and the machine do not change."""


BACKEND_ADDS = 8
"""Ranks of the largest group between nodes in which the backend adds gradients."""


@dataclass(frozen=True)
class ResolvedConfig:
    """Holds the resolved settings for the engine and the cost model.

    Attributes:
        plan: degrees and index arithmetic.
        topology: the tree of the ranks that the plan is for.
        scheme: the scheme the defaults came from, or None for the free form.
        weights_spec: wire format of the gather before a forward; None sends weights as stored.
        secondary_spec: format of the secondary copy, stored and sent; None stores it in the dtype
            of the weights.
        gradients_spec: wire format of the scatter; None sends gradients unquantized.
        resident_spec: format of the INT8 weights stored in place of the weights, which gathers send
            unchanged; None stores the weights themselves. ``coded_params`` of ``plan.py`` selects
            the parameters.
        sync: settings of the mode of sync.
        publish_spec: format of the differences that publish sends under FSDP2; None sends weights.
        accumulation_dtype: dtype of the gradient buffer, or None for the model's own.
        overlap: whether sync overlaps with the last backward pass and publish with the next forward
            pass.
        report: folder of the log and the report of a run, or None for none.
        debug_checks: whether replicas are compared after each step.
        notes: one line for each choice made for the user.
        groups: the groups of ranks that each use the plan (tensor or expert parallelism); None for
            one group of all.
    """

    plan: Plan
    topology: Topology
    scheme: str | None
    weights_spec: BlockSpec | None
    secondary_spec: BlockSpec | None
    gradients_spec: BlockSpec | None
    resident_spec: BlockSpec | None
    sync: SyncSettings
    publish_spec: BlockSpec | None
    accumulation_dtype: str | None
    overlap: bool
    report: str | None
    debug_checks: bool
    notes: tuple[str, ...]
    groups: Groups | None = None

    @property
    def captured(self) -> bool:
        """Return whether the secondary copy has weights that this rank's weight shard does not
        have.
        """
        plan = self.plan
        return plan.secondary is not None and plan.secondary % plan.weights != 0

    def of_frozen(self) -> ResolvedConfig:
        """Return the config of the frozen weights, of which a rank owns no more than its world
        shard.
        """
        return replace(self, plan=replace(self.plan, optimizer=self.plan.world_size))

    def without_training(self) -> ResolvedConfig:
        """Return the config of an engine without an optimizer: the sharding of weights, and their
        wire format.
        """
        world = self.plan.world_size
        plan = replace(self.plan, secondary=None, gradients=world, optimizer=world)
        return replace(self, plan=plan, secondary_spec=None, gradients_spec=None, sync=DenseSync())

    @property
    def backend_adds(self) -> tuple[bool, ...]:
        """For each group of the gradients' reduce-scatter, the inner one first, whether it may be
        the backend's own; see Note [Sums of the backend] in ``engine/gradients.py``.
        """
        stages = self.plan.stages(1, self.plan.gradients)
        exact = self.gradients_spec is None
        return tuple(
            exact and (self.topology.domain(hi) != "world" or hi // lo <= BACKEND_ADDS)
            for lo, hi in stages
        )

    @property
    def machine(self) -> Topology:
        """Return the tree of all ranks, also of those that the plan is not for."""
        return self.topology if self.groups is None else self.groups.machine

    @property
    def kinds(self) -> set[str]:
        """Return the names of all block formats in which this config sends or stores values."""
        roles = self.weights_spec, self.secondary_spec, self.gradients_spec, self.resident_spec
        specs = *roles, self.sync.spec, self.publish_spec
        return {spec.name for spec in specs if spec is not None}

    def to_json(self) -> dict[str, Any]:
        """Return everything except the topology, in JSON types, for reports."""
        specs = {
            role: getattr(self, f"{role}_spec")
            for role in ("weights", "secondary", "gradients", "resident", "publish")
        }
        return {
            "scheme": self.scheme,
            "world_size": self.plan.world_size,
            "degrees": self.plan.degrees(),
            "inner": self.plan.inner,
            "quantize": {role: None if spec is None else str(spec) for role, spec in specs.items()},
            "sync": self.sync.model_dump(),
            **{key: getattr(self, key) for key in UNCHANGED},
            "notes": list(self.notes),
        }


def is_automatic(config: ZeroTopoConfig, topology: Topology) -> bool:
    """Return whether the plan is chosen for the model: by name, or by default on one-rank GPUs.

    On GPUs of one rank each, "topo" would store all weights on every rank.
    """
    if config.scheme is not None or config.weights is not None:
        return config.scheme == AUTO
    return topology.ranks_per_gpu == 1


def resolve_config(config: ZeroTopoConfig, topology: Topology) -> ResolvedConfig:
    """Resolve a config on a machine to plan, wire formats and notes; see the module's four steps.

    Raises:
        ValueError: for an unaligned degree or a broken dependency rule, with what to do, or for an
            automatic config.
    """
    if is_automatic(config, topology):
        raise ValueError(
            f'{ROOT}.scheme: "{AUTO}" is chosen for a model, which only a training run, check and '
            'plan do; "zero-topo plan --params N --machine NAME --nodes N" shows the choice'
        )
    name = (
        None
        if config.scheme is None and config.weights is not None
        else config.scheme or DEFAULT_SCHEME
    )
    block = config if name is None else _completed(config, SCHEMES[name])
    quantize = block.quantize
    plan = Plan.build(topology, [getattr(block, role) for role in ROLES])
    plan = replace(plan, secondary=None) if plan.weights == 1 else plan
    if problem := block.sync.problem(plan):
        raise ValueError(f"{ROOT}.{problem}")
    resident = quantize.spec("resident")
    obstacle = None if resident is None else _resident_obstacle(quantize, plan)
    if obstacle is not None:
        if "resident" in config.quantize.model_fields_set:
            raise ValueError(
                f'{ROOT}.quantize.resident = "int8" does not go with {": ".join(obstacle)}, or set '
                '"resident" to null'
            )
        resident = None
    plan = plan if resident is None else replace(plan, secondary=None)
    resolved = ResolvedConfig(
        plan=plan,
        topology=topology,
        scheme=name,
        weights_spec=quantize.spec("weights"),
        secondary_spec=None if plan.secondary is None else quantize.spec("secondary"),
        gradients_spec=quantize.spec("gradients"),
        resident_spec=resident,
        publish_spec=quantize.spec("publish"),
        notes=(),
        **{key: getattr(block, key) for key in ("sync", *UNCHANGED)},
    )
    refused = None if obstacle is None else obstacle[0]
    return replace(resolved, notes=tuple(_notes(config, block, resolved, refused)))


def _resident_obstacle(quantize: QuantizeConfig, plan: Plan) -> tuple[str, str] | None:
    """Return the first setting that excludes ``quantize.resident``, and why with the remedy; None
    if none does.

    INT8 weights are possible if all gathers send them and publish sends their changes.
    """
    w = plan.weights
    copy = plan.secondary
    gathers = "all gathers send the INT8 weights"
    coded = f'{gathers}; set it to "int8"'
    rules = (
        (quantize.weights == "int8", "quantize.weights", quantize.weights, coded),
        (
            copy in (None, w),
            "secondary",
            copy,
            f'{gathers}, which {w} ranks share; set "secondary" to null',
        ),
        (
            copy is None or quantize.secondary == "int8",
            "quantize.secondary",
            quantize.secondary,
            coded,
        ),
        (
            w < plan.optimizer,
            "weights",
            w,
            "each rank stores exactly the weights that it updates; lower it",
        ),
    )
    return next(
        ((f"{key} = {as_json(value)}", why) for holds, key, value, why in rules if not holds), None
    )


def _completed(config: ZeroTopoConfig, scheme: Mapping[str, Any]) -> ZeroTopoConfig:
    """Return the block with the scheme's value of each key that the user did not write; null counts
    as written.

    A null degree of weights, gradients or optimizer states does not: only the secondary copy can be
    left out.
    """
    own = {key: getattr(config, key) for key in config.model_fields_set}
    block = {
        **scheme,
        **{key: value for key, value in own.items() if value is not None or key == "secondary"},
    }
    for key in ("quantize", "sync") if config.sync.MODE == DenseSync.MODE else ("quantize",):
        block[key] = {**scheme.get(key, {}), **getattr(config, key).model_dump(exclude_unset=True)}
    return ZeroTopoConfig(
        **{key: block["weights"] if value == SAME else value for key, value in block.items()}
    )


def _notes(
    config: ZeroTopoConfig, block: ZeroTopoConfig, resolved: ResolvedConfig, refused: str | None
) -> Iterator[str]:
    """Yield a line for each choice.

    Args:
        config: the user's block.
        block: the user's block completed by the scheme.
        resolved: the result.
        refused: the setting that excludes the scheme's INT8 weights, or None.
    """
    scheme = resolved.scheme
    plan = resolved.plan
    given = "" if config.scheme or scheme is None else " (the default)"
    yield f"{f'scheme {scheme}' if scheme else 'no scheme'}{given}: {_placement(resolved, block)}"
    if plan.weights == 1 and plan.world_size > 1 and block.weights != "rank":
        yield _all_weights_note(block.weights, resolved.topology)
    if plan.weights == 1 and block.secondary is not None:
        yield (
            "no secondary copy of the weights: every rank stores all of them, so the backward "
            "pass gathers nothing"
        )
    if plan.gradients < plan.world_size:
        groups = plan.world_size // plan.gradients
        words = _sync_words(resolved.sync)
        yield (
            f"gradient reduction between {groups} groups of {plan.gradients} ranks (sync): {words}"
        )
    if resolved.resident_spec is not None:
        yield (
            f"weights are stored as INT8 only, one scale per {resolved.resident_spec.block_size} "
            "values; vectors and small matrices keep the model's own type"
        )
    if refused is not None:
        yield f"weights are stored in the model's own type: INT8 weights do not go with {refused}"
    if plan.weights < plan.optimizer:
        yield _publish_note(resolved)
    if len(plan.stages(1, plan.gradients)) > 1:
        (_, middle), (_, outer) = plan.stages(1, plan.gradients)
        yield (
            f"reduce-scatter of gradients in two steps: {middle} ranks inside a node, then "
            f"{outer // middle} nodes"
        )


def _publish_note(resolved: ResolvedConfig) -> str:
    what = "in the model's own type"
    if resolved.resident_spec is not None:
        what = "as the INT8 values that changed, lossless"
    elif resolved.publish_spec is not None:
        what = f"as {resolved.publish_spec.name.upper()} differences"
    return (
        f"all-gather of updated weights after each step (publish): {what}, over "
        f"{resolved.topology.domain(resolved.plan.optimizer)}"
    )


def _placement(resolved: ResolvedConfig, block: ZeroTopoConfig) -> str:
    words = []
    for role, degree in resolved.plan.degrees().items():
        if degree is None:
            continue
        place = getattr(block, role)
        spec = getattr(resolved, f"{role}_spec", None)
        ranks = f"{degree} rank{'s' if degree > 1 else ''}"
        where = f"{place} ({ranks})" if isinstance(place, str) else ranks
        words.append(f"{role}{'' if spec is None else f' {spec.name.upper()}'} over {where}")
    return ", ".join(words)


def _all_weights_note(place: Degree | None, topology: Topology) -> str:
    unit = (
        f"{place} domain has one rank" if isinstance(place, str) else f"weights degree is {place}"
    )
    wider = next((name for name in ("node", "world") if topology.degree(name) > 1), "world")
    return (
        f'{unit} on this machine: every rank stores all weights; set "weights": "{wider}" to '
        "shard them"
    )


def _sync_words(sync: SyncSettings) -> str:
    settings = sync.model_dump(exclude_none=True, exclude={"mode"})
    words = (
        key if value is True else f"no {key}" if value is False else f"{key} {value}"
        for key, value in settings.items()
    )
    return ", ".join([sync.MODE, *words])


def on_tree(dense: ResolvedConfig, tree: Topology) -> ResolvedConfig:
    """Return the plan of a smaller tree whose shards lie in the same domains."""
    plan = dense.plan
    degrees: list[Degree | None] = []
    for degree in (plan.weights, plan.secondary, plan.gradients, plan.optimizer):
        degrees.append(None if degree is None else dense.topology.domain(degree))
    found = Plan.build(tree, degrees)
    # INT8 weights are those of ranks that update other shards than they store.
    resident = dense.resident_spec if found.weights < found.optimizer else None
    return replace(dense, plan=found, topology=tree, resident_spec=resident)
