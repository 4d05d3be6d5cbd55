# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sets up one process among many on a machine: which rank prints, and how many threads each
uses.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

import torch


def behave() -> None:
    """Let only rank 0 print, without DeepSpeed's info messages, and share the machine's cores among
    its ranks.
    """
    if int(os.environ.get("RANK", "0")):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process; errors still reach stderr)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19.8 calls it
    warnings.filterwarnings("ignore", ".*torch.distributed.*is deprecated", FutureWarning)
    if "OMP_NUM_THREADS" not in os.environ:
        neighbours = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))
