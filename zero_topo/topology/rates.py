# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Describes how fast a rank of a machine computes, and which share of its links' rates collectives
reach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Annotated, Literal

from pydantic import Field

from zero_topo.strict import Flag, Positive, must_be, strict_dataclass
from zero_topo.topology.model import LinkedDomain

Share = Annotated[
    float, Field(strict=True, ge=1e-9, le=1), must_be("a share of the peak, from 1e-9 to 1")
]
Spread = Annotated[
    float, Field(strict=True, ge=0, lt=1), must_be("a share, at least 0 and under 1")
]
Unknown = Literal["compute", "memory", "links", "latency"]
UNKNOWN_SPREAD = 0.3
"""Relative spread of rates for which a machine's file gives none."""

Bytes = Annotated[int, Field(strict=True, ge=0), must_be("a whole number of bytes, not negative")]
Collective = Literal["gather", "reduce"]


@strict_dataclass
class Ring:
    """The measured time of rings through all ranks of a domain; see :meth:`seconds`.

    Attributes:
        bandwidth: bytes/s that one ring passes on while nothing else uses the links ("bus
            bandwidth").
        step: seconds of each step of the ring; every rank in it makes one.
        small: bytes of a rank's message up to which a step takes less (RCCL's and NCCL's LL
            protocol); 0 for none.
        small_step: seconds of such a step.
        spread: mean relative error of this against what was measured.
    """

    bandwidth: Positive
    step: Positive
    small: Bytes = 0
    small_step: Positive | None = None
    spread: Share = 0.3

    def latency(self, ranks: int, message: float) -> float:
        """Return the seconds of the steps of a ring of ``ranks`` ranks, each with a message of
        ``message`` bytes.
        """
        return (ranks - 1) * (self.small_step or self.step if message <= self.small else self.step)

    def seconds(self, ranks: int, message: float) -> float:
        """Return the seconds of one all-gather or reduce-scatter:
        ``(P - 1) (step + message / bandwidth)``.
        """
        return self.latency(ranks, message) + (ranks - 1) * message / self.bandwidth


@strict_dataclass
class Rates:
    """The rates of one rank that the time model needs.

    Attributes:
        peak_flops: FLOP/s of dense 16-bit matrix products, as published.
        compute_efficiency: share of it that a transformer's layers reach while nothing is waited
            for.
        memory_bandwidth: bytes/s of device memory, as published.
        memory_efficiency: share of it that packing, quantization and the optimizer reach.
        link_efficiency: domain -> share of its link's bandwidth that messages reach that no ring
            below is measured for; 1 where not named. A fit may find more than 1.
        rings: collective ("gather", "reduce") -> domain -> what its rings were measured to take;
            where absent, the link's latency and share of bandwidth count. Only a scheme that sends
            as DeepSpeed does reduces by rings.
        shared: domains whose link belongs to the unit below (a node's uplink) and not to each rank:
            if few of the unit's ranks send, each gets more.
        gather: how the backend gathers inside one process group, "ring" (NCCL, RCCL) or "direct"
            (gloo, point to
        point).
        spread: what of "compute", "memory", "links" and "latency" may be off by which share, up or
            down; what is not named by :data:`UNKNOWN_SPREAD`. Ranges of predictions follow from it.
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
    rings: Mapping[Collective, Mapping[LinkedDomain, Ring]] = field(
        default_factory=dict, hash=False
    )
    spread: Mapping[Unknown, Spread] = field(default_factory=dict, hash=False)
    host_codec: Flag = False

    @property
    def flops(self) -> float:
        """Return the FLOP/s that layers reach."""
        return self.peak_flops * self.compute_efficiency

    @property
    def memory(self) -> float:
        """Return the memory bandwidth that is reached, in bytes/s."""
        return self.memory_bandwidth * self.memory_efficiency

    def with_rings(self, changed: Callable[[Ring], Ring]) -> Rates:
        """Return these rates with ``changed`` applied to each ring."""
        rings = {
            kind: {name: changed(ring) for name, ring in of.items()}
            for kind, of in self.rings.items()
        }
        return replace(self, rings=rings)
