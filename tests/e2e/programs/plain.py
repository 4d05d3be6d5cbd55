# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed script that knows nothing of zero_topo. Usage: plain.py CONFIG.json
MEETING_DIRECTORY.

``{rank}`` in the config's name stands for the rank.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import deepspeed
import torch

PATIENCE_S = 120.0


def meet(directory: Path) -> None:
    """Wait until every rank is here: files stand for ranks.

    Raises:
        TimeoutError: if they do not all come.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / os.environ["RANK"]).touch()
    deadline = time.monotonic() + PATIENCE_S
    while len(list(directory.iterdir())) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"only {sorted(path.name for path in directory.iterdir())} came to {directory}"
            )
        time.sleep(0.02)


if __name__ == "__main__":
    meet(Path(sys.argv[2]))
    model = torch.nn.Linear(4, 4)
    config = sys.argv[1].format(rank=os.environ["RANK"])
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.distributed.barrier()
    os._exit(0)  # torch may abort when Python ends while gloo's threads still hold tensors
