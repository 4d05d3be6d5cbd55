# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables and JSON of plans and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_topo.config import ResolvedConfig
from zero_topo.cost.bounds import Cost
from zero_topo.cost.rule import usable
from zero_topo.observe.tables import Table, bytes_or_dash
from zero_topo.topology.model import LINKED_DOMAINS
from zero_topo.units import format_bytes, format_seconds

LEGEND = (
    "degrees: ranks that share weights/secondary/gradients/optimizer; memory at the peak of a step",
    "sent: by each rank in a step, over the links of a GPU, a node, and between nodes",
    "a step takes at least the longest of computing and each link, at most all one after the other",
)


def costs_json(cost: Cost) -> dict[str, Any]:
    """The costs of a plan in JSON types."""
    return {
        "degrees": cost.config.plan.degrees(),
        "quantizes": sorted(cost.config.kinds),
        "memory": cost.memory,
        "fits": _fits(cost),
        "sent_by_domain": cost.sent_by_domain,
        "at_least_s": cost.bounds and cost.bounds.at_least,
        "at_most_s": cost.bounds and cost.bounds.at_most,
    }


def plans_table(rows: Mapping[str, Cost], title: str) -> Table:
    """Plan by degrees, formats, memory, bytes by domain and the bounds of a step."""
    used = {domain for cost in rows.values() for domain in cost.sent_by_domain}
    domains = [domain for domain in LINKED_DOMAINS if domain in used]
    table = [("", "degrees", "quantizes", "memory", *domains, "at least", "at most")]
    for name, cost in rows.items():
        sent = [bytes_or_dash(cost.sent_by_domain.get(domain, 0)) for domain in domains]
        seconds = ["?", "?"]
        if cost.bounds is not None:
            seconds = [format_seconds(cost.bounds.at_least), format_seconds(cost.bounds.at_most)]
        memory = format_bytes(sum(cost.memory.values()))
        quantizes = ", ".join(sorted(cost.config.kinds)) or "-"
        stored = memory if _fits(cost) else f"{memory}!"
        table.append((name, degrees(cost.config), quantizes, stored, *sent, *seconds))
    return {"title": title, "words": 3, "rows": table}


def _fits(cost: Cost) -> bool:
    limit = usable(cost.config.topology.memory_per_rank)
    return limit is None or sum(cost.memory.values()) <= limit


def degrees(config: ResolvedConfig) -> str:
    """Ranks that share each role, such as ``8/-/8/32``."""
    return "/".join(
        "-" if degree is None else str(degree) for degree in config.plan.degrees().values()
    )
