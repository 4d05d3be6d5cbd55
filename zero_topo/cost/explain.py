# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The planner's reasons in sentences, and the choice for the scheme "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_topo.config import AUTO, ZeroTopoConfig
from zero_topo.cost.planner import ASSUMED_MACHINE, EQUAL, Priced, Ranking, Request, rank_plans, wire_seconds
from zero_topo.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Chosen:
    """A block whose scheme "auto" was replaced, and why."""

    config: ZeroTopoConfig
    notes: tuple[str, ...]


def recommend(asked: ZeroTopoConfig, request: Request) -> Chosen:
    """The block of the best plan that fits; arguments as :func:`~zero_topo.cost.planner.rank_plans`.

    Raises:
        ValueError: if nothing fits, or the user's keys fit no plan.
    """
    ranking = rank_plans(asked, request)
    notes = [f"scheme {AUTO}: {line}" for line in explain(ranking)]
    return Chosen(ranking.best.candidate.chosen, tuple(notes))


def explain(ranking: Ranking) -> list[str]:
    """What won and by what, what dominates its wires, what the runner-up loses, what did not fit.

    Named schemes that do not fit get a sentence each; other plans are counted.

    Raises:
        ValueError: if nothing fits.
    """
    best, request = ranking.best, ranking.request
    lines = [_winner_line(best, ranking), _memory_line(best, request), _wire_line(best, request)]
    lines += [_runner_up_line(best, ranking.timed[1], request)] if len(ranking.timed) > 1 else []
    if request.limit is not None:
        told = [plan for plan in ranking.refused if plan.candidate.named]
        lines += [plan.why_not(request.limit) for plan in told]
        if rest := len(ranking.refused) - len(told):
            lines.append(f"{rest} {'other ' if told else ''}plans do not fit")
    return [*lines, *_assumptions(request)]


def _winner_line(best: Priced, ranking: Ranking) -> str:
    assert best.seconds is not None
    equal = sum((plan.seconds or 0.0) <= best.seconds * (1 + EQUAL) for plan in ranking.timed[1:])
    others = f"; as fast to within {EQUAL:.1%}: {equal} of them" if equal else ""
    return (
        f"{best.candidate.name} wins with {format_seconds(best.seconds)} a step among the {ranking.fitting} plans that "
        f"fit, of {ranking.fitting + len(ranking.refused)}{others}"
    )


def _memory_line(best: Priced, request: Request) -> str:
    if request.limit is None:
        return f"it needs {format_bytes(best.held)} on each rank, whose memory is not known, so nothing was dropped"
    return (
        f"it needs {format_bytes(best.held)} of the {format_bytes(request.limit)} on each rank "
        f"({request.reserve:.0%} of the memory is kept in reserve)"
    )


def _wire_line(best: Priced, request: Request) -> str:
    wires = wire_seconds(best.candidate.config, request.work)
    if not wires:
        return "nothing travels between ranks"
    (phase, domain), longest = max(wires.items(), key=lambda item: item[1])
    total = format_seconds(sum(wires.values()))
    return f"its wires carry {total} a step, of which {phase} over {domain} takes {format_seconds(longest)}"


def _runner_up_line(best: Priced, second: Priced, request: Request) -> str:
    assert best.seconds is not None and second.seconds is not None
    mine, other = (wire_seconds(plan.candidate.config, request.work) for plan in (best, second))
    losses = {key: other.get(key, 0.0) - mine.get(key, 0.0) for key in sorted({*other, *mine})}
    (phase, domain), loss = max(losses.items(), key=lambda item: item[1], default=(("", ""), 0.0))
    where = f": its {phase} over {domain} takes {format_seconds(loss)} longer on the wire" if loss > 0 else ""
    return f"the runner-up, {second.candidate.name}, takes {format_seconds(second.seconds)}{where}"


def _assumptions(request: Request) -> Sequence[str]:
    lines = []
    if missing := request.assumed_links:
        lines.append(f"the bandwidth of {', '.join(missing)} is not known: {ASSUMED_MACHINE}'s is assumed")
    if request.assumed_rates:
        lines.append(
            f"how fast a rank of {request.topology.name} computes is not known: {ASSUMED_MACHINE}'s is assumed"
        )
    return lines
