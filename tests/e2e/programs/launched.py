# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a rank sees of its job: `launched.py FOLDER [PRESET]` writes `FOLDER/RANK.json`."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from zero_topo.engine.agreement import gather_placements
from zero_topo.topology import resolve_topology

setting = sys.argv[2] if len(sys.argv) > 2 else "auto"
dist.init_process_group("gloo")
rank = dist.get_rank()
placements = gather_placements(torch.device("cpu"))
topology = resolve_topology(setting, dist.get_world_size(), placements)
seen = {
    "env": dict(os.environ),
    "host": socket.gethostname(),
    "topology": topology.to_json(),
    "place": topology.coordinates(rank),
}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
dist.barrier()
dist.destroy_process_group()
