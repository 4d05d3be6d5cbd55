# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a rank sees of its job: `launched.py FOLDER` writes `FOLDER/RANK.json` (no torch)."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from zero_topo.topology import discover

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
topology = discover(os.environ, lambda: (None, ()))
seen = {
    "env": {
        name: os.environ.get(name)
        for name in (*NAMES, "FI_MR_CACHE_MONITOR", "SLURM_CPU_BIND_LIST")
    },
    "host": socket.gethostname(),
    "topology": topology.to_json(),
    "place": topology.coordinates(int(os.environ["RANK"])),
}
Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
