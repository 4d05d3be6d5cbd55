# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The planner's answers: the plan of a block for a model, the best plan of a live one, and the
reasons in words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zero_topo.config import AUTO, ResolvedConfig, ZeroTopoConfig, is_automatic, resolve_config
from zero_topo.config.parts import ROOT
from zero_topo.cost.job import Job
from zero_topo.cost.model_files import TRAINED, read_modules, shape_of
from zero_topo.cost.pipeline import best_pipeline
from zero_topo.cost.planner import (
    ASSUMED_MACHINE,
    EQUAL,
    Price,
    Priced,
    Ranking,
    Request,
    rank_plans,
)
from zero_topo.cost.tensor import tree_of
from zero_topo.topology import Topology, resolve_topology
from zero_topo.topology.presets import assumptions
from zero_topo.units import format_bytes, format_count, format_seconds

OWN_WORK = ("compute", "optimizer")
RISKS: Mapping[str, tuple[str, float, float]] = {
    "topo": ("int8 weights and nf4 gradients, the formats of topo", 0.0003, 0.0015),
    "topo-scatter4": ("int4 gradients inside the node alone", 0.0037, 0.0076),
    "topo-q4": ("int8 weights, int4 gradients, int4 sync and publish", 0.0045, 0.0123),
    "chaos": ("a change of the weights by 1e-6, which says what is noise", 0.0003, 0.0017),
}
"""Change of a small model's training loss by quantization, against stock ZeRO-3: scheme of the
records ``convergence.json`` and (topo) ``formats-defaults.json`` -> what is quantized, mean and
worst of eight seeds (chaos: five).
"""
SURE = ("weights", "frozen", "secondary", "gradients", "residual")
"""Roles whose bytes follow from the plan alone; an optimizer may store less than Adam."""


def recommend(asked: ZeroTopoConfig, request: Request) -> tuple[ZeroTopoConfig, str]:
    """Return the block of the best plan that fits, and the reason in one line; arguments of
    :func:`rank_plans`.

    Raises:
        ValueError: if nothing fits, or the user's keys fit no plan.
    """
    ranking = rank_plans(asked, request)
    best = ranking.best
    default = "" if asked.scheme else ", the default here"
    kept = "" if asked.lossy else " and quantize no more than asked for"
    slower = best.seconds / ranking.fastest.seconds - 1
    place = (
        "is the fastest"
        if slower <= EQUAL
        else f"is within {slower:.1%} of the fastest and holds less,"
    )
    line = (
        f"scheme {AUTO}{default}: {_keys(best)}, {format_seconds(best.seconds)} a step by "
        f"prediction, {place} "
        f"of the {len(ranking.timed)} plans that fit{kept}, and needs {_stored(best)}"
    )
    counted = f"{sum(request.work.numels):,} parameters, counted as follows"
    near = [
        f"near: {_keys(plan)}, {plan.seconds / best.seconds - 1:+.1%} time, "
        f"{format_bytes(plan.stored)}"
        for plan in ranking.timed[1:2]
    ]
    return best.candidate.chosen, "; ".join(
        [line, *near, *_gain(ranking), counted, setting(best.request), *assumed_lines(request)]
    )


def _stored(price: Price) -> str:
    limit = price.request.limit
    of = ", of a memory that is not known" if limit is None else f" of {format_bytes(limit)}"
    return f"{format_bytes(price.stored)}{of}"


def _keys(plan: Priced) -> str:
    return json.dumps(dict(plan.candidate.settings)).removeprefix("{").removesuffix("}")


def _gain(ranking: Ranking) -> list[str]:
    """Return what the plans that quantize more than was asked for would gain, if anything."""
    best = ranking.best.seconds
    faster = ranking.faster
    if faster is None:
        return []
    return [
        f'"lossy": true would take {format_seconds(faster.seconds)} a step, '
        f"{best / faster.seconds:.2f} times as fast, "
        f"with {', '.join(faster.candidate.words)} ({faster.candidate.name})"
    ]


