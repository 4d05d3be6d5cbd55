# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Describes how fast a rank of a machine computes, and which share of its links' rates collectives
reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from pydantic import Field

from zero_topo.strict import Positive, strict_dataclass
from zero_topo.topology.model import LinkedDomain

Share = Annotated[float, Field(strict=True, gt=0, le=1)]


@strict_dataclass
class Rates:
    """The rates of one rank that the bounds of a step need.

    Attributes:
        peak_flops: FLOP/s of dense 16-bit matrix products, as published.
        compute_efficiency: share of it that a transformer's layers reach while nothing is waited
            for.
        link_efficiency: domain -> share of its link's bandwidth that messages reach; 1 where not
            named.

    Raises:
        ValueError: if a number is not positive, a share above 1, or a name unknown.
    """

    peak_flops: Positive
    compute_efficiency: Share
    link_efficiency: Mapping[LinkedDomain, Positive] = field(default_factory=dict, hash=False)

    @property
    def flops(self) -> float:
        """Return the FLOP/s that layers reach."""
        return self.peak_flops * self.compute_efficiency
