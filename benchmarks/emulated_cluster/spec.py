# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What an emulated cluster looks like: its tree and the rates of its links. No torch, no
network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zero_topo.strict import Count, read, strict_dataclass
from zero_topo.topology import Topology
from zero_topo.topology.presets import emulated

ADDRESSES = 1 << 16  # of 10.77.0.0/16


@strict_dataclass
class LinkRates:
    """Mbit/s of the link that leads upwards from each unit, in each direction.

    Attributes:
        gcd: between a GCD (a rank) and its GPU.
        gpu: between a GPU and its node.
        node: a node's uplink.
    """

    gcd: Count
    gpu: Count
    node: Count


@strict_dataclass
class Spec:
    """An emulated cluster. Ranks are numbered along the tree.

    Raises:
        ValueError: unless there are at least two nodes and every number is a positive integer.
    """

    name: str
    nodes: Count
    gpus_per_node: Count
    gcds_per_gpu: Count
    rates_mbit: LinkRates

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ValueError(
                f"cluster {self.name!r}: {self.nodes} node has no uplink to measure; give at least "
                "2"
            )
        if self.world_size > ADDRESSES // 2:
            raise ValueError(
                f"cluster {self.name!r}: {self.world_size} ranks are too many for one host"
            )

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks in each node."""
        return self.gpus_per_node * self.gcds_per_gpu

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def address(self, rank: int) -> str:
        """The rank's IPv4 address."""
        high, low = divmod(rank + 1, 256)
        return f"10.77.{high}.{low}"

    def topology(self) -> Topology:
        """The machine as zero_topo sees it."""
        return emulated(self.nodes, self.gpus_per_node, self.gcds_per_gpu)

    def topology_block(self) -> dict[str, Any]:
        """The same as the ``topology`` key of a ``zero_topo`` block."""
        shape = {
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "gcds_per_gpu": self.gcds_per_gpu,
        }
        return {"emulated": shape}

    def to_json(self) -> dict[str, Any]:
        """As a file that :func:`load_spec` reads back."""
        shape = self.topology_block()["emulated"]
        return {"name": self.name, **shape, "rates_mbit": asdict(self.rates_mbit)}

    @classmethod
    def from_json(cls, what: str, data: Mapping[str, Any]) -> Spec:
        """Build from :meth:`to_json`'s form; ``name`` may be left out.

        Raises:
            ValueError: for an unknown or missing key, or a value that does not fit.
        """
        return read(cls, what, {"name": "custom", **data})


SPECS: Mapping[str, Spec] = MappingProxyType(
    {
        # Both keep the proportions of Frontier: 200 GB/s between the GCDs of a GPU, 100 between
        # GPUs, and of a node's uplink 25 for each GPU. The uplink is as fast as two cores can keep
        # busy.
        "t8": Spec("t8", 2, 2, 2, LinkRates(400, 200, 100)),
        "t16": Spec("t16", 4, 2, 2, LinkRates(400, 200, 100)),
        "t32": Spec("t32", 8, 2, 2, LinkRates(400, 200, 100)),
    }
)


def load_spec(source: str) -> Spec:
    """A preset's name or the path of a JSON file.

    Raises:
        ValueError: if it is neither, or the file does not describe a cluster.
    """
    if source in SPECS:
        return SPECS[source]
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"cluster {source!r} is neither one of {', '.join(SPECS)} nor a JSON file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"cluster {path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"cluster {path}: must be a JSON object, got {data!r}")
    return Spec.from_json(f"cluster {path}", {"name": path.stem, **data})
