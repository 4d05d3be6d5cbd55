# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""PyTorch's FSDP2 with this project's collectives and optimizer shards, without DeepSpeed."""

from zero_topo.fsdp.api import attach, fully_shard, shard_mesh, shard_optimizer
from zero_topo.fsdp.optimizer import ShardedOptimizer
from zero_topo.fsdp.stats import report, stats

__all__ = [
    "ShardedOptimizer",
    "attach",
    "fully_shard",
    "report",
    "shard_mesh",
    "shard_optimizer",
    "stats",
]