def explain(ranking: Ranking, tensor: Sequence[Ranking] = ()) -> list[str]:
    """Explain which plan won and why, what dominates its link time, where the runner-up is slower,
    what does not fit.

    Named schemes that do not fit get a sentence each; other plans are counted.

    Args:
        ranking: the plans.
        tensor: those with tensor or expert parallelism, by :func:`rank_tensor` and
            :func:`rank_experts`.

    Raises:
        ValueError: if nothing fits.
    """
    best = ranking.best
    request = ranking.request
    lines = [
        _winner_line(ranking),
        *_loss_lines(ranking),
        *_gain(ranking),
        range_sentence(best),
        _memory_line(best),
    ]
    lines += [
        *_advice(best),
        *_tensor_lines(best, tensor),
        *_pipeline_line(ranking),
        _step_line(best),
    ]
    lines += [_runner_up_line(best, second) for second in ranking.timed[1:2]]
    if request.limit is not None:
        named = [plan for plan in ranking.refused if plan.candidate.named]
        lines += [plan.why_not(request.limit) for plan in named]
        if rest := len(ranking.refused) - len(named):
            lines.append(f"{rest} {'other ' if named else ''}plans do not fit")
    return [*lines, *request.job.model.notes, *assumed_lines(request)]


def _winner_line(ranking: Ranking) -> str:
    """Return which plan won, compared with a faster one that needs more memory, if there is one."""
    best = ranking.best
    fastest = ranking.fastest
    fitting = len(ranking.timed)
    share = 1 - fastest.seconds / best.seconds
    leaner = ""
    if share > EQUAL and best.stored < fastest.stored:
        leaner = (
            f"; {fastest.candidate.name} would take {share:.1%} less, but needs "
            f"{format_bytes(fastest.stored)}"
        )
    return (
        f"{best.candidate.name} wins with {format_seconds(best.seconds)} a step among the "
        f"{fitting} plans that fit, of {fitting + len(ranking.refused)}{leaner}"
    )


def _loss_lines(ranking: Ranking) -> list[str]:
    """Return what a lossy winner gains and risks, or how much faster the best lossy plan
    would be.
    """
    best = ranking.best
    by_time = sorted(ranking.timed, key=lambda plan: plan.seconds)
    if not best.candidate.losses:
        fastest = next((plan for plan in by_time if plan.candidate.losses), best)
        gain = 1 - fastest.seconds / best.seconds
        less = f"; {fastest.candidate.name} would gain {gain:.1%}, too little" if gain > 0 else ""
        return [f"it is lossless: everything is sent uncompressed{less}"]
    rival = next((plan for plan in by_time if not plan.candidate.losses), None)
    gains = "and no lossless plan fits"
    if rival is not None:
        share = 1 - best.seconds / rival.seconds
        gains = (
            f"which saves {share:.1%} of the step of {rival.candidate.name}, the fastest "
            "lossless plan"
        )
    risks = ", ".join(
        f"{what} {mean:+.2%} (worst seed {worst:+.2%})" for what, mean, worst in RISKS.values()
    )
    risk = (
        f"of the training loss of 400 thousand parameters, {risks}; compare losses before a "
        "long run"
    )
    return [f"it sends {', '.join(best.candidate.words)}, {gains}", f"what that may cost: {risk}"]


def range_sentence(price: Price) -> str:
    """Return the range of a step and the unknowns on which it depends by one percent or more, as a
    sentence.
    """
    low = format_seconds(price.range.low_s)
    high = format_seconds(price.range.high_s)
    named = [
        f"{what} ({share:.0%})" for what, share in price.range.depends_on.items() if share >= 0.01
    ]
    return (
        f"a step is between {low} and {high}, and depends most on "
        f"{', '.join(named) or 'nothing that is unknown'}"
    )


