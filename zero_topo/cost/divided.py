# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks the plans of a job whose layers or experts are divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.experts import expert_sizes
from zero_topo.cost.planner import Ranking, Request, rank_plans
from zero_topo.cost.tensor import tensor_sizes


def tensor_requests(request: Request, size: int) -> tuple[Request, Request]:
    """Return the two requests that train the same batch on groups of ``size`` tensor parallel
    ranks.

    A group takes the micro-batches of its ranks one after the other, or in fewer, larger ones.
    """
    job = request.job
    longer = replace(job, tensor=size, micro_batches=job.micro_batches * size)
    larger = replace(job, tensor=size, micro_batch=job.micro_batch * size)
    return replace(request, job=longer), replace(request, job=larger)


def rank_tensor(asked: ZeroTopoConfig, request: Request) -> list[Ranking]:
    """Rank the plans with each number of tensor parallel ranks, and return the rankings with a plan
    that fits.

    They are sorted by the time of their best plan; of both ways to place the batch, the faster is
    taken. There are none if the request has a number of tensor or expert parallel ranks, or counts
    states alone.
    """
    found = []
    for size in tensor_sizes(request.machine, request.job.model) if _undivided(request) else ():
        found += _by_time(rank_plans(asked, each) for each in tensor_requests(request, size))[:1]
    return _by_time(found)


def rank_experts(asked: ZeroTopoConfig, request: Request) -> list[Ranking]:
    """Rank the plans with each number of expert parallel ranks, as :func:`rank_tensor` does for
    tensor parallel ones.

    There are none for a model without stacked experts.
    """
    job = request.job
    sizes = expert_sizes(request.machine, job.model) if _undivided(request) else ()
    requests = [replace(request, job=replace(job, expert=size)) for size in sizes]
    return _by_time(rank_plans(asked, each) for each in requests)


def _undivided(request: Request) -> bool:
    return request.job.tensor == request.job.expert == 1 and not request.states_only


def _by_time(rankings: Iterable[Ranking]) -> list[Ranking]:
    """Return the rankings with a plan that fits, the fastest first."""
    fitting = [ranking for ranking in rankings if ranking.timed]
    return sorted(fitting, key=lambda ranking: ranking.best.seconds)
