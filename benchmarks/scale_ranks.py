# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each real rank of ``benchmarks scale`` runs: a step in DeepSpeed's engine, stock or ours,
counted alike.

Note [What DeepSpeed's engine adds]
    The model is a chain of matrices, each a parameter. What plain PyTorch launches for its forward
    and backward pass, and for AdamW on as many tensors as DeepSpeed steps, is counted first and
    subtracted: what is left gathers, scatters and publishes, measures the gradients' norm and
    checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import zero_topo
from benchmarks.control import Control
from benchmarks.counting import Counts, Launches
from zero_topo.examples.process import behave
from zero_topo.leaving import leave
from zero_topo.quant.operators import select

WIDTH = 64
WARM_UP = 3
Step = Mapping[str, Callable[[], Any]]


def prepare() -> None:
    """Load the kernels once for all ranks."""
    select(torch.device("cpu"))


def measure_all(settings: dict[str, Any], control: Control) -> None:
    """Count every job of the settings; the program of ``benchmarks scale``."""
    behave()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    control.send_results(settings["jobs"], partial(measure, settings["params"]))
    leave()


def measure(params: int, job: dict[str, Any]) -> dict[str, Any]:
    """Launches and host syncs of a step by pass, beyond those of plain PyTorch, and these."""
    launches = Launches()
    engine, *_ = zero_topo.initialize(model=_model(params), config=config(job["block"], params))
    plain = _counted(Launches(), _plain_step(_model(params)))
    added = _counted(launches, _engine_step(engine))
    engine.destroy()
    differences = {
        phase: {kind: count - _kinds(plain[phase])[kind] for kind, count in _kinds(counts).items()}
        for phase, counts in added.items()
    }
    own = {phase: _kinds(counts) for phase, counts in plain.items()}
    return {
        "scheme": job["scheme"],
        "ranks": dist.get_world_size(),
        "phases": differences,
        "plain": own,
    }


def config(block: Mapping[str, Any] | None, params: int) -> dict[str, Any]:
    """DeepSpeed's, as the other benchmarks have it: BF16, AdamW, clipping; all gradients in one
    bucket.
    """
    zero = {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": params * WIDTH**2,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    }
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
    }
    return made if block is None else {**made, "zero_topo": dict(block)}


def _kinds(counts: Counts) -> dict[str, int]:
    return {
        kind: getattr(counts, kind) for kind in ("operations", "kernels", "collectives", "syncs")
    }


def _model(params: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(params))).bfloat16()


def _engine_step(engine: Any) -> Step:
    return _step(engine, engine.backward, engine.step)


def _plain_step(model: nn.Module) -> Step:
    flat = nn.Parameter(torch.zeros(1))
    flat.grad = torch.zeros(1)
    optimizer = torch.optim.AdamW([flat])
    return _step(model, lambda loss: loss.backward(), optimizer.step)


def _step(
    model: Callable[..., Any], backward: Callable[[Any], Any], update: Callable[[], Any]
) -> Step:
    losses = []
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    return {
        "forward": lambda: losses.append(model(x).sum()),
        "backward": lambda: backward(losses.pop()),
        "step": update,
    }


def _counted(launches: Launches, step: Step) -> Mapping[str, Counts]:
    for _ in range(WARM_UP + 1):
        launches.phases.clear()
        for name, do in step.items():
            with launches.phase(name):
                do()
    return launches.phases
