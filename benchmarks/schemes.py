# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The schemes that benchmarks compare, by name: each a ``zero_topo`` block, or stock DeepSpeed
without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from zero_topo.config import SCHEMES, ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.topology import Topology


@dataclass(frozen=True)
class BenchScheme:
    """One row of a benchmark.

    Attributes:
        name: on the command line and in tables.
        block: the ``zero_topo`` block without its topology; None is stock ZeRO-3.
        ring: replace gloo's reduce-scatter, see ``emulated_cluster/ring.py``; for stock and plain
            FSDP2 only.
        optimizer: ``optimizer.type`` of the DeepSpeed config.
        lr: its learning rate; None is the benchmark's. Muon's is of its matrices; the others keep
            the benchmark's.
        change: size of a random change of the initial weights; "benchmarks convergence" alone makes
            it.
        stage: DeepSpeed's, without a block: 0 shards nothing and reduces gradients with torch's
            all-reduce.
        tensor: ranks of a GPU that share each layer, by DeepSpeed's AutoTP; they see the same
            samples.
        host: "fsdp" for FSDP2 instead of DeepSpeed; without a block FSDP2's own collectives, over
            all ranks, or for "hsdp-fsdp" over those of a node with replicas on the others.
    """

    name: str
    block: Mapping[str, Any] | None
    ring: bool = False
    optimizer: str = "AdamW"
    lr: float | None = None
    change: float = 0.0
    stage: int = 3
    tensor: int = 1
    host: str | None = None

    def at(self, lr: float) -> BenchScheme:
        """The same with a learning rate of its own, which its name tells."""
        return replace(self, name=f"{self.name}@{lr:g}", lr=lr)

    def job_on(self, topology: Mapping[str, Any]) -> dict[str, Any]:
        """In JSON types, on a machine (its ``topology`` key): ``scheme``, ``block``, ``optimizer``
        and others.
        """
        block = None if self.block is None else {"topology": dict(topology), **self.block}
        job: dict[str, Any] = {"scheme": self.name, "block": block, "optimizer": self.optimizer}
        job |= {} if self.stage == 3 else {"stage": self.stage}
        job |= {} if self.tensor == 1 else {"tensor": self.tensor}
        job |= {} if self.host is None else {"host": self.host}
        return job if self.lr is None else {**job, "lr": self.lr}

    def resolve(self, topology: Topology) -> ResolvedConfig | None:
        """Plan and formats on a machine; None for stock.

        Raises:
            ValueError: the config's own refusal of the block.
        """
        return (
            None
            if self.block is None
            else resolve_config(ZeroTopoConfig.parse(dict(self.block)), topology)
        )


def _synced(
    name: str,
    sync: Mapping[str, Any],
    optimizer: str = "AdamW",
    replicated: bool = False,
    **others: Any,
) -> BenchScheme:
    """Topo with nothing quantized: what a mode of sync costs in loss, by itself.

    The optimizer may be replicated between nodes, so that no weights are published.
    """
    place = REPLICATED if replicated else {}
    return BenchScheme(
        name,
        {"scheme": "topo", **place, "quantize": PLAIN, "sync": sync},
        optimizer=optimizer,
        **others,
    )


RADIUS = {"mode": "radius", "density": 0.4, "interval": 50, "start": 60}
NF4 = {"mode": "quantized"}
TERNARY = {"mode": "ternary"}
REPLICATED = {"optimizer": "node"}
SHARDED = {"sharded": True}
PLAIN = {"weights": None, "secondary": None, "gradients": None}
MUON: dict[str, Any] = {"optimizer": "Muon", "lr": 0.02}

