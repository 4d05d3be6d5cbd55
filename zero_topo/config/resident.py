# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Decides whether weights can be stored only as INT8: gathers send INT8 weights, and publish sends their changes."""

from __future__ import annotations

from typing import NamedTuple

from zero_topo.config.parts import PublishConfig, QuantizeConfig
from zero_topo.plan import Plan
from zero_topo.strict import as_json


class Obstacle(NamedTuple):
    """Describes a setting that excludes resident INT8 weights: which one, why, and what to do instead."""

    setting: str
    why: str
    instead: str


def resident_obstacle(quantize: QuantizeConfig, plan: Plan, publish: PublishConfig) -> Obstacle | None:
    """Return the first setting that excludes ``quantize.resident``; None if weights can be stored as INT8."""
    w, copy = plan.weights, plan.secondary
    gathers, changes = "all gathers send the INT8 weights", "the changes of the INT8 weights are sent exactly"
    rules = (
        (quantize.weights == "int8", "quantize.weights", quantize.weights, gathers, 'set it to "int8"'),
        (copy in (None, w), "secondary", copy, f"{gathers}, which {w} ranks share", 'set "secondary" to null'),
        (
            copy is None or quantize.secondary == "int8",
            "quantize.secondary",
            quantize.secondary,
            gathers,
            'set it to "int8"',
        ),
        (publish.delta is None, "publish.delta", publish.delta, changes, "drop it"),
        (publish.dtype is None, "publish.dtype", publish.dtype, changes, "drop it"),
        (w < plan.optimizer, "weights", w, "each rank stores exactly the weights that it updates", "lower it"),
    )
    for holds, key, value, why, instead in rules:
        if not holds:
            return Obstacle(f"{key} = {as_json(value)}", why, instead)
    return None
