# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How fast a rank of a machine computes, and how much of its links' rates collectives reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from zero_topo.strict import Flag, Positive, must_be, strict_dataclass
from zero_topo.topology.model import LinkedDomain

Share = Annotated[float, Field(strict=True, gt=0, le=1), must_be("a share of the peak, above 0 and at most 1")]


@strict_dataclass
class Rates:
    """Of one rank, as the time model needs them.

    Attributes:
        peak_flops: FLOP/s of dense 16-bit matrix products, as published.
        compute_efficiency: share of it that a transformer's layers reach while nothing is waited for.
        memory_bandwidth: bytes/s of device memory, as published.
        memory_efficiency: share of it that packing, quantization and the optimizer reach.
        link_efficiency: domain -> share of its link's bandwidth that collectives reach; 1 where not
            named. A fit may find more than 1.
        shared: domains whose link belongs to the unit below (a node's uplink) and not to each rank: if few of the
            unit's ranks send, each gets more.
        gather: how the backend gathers inside one hop, "ring" (NCCL, RCCL) or "direct" (gloo, point to point).
        host_codec: whether packing and quantization take the compute stream's time, as on a CPU.

    Raises:
        ValueError: if a number is not positive, a share above 1, or a name unknown.
    """

    peak_flops: Positive
    compute_efficiency: Share
    memory_bandwidth: Positive
    memory_efficiency: Share
    link_efficiency: Mapping[LinkedDomain, Positive] = field(default_factory=dict, hash=False)
    shared: tuple[LinkedDomain, ...] = ("world",)
    gather: Literal["ring", "direct"] = "ring"
    host_codec: Flag = False

    @property
    def flops(self) -> float:
        """FLOP/s that layers reach."""
        return self.peak_flops * self.compute_efficiency

    @property
    def memory(self) -> float:
        """Bytes/s of memory that is reached."""
        return self.memory_bandwidth * self.memory_efficiency