def price_sentence(price: Price) -> str:
    """Return the costs of a plan, in one line."""
    sent = (
        ", ".join(f"{format_bytes(n)} over {domain}" for domain, n in price.sent_by_domain.items())
        or "nothing"
    )
    step = format_seconds(price.seconds)
    return (
        f"each rank stores {_stored(price)} and sends {sent} in a step, which takes {step} by "
        "prediction"
    )


def setting(request: Request) -> str:
    """Return the job settings on which every predicted time depends; printed with each."""
    job = request.job
    model = job.model
    optimizer = "; Muon" if job.muon else ""
    where = "a rank" if job.tensor == 1 else f"{job.tensor} tensor parallel ranks"
    where += f", experts spread over {job.expert} ranks" if job.expert > 1 else ""
    activations = "recomputed" if job.checkpointing else "kept"
    if request.keeps_if_fits:
        activations = "kept by each plan that fits with them, else recomputed"
    return (
        f"{format_count(model.params)} parameters, as {model.layers} layers of width "
        f"{model.hidden}; {job.micro_batch} x {model.sequence:,} tokens a micro-batch on {where}, "
        f"activations {activations}{optimizer}; of the communication that computation may hide, "
        f"{job.hidden:.0%} is hidden (--overlap "
        f"{job.hidden:g}{', assumed' if job.overlap is None else ''})"
    )


def _advice(best: Priced) -> list[str]:
    """Return what recomputing activations, or keeping them, would change."""
    request = best.request
    if request.limit is None or request.states_only:
        return []
    recomputes = request.job.checkpointing
    other = replace(request, job=replace(request.job, checkpointing=not recomputes)).price(
        best.config
    )
    if not other.fits:
        return [
            f"without checkpointing it would need {format_bytes(other.stored)}, which does not fit"
        ]
    how = (
        "without checkpointing (--set checkpointing=false)" if recomputes else "with checkpointing"
    )
    share = other.seconds / best.seconds - 1
    return [f"{how} it needs {format_bytes(other.stored)} and takes {share:+.0%} time"]


def _tensor_lines(best: Priced, tensor: Sequence[Ranking]) -> list[str]:
    """Compare the winner with the best plan of each number of tensor or expert parallel ranks; say
    what these need.
    """
    lines = []
    dividing = [ranking for ranking in tensor if ranking.request.job.tensor > 1]
    for other in (ranking.best for ranking in tensor):
        job = other.request.job
        share = other.seconds / best.seconds - 1
        ranks = (
            f"experts spread over {job.expert} ranks"
            if job.expert > 1
            else f"{job.tensor} tensor parallel ranks"
        )
        batch = f"{job.micro_batches} x {job.micro_batch} sequences on each {job.tensor} ranks"
        lines.append(
            f"with {ranks}, {other.candidate.name} would take {format_seconds(other.seconds)}, "
            f"{share:+.1%} time, and {format_bytes(other.stored)}"
            + (f", for the same batch: {batch}" if job.tensor > 1 else "")
        )
    if len(dividing) < len(tensor):
        lines.append(
            'experts are spread by "expert_parallel": {"enabled": true, "autoep_size": N}, and '
            "their shards lie in the "
            "domains of the other parameters' plan"
        )
    if dividing:
        lines.append(
            'tensor parallelism divides the layers: "tensor_parallel": {"autotp_size": N} does so '
            "for Hugging Face "
            "models that DeepSpeed can divide; other models need code, layers that communicate and "
            "an mpu"
        )
    return lines


def _pipeline_line(ranking: Ranking) -> list[str]:
    """Compare the winner with tensor and pipeline parallel training."""
    best = ranking.best
    price = best_pipeline(ranking.request)
    if price is None or best.request.states_only:
        return []
    return [
        f"tensor and pipeline parallel training with ZeRO-1, as in GPT-NeoX ({price.config.name}, "
        f"stages x tensor parallel ranks), would take {format_seconds(price.seconds)}, "
        f"{price.seconds / best.seconds - 1:+.1%} time, and {format_bytes(price.stored)}; it needs "
        "code that divides the model"
    ]


