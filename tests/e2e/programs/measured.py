# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_measure.py`` runs: measures the machine and lets rank 0 tell what all ranks found."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zero_topo.bench.control import Control
from zero_topo.engine.measure import measure
from zero_topo.examples.process import leave


def run(settings: dict[str, Any], control: Control) -> None:
    """Measure once."""
    dist.init_process_group("gloo")
    topology = measure(torch.device("cpu"))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, topology.to_json())
    control.send({"event": "measured", "topologies": found})
    leave()
