# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed script that knows nothing of zero_topo. Usage: plain.py CONFIG.json MEETING_DIRECTORY."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch

from tests.e2e.programs.meeting import meet

if __name__ == "__main__":
    meet(Path(sys.argv[2]))
    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
    print(f"trains with {type(engine.optimizer).__name__}", flush=True)
    torch.distributed.barrier()
    os._exit(0)  # torch may abort when Python ends while gloo's threads still hold tensors