def _memory_line(best: Priced) -> str:
    request = best.request
    if request.limit is None:
        sharded = best.config.plan.weights >= request.topology.ranks_per_node > 1
        why = (
            "plans that shard weights over less than a node were left out"
            if sharded
            else "nothing was left out"
        )
        return (
            f"it needs {format_bytes(best.stored)} on each rank, whose memory is not known, so "
            f"{why}"
        )
    return (
        f"it needs {format_bytes(best.stored)} of the {format_bytes(request.limit)} on each rank "
        f"({request.reserve:.0%} of the memory is kept in reserve)"
    )


def _step_line(best: Priced) -> str:
    waits = {
        phase: seconds for phase, seconds in best.step.breakdown.items() if phase not in OWN_WORK
    }
    phase, longest = max(waits.items(), key=lambda item: item[1])
    total = sum(waits.values())
    if not total:
        return "it waits for no communication"
    return (
        f"it waits {format_seconds(total)} a step for communication, {format_seconds(longest)} "
        f"of it for {phase}"
    )


def _runner_up_line(best: Priced, second: Priced) -> str:
    mine, other = (plan.step.breakdown for plan in (best, second))
    losses = {phase: other.get(phase, 0.0) - mine.get(phase, 0.0) for phase in {**mine, **other}}
    phase, loss = max(losses.items(), key=lambda item: item[1])
    where = f": its {phase} takes {format_seconds(loss)} longer" if loss > 0 else ""
    return f"the runner-up, {second.candidate.name}, takes {format_seconds(second.seconds)}{where}"


def assumed_lines(request: Request) -> list[str]:
    """Return what is assumed about the machine."""
    name = request.topology.name
    lines = []
    if assumed := assumptions(name):
        lines.append(f"assumed, not measured, for {name}: {', '.join(assumed)}")
    if missing := request.assumed_links:
        lines.append(
            f"the bandwidth of {', '.join(missing)} is not known: {ASSUMED_MACHINE}'s is assumed"
        )
    if request.known_rates is None:
        lines.append(
            f"how fast a rank of {name} computes is not known: {ASSUMED_MACHINE}'s is assumed"
        )
    return lines


def planned(block: ZeroTopoConfig, request: Request) -> ResolvedConfig:
    """Resolve the block for a model; the notes say why a plan was chosen, or warn that it is not
    likely to fit.

    Raises:
        ValueError: raised by :func:`recommend` and ``resolve_config``, and if the shards of weights
            and gradients alone are more than a rank's memory.
    """
    topology = tree_of(request.topology, request.job.tensor)
    if is_automatic(block, topology):
        chosen, why = recommend(block, request)
        resolved = resolve_config(chosen, topology)
        return replace(resolved, notes=(why, *resolved.notes))
    resolved = resolve_config(block, topology)
    memory = request.topology.memory_per_rank
    limit = request.limit
    price = request.price(resolved)
    if memory is None or limit is None or price.fits:
        return resolved
    name = "the plan" if resolved.scheme is None else f"scheme {resolved.scheme}"
    sure = sum(price.memory.get(role, 0) for role in SURE)
    way_out = _way_out(block, resolved, request)
    if sure > memory:
        raise ValueError(
            f"{ROOT}: {name} leaves {format_bytes(sure)} of weights and gradients on each rank of "
            f"{request.topology.name}, which has {format_bytes(memory)}; {way_out}"
        )
    warning = (
        f"warning: {name} needs {format_bytes(price.stored)} on each rank by prediction, "
        f"{price.most}, of "
        f"{format_bytes(limit)} ({request.reserve:.0%} of the memory is kept in reserve); {way_out}"
    )
    return replace(resolved, notes=(*resolved.notes, warning))


