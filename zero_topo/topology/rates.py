# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How fast a rank of a machine computes, and how much of its links' rates collectives reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from zero_topo.topology.checks import check_keys, check_mapping, check_number, check_strings, nearest
from zero_topo.topology.model import LINKED_DOMAINS

PATTERNS = ("ring", "direct")
SHARES = ("compute_efficiency", "memory_efficiency")


@dataclass(frozen=True)
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

    peak_flops: float
    compute_efficiency: float
    memory_bandwidth: float
    memory_efficiency: float
    link_efficiency: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    shared: tuple[str, ...] = ("world",)
    gather: str = "ring"
    host_codec: bool = False

    def __post_init__(self) -> None:
        for key in ("peak_flops", "memory_bandwidth", *SHARES):
            object.__setattr__(self, key, check_number(f"rates: {key}", getattr(self, key), positive=True))
        for key in SHARES:
            if getattr(self, key) > 1:
                raise ValueError(f"rates: {key} is {getattr(self, key)}; it is a share of the peak, at most 1")
        for domain in (*self.link_efficiency, *self.shared):
            if domain not in LINKED_DOMAINS:
                known = nearest(domain, LINKED_DOMAINS)
                raise ValueError(f"rates: unknown domain {domain!r}; did you mean {known!r}? (known: {LINKED_DOMAINS})")
        for domain, share in self.link_efficiency.items():
            check_number(f"rates: link_efficiency of {domain!r}", share, positive=True)
        if self.gather not in PATTERNS:
            raise ValueError(f"rates: gather is {self.gather!r}; choose one of {PATTERNS}")

    @property
    def flops(self) -> float:
        """FLOP/s that layers reach."""
        return self.peak_flops * self.compute_efficiency

    @property
    def memory(self) -> float:
        """Bytes/s of memory that is reached."""
        return self.memory_bandwidth * self.memory_efficiency

    def to_json(self) -> dict[str, Any]:
        """As :meth:`from_json` reads it."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "link_efficiency": dict(self.link_efficiency), "shared": list(self.shared)}

    @classmethod
    def from_json(cls, what: str, data: object) -> Rates:
        """Build from an object with the fields of this class; ``what`` names it in errors.

        Raises:
            ValueError: for an unknown or missing key, or a value that does not fit.
        """
        mapping = dict(check_mapping(what, data))
        names = [item.name for item in fields(cls)]
        check_keys(what, mapping, names, required=names[:4])
        if "shared" in mapping:
            mapping["shared"] = check_strings(f"{what}: shared", mapping["shared"])
        if not isinstance(mapping.get("host_codec", False), bool):
            raise ValueError(f"{what}: host_codec is {mapping['host_codec']!r}; it must be true or false")
        efficiency = check_mapping(f"{what}: link_efficiency", mapping.get("link_efficiency", {}))
        return cls(**{**mapping, "link_efficiency": dict(efficiency)})