KNOWN: Mapping[str, BenchScheme] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            BenchScheme("stock", None),
            BenchScheme("stock-ring", None, ring=True),
            BenchScheme("all-reduce", None, stage=0),
            *(BenchScheme(name, {"scheme": name}) for name in SCHEMES),
            # Tensor parallelism of two ranks.
            BenchScheme("stock-ring-tp2", None, ring=True, tensor=2),
            BenchScheme("topo-tp2", {"scheme": "topo"}, tensor=2),
            BenchScheme("topo-nf4-tp2", {"scheme": "topo", "sync": NF4}, tensor=2),
            # FSDP2, by itself and with our collectives and optimizer shards.
            *(
                BenchScheme(f"{host}{word}", None, ring=bool(word), host=host)
                for host in ("fsdp", "hsdp-fsdp")
                for word in ("", "-ring")
            ),
            BenchScheme("fsdp-paper", {"scheme": "paper"}, host="fsdp"),
            BenchScheme(
                "fsdp-nf4",
                {"scheme": "paper", "sync": NF4, "quantize": {"publish": "int4"}},
                host="fsdp",
            ),
            BenchScheme("topo-16bit", {"scheme": "topo", "quantize": {"resident": None}}),
            BenchScheme("topo-nf4", {"scheme": "topo", "sync": NF4}),
            BenchScheme("zero2-nf4", {"scheme": "topo-zero2", "sync": NF4}),
            # Sparse sync with INT8 weights; where the optimizer is replicated nothing is published.
            BenchScheme(
                "topo-oktopk",
                {"scheme": "topo", "sync": {"mode": "oktopk", **SHARDED}},
                optimizer="AgedAdamW",
            ),
            BenchScheme("topo-ternary", {"scheme": "topo", "sync": TERNARY}, optimizer="AgedAdamW"),
            BenchScheme("topo-radius", {"scheme": "topo", "sync": {"mode": "radius"}}),
            BenchScheme("topo-tagc", {"scheme": "topo", "sync": {"mode": "tagc", "ratio": 10}}),
            BenchScheme(
                "topo-scape",
                {"scheme": "topo", **REPLICATED, "sync": {"mode": "scape"}},
                optimizer="AdamS",
            ),
            BenchScheme(
                "node-ternary",
                {"scheme": "topo", **REPLICATED, "sync": TERNARY},
                optimizer="AgedAdamW",
            ),
            BenchScheme(
                "zero2-ternary",
                {"scheme": "topo-zero2", **REPLICATED, "sync": TERNARY},
                optimizer="AgedAdamW",
            ),
            # Muon: the optimizer is replicated between nodes.
            _synced("muon", {"mode": "dense"}, replicated=True, **MUON),
            _synced("muon-changed", {"mode": "dense"}, replicated=True, **MUON, change=1e-3),
            _synced("muon-nf4", NF4, replicated=True, **MUON),
            # What each part of topo costs in loss: nothing quantized, and the scatter inside the
            # node alone.
            BenchScheme(
                "topo-scatter4", {"scheme": "topo", "quantize": {**PLAIN, "gradients": "int4"}}
            ),
            # The sparse modes at densities at which a small model tells them apart.
            *(
                _synced(f"oktopk{word}", {"mode": "oktopk", "density": 0.02}, optimizer)
                for word, optimizer in (("", "AdamW"), ("-aged", "AgedAdamW"))
            ),
            *(
                _synced(
                    f"oktopk-{name}",
                    {"mode": "oktopk", "density": percent / 100, **sums},
                    "AgedAdamW",
                )
                for name, percent, sums in (
                    ("aged-5", 5, {}),
                    ("sharded-aged-5", 5, SHARDED),
                )
            ),
            _synced("ternary-aged", TERNARY, "AgedAdamW"),
            # In 200 steps on 8 to 48 nodes: formats with feedback, Radius, and dense or denser
            # steps at the beginning.
            _synced("sync-nf4", NF4),
            _synced("radius-paper", {**RADIUS, "interval": 25, "start": 30}),
            _synced(
                "oktopk-warm",
                {"mode": "oktopk", "density": 0.05, **SHARDED, "start": 10, "warmup": 50},
                "AgedAdamW",
            ),
            _synced("tagc", {"mode": "tagc"}),
            _synced("tagc-10", {"mode": "tagc", "ratio": 10}),
            _synced("radius", RADIUS),
            _synced("adams", {"mode": "dense"}, "AdamS", replicated=True),
            _synced(
                "scape", {"mode": "scape", "density": 0.1, "warmup": 40}, "AdamS", replicated=True
            ),
            _synced(
                "scape-all-10",
                {"mode": "scape", "density": 0.1, "select": "all", "warmup": 30},
                "AdamS",
            ),
        )
    }
)