def _way_out(block: ZeroTopoConfig, resolved: ResolvedConfig, request: Request) -> str:
    """Return what to set instead: weights sharded over a larger domain if that fits, else the
    scheme "auto".
    """
    for domain in ("gpu", "node"):
        degree = resolved.topology.degree(domain)
        if degree <= resolved.plan.weights or resolved.plan.gradients % degree:
            continue
        keys = (
            {"weights": domain}
            if resolved.scheme is None
            else {"scheme": resolved.scheme, "weights": domain}
        )
        wider = request.price(resolve_config(block.model_copy(update=keys), resolved.topology))
        if wider.fits:
            words = ", ".join(
                f'"{key}": "{value}"' for key, value in keys.items() if value != block.scheme
            )
            return f"set {words}, which needs {format_bytes(wider.stored)}"
    return (
        f'set "scheme": "{AUTO}", which takes the fastest plan that fits; if none fits, it '
        "reports why"
    )


def estimate(
    model: Any,
    machine: str | Mapping[str, Any] = "auto",
    ranks: int | None = None,
    *,
    sequence: int | None = None,
    micro_batch: int = 1,
    micro_batches: int = 1,
    checkpointing: bool = True,
    lossy: bool = False,
) -> Ranking:
    """Print the plan that is predicted to train a model fastest in 16 bits, with the reasons, and
    return all plans.

    Args:
        model: a ``torch.nn.Module`` on any device, also "meta". Parameters that require no gradient
            count as frozen.
        machine: the machine, as the config key ``topology`` takes it.
        ranks: ranks of the job; None takes one node of a preset, or all of a description.
        sequence: tokens of a sequence; None takes the limit of the model's config, at most 4096;
            without one, 2048.
        micro_batch: sequences per rank and micro-batch.
        micro_batches: micro-batches per optimizer step.
        checkpointing: whether activations are recomputed.
        lossy: whether plans may be quantized.

    Raises:
        ValueError: if the machine or the ranks are wrong, or no plan fits.
    """
    found = resolve_topology(machine, ranks)
    request = module_request(
        model, found, sequence, micro_batch=micro_batch, micro_batches=micro_batches
    )
    job = replace(request.job, checkpointing=checkpointing)
    ranking = rank_plans(ZeroTopoConfig.parse({"lossy": lossy}), replace(request, job=job))
    tree = job.model
    print(f"{tree.name}: {tree.params:,} parameters in {tree.layers} layers of width {tree.hidden}")
    for line in (setting(ranking.best.request), *explain(ranking)):
        print(f"- {line}")
    return ranking


def module_request(
    module: Any, topology: Topology, sequence: int | None = None, trains: bool = True, **job: Any
) -> Request:
    """Return the planner's request for a live model, whose parameters DeepSpeed may have
    partitioned.

    Args:
        module: the ``torch.nn.Module``.
        topology: the machine.
        sequence: tokens of a sequence; None takes the limit of the model's config, at most 4096;
            without one, 2048.
        trains: whether there are gradients and optimizer states. A model without a trained
            parameter counts as trained.
        job: other fields of :class:`~zero_topo.cost.job.Job`.
    """
    tree = read_modules(module, type(module).__name__)
    tree = replace(tree, sequence=sequence or min(tree.sequence, TRAINED))
    parameters = [*module.parameters()]
    trained = [p for p in parameters if p.requires_grad and trains]
    frozen = [p for p in parameters if not (p.requires_grad and trains)]
    if trains and not trained:
        trained, frozen = frozen, trained
    numels = tuple(math.prod(shape_of(p)) for p in trained)
    still = tuple(math.prod(shape_of(p)) for p in frozen)
    whole = tuple(bool(getattr(p, "use_muon", False)) for p in trained)  # DeepSpeed's mark
    return Request(topology, Job(tree, **job), numels, frozen=still, whole=whole)
