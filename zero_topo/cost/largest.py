# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Finds the largest model that a plan trains on a machine."""

from __future__ import annotations

from dataclasses import replace

from zero_topo.config import ResolvedConfig
from zero_topo.cost.planner import Request
from zero_topo.cost.transformer import LEAST_PARAMS, scaled

MOST_PARAMS = 10**15
CLOSE = 1.0002
STEPS_ABOVE = (1.002, 1.005, 1.01, 1.02, 1.05)


def max_params(config: ResolvedConfig, request: Request) -> int | None:
    """Return the parameters of the largest model of conventional shape (:func:`scaled`) that fits;
    None if unlimited.

    No model up to 5% larger fits either.

    Args:
        config: the plan on the request's machine.
        request: machine and job; only the sequence of its model is used.
    """
    if request.limit is None:
        return None

    def fits(params: int) -> bool:
        model = scaled(params, sequence=request.job.model.sequence)
        return replace(request, job=replace(request.job, model=model)).price(config).fits

    low = LEAST_PARAMS
    if not fits(low):
        return 0
    while True:
        high = low
        while high < MOST_PARAMS and fits(2 * high):
            high *= 2
        low = high
        high = 2 * high
        while high > low * CLOSE:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        # A larger model may need less memory: shapes change in steps
        above = [int(low * step) for step in STEPS_ABOVE]
        larger = [params for params in above if fits(params)]
        if not larger:
            return low
        low = larger[-1]
