# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_hugging_face.py`` runs: the Accelerate example plain, with zero_topo, and loaded; see there.

Started as ``hf_accelerate.py FOLDER``, which takes the states, the weights and ``accelerate.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zero_topo
from zero_topo.examples.hf_accelerate import Run, start
from zero_topo.examples.hf_model import deepspeed_config, join
from zero_topo.examples.process import leave

STEPS, SAVED = 20, 10


def saved_differs(run: Run, folder: Path) -> float:
    """Largest difference between the engine's weights and those that ``save_model`` writes."""
    run.accelerator.save_model(run.model, str(folder))
    run.accelerator.wait_for_everyone()
    saved, worst = load_file(folder / "model.safetensors"), 0.0
    for name, parameter in run.accelerator.unwrap_model(run.model).named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            worst = max(worst, float((saved[name] - parameter.detach()).abs().max()))
    return worst


def topo(folder: Path) -> dict[str, Any]:
    """Twenty steps with the state saved in the middle, and the last ten again from there in a new engine."""
    run = start(deepspeed_config(None))
    losses = run.train(0, SAVED)
    run.accelerator.save_state(str(folder / "state"))
    losses += run.train(SAVED, STEPS)
    result = {"losses": losses, "topo": zero_topo.stats(run.model).steps, "saved": saved_differs(run, folder)}
    run.accelerator.free_memory()
    run = start(deepspeed_config(None))
    torch.manual_seed(1)
    run.accelerator.load_state(str(folder / "state"))
    result["resumed"] = run.train(SAVED, STEPS)
    run.accelerator.free_memory()
    return result


def main(folder: Path) -> None:
    """Three runs; rank 0 writes what came of them."""
    join()
    run = start(deepspeed_config(None, plain=True))
    plain = run.train(0, STEPS)
    run.accelerator.free_memory()
    found = {"plain": plain, **topo(folder)}
    if dist.get_rank() == 0:
        (folder / "accelerate.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
