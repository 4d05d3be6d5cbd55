# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One rank trains, reports and leaves in a Python without the packages of the extras. Usage:
bare.py FOLDER.
"""

from __future__ import annotations

import sys

EXTRAS = ("rich", "typer", "matplotlib")
sys.modules |= dict.fromkeys(EXTRAS)  # type: ignore[arg-type]  # to import one raises ModuleNotFoundError

import deepspeed  # noqa: E402
import torch  # noqa: E402

import zero_topo  # noqa: E402


class Tokens(torch.nn.Module):
    """Reads token ids, as a language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of guessing each token from itself."""
        return torch.nn.functional.cross_entropy(
            self.head(self.embedding(ids)).flatten(0, 1), ids.flatten()
        )


if __name__ == "__main__":
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "zero_topo": {"scheme": "zero3", "report": sys.argv[1]},
    }
    model = Tokens()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for _ in range(3):
        engine.backward(engine(torch.randint(64, (2, 16))))
        engine.step()
    print(zero_topo.stats(engine))
    zero_topo.leave()
