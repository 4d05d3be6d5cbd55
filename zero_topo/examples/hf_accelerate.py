# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Train a small Llama in a loop of one's own with Hugging Face's Accelerate; see hf_trainer.py.

    deepspeed --no_local_rank --num_accelerators 8 zero_topo/examples/hf_accelerate.py --steps 20

--save FOLDER keeps the state, to go on from, and the weights.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, set_seed
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader

import zero_topo
from zero_topo.examples.hf_model import Windows, deepspeed_config, join, llama
from zero_topo.examples.process import behave


@dataclass(frozen=True)
class Run:
    """An Accelerator with what it prepared."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    batches: DataLoader[Any]

    def train(self, first: int, end: int) -> list[float]:
        """Optimizer steps ``first .. end - 1``; loss by step, mean over ranks."""
        losses = []
        batches = iter(self.accelerator.skip_first_batches(self.batches, first))
        for _ in range(first, end):
            loss = self.model(**next(batches)).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(self.accelerator.gather(loss.detach()).mean()))
        return losses


def start(config: dict[str, Any]) -> Run:
    """Build and prepare everything under a DeepSpeed config."""
    AcceleratorState._reset_state()  # an earlier run of this process had another config
    backend = get_accelerator().communication_backend_name()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        # Accelerate would find none on a CPU
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
    )
    set_seed(0)
    model = llama()
    batches = DataLoader(Windows(4096), batch_size=4)
    optimizer = DummyOptim(model.parameters(), lr=1e-3)  # the config names the real one
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    return Run(accelerator, model, optimizer, batches)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description="Train a small Llama with Hugging Face's Accelerate."
    )
    parser.add_argument("--deepspeed_config", help="DeepSpeed JSON; default: this example's own")
    parser.add_argument("--plain", action="store_true", help='drop the config\'s "zero_topo" block')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--save", type=Path, help="folder for the state, and for the weights in safetensors"
    )
    args = parser.parse_args()
    behave()
    join()
    run = start(deepspeed_config(args.deepspeed_config, args.plain))
    losses = run.train(0, args.steps)
    if args.save is not None:
        run.accelerator.save_state(str(args.save / "state"))
        run.accelerator.save_model(run.model, str(args.save / "weights"))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    zero_topo.leave()


if __name__ == "__main__":
    main()
