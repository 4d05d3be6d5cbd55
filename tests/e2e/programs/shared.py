# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the programs of other trainers share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zero_topo

STEPS = 6
TREE = {
    "topology": {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 2}},
    "scheme": "topo",
}
FULL = {"weights": None, "secondary": None, "gradients": None}
BLOCKS = {"plain": None, "topo": {**TREE, "quantize": FULL}, "default": TREE}
"""By name: stock ZeRO-3, unquantized, the defaults."""


def finish(path: Path, found: dict[str, Any]) -> None:
    """Rank 0 writes what came of the runs, and all leave."""
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    zero_topo.leave()


def steps_of_engine(engine: Any) -> int | None:
    """Steps of zero_topo's engine; None if it is a stock one."""
    try:
        return zero_topo.stats(engine).steps
    except ValueError:
        return None
