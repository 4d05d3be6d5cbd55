# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Runs that are saved half-way and taken up again, and what lies in the files: tools of the
checkpoint tests.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.launcher.training import Job, Net, Result, advance, running, start, weights

SAVED_AT = 2
STEPS = 4
TAG = "half-way"


def net(width: int = 37) -> nn.Module:
    """The harness's network with one frozen parameter."""
    model = Net(width, depth=2)
    model.inp.bias.requires_grad_(False)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest: two groups with a learning rate and a weight decay of their own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.3},
        {"params": [p for p in trained if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def job(zero_topo: dict[str, Any] | None, dtype: str = "fp32", **zero: Any) -> Job:
    """A run with much to save: two parameter groups, several sub-groups, a scheduler, frozen and
    resident parameters.

    Args:
        zero_topo: the block, or None for stock ZeRO-3.
        dtype: "fp32" or "bf16".
        zero: keys for ``zero_optimization``.
    """
    warmup = {
        "warmup_num_steps": 5,
        "warmup_min_lr": 4e-3,
        "warmup_max_lr": 1e-2,
        "warmup_type": "linear",
    }
    zero = {"sub_group_size": 250, "stage3_param_persistence_threshold": 20, **zero}
    ds = {
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": zero,
    }
    return Job(net, zero_topo, STEPS, dtype=dtype, ds=ds, groups=groups)


@dataclass(frozen=True)
class Saved:
    """A run that was saved after ``SAVED_AT`` steps and went on undisturbed.

    Attributes:
        job: the run.
        path: the directory given to ``save_checkpoint``.
        losses: of the steps after the save.
        weights: whole weights by name, when it was saved.
        result: of all steps.
    """

    job: Job
    path: Path
    losses: list[float]
    weights: dict[str, Tensor]
    result: Result


def save(run: Job, path: Path) -> Saved:
    """Train, save into ``path``, train on. Collective."""
    with running(run) as engine:
        before = advance(run, engine, 0, SAVED_AT)
        engine.save_checkpoint(str(path), tag=TAG, client_state={"note": "from the test"})
        kept = weights(engine)
        losses = advance(run, engine, SAVED_AT, run.steps)
        result = Result(before + losses, weights(engine), run.seen)
    return Saved(run, path, losses, kept, result)


@contextmanager
def loaded(run: Job, path: Path, **options: Any) -> Iterator[Any]:
    """An engine built from other random weights that has loaded the checkpoint. Collective."""
    with running(run, partial(start, seed=99)) as engine:
        found, _ = engine.load_checkpoint(str(path), **options)
        assert found is not None
        yield engine


def resume(run: Job, path: Path, **options: Any) -> list[float]:
    """Losses of the steps after the save, of a run taken up from the checkpoint."""
    with loaded(run, path, **options) as engine:
        return advance(run, engine, SAVED_AT, run.steps)


def assert_same_bits(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same names, and tensors equal bit for bit."""
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, check_dtype=False)


def files_of(path: Path, rank: int) -> dict[str, dict[str, str]]:
    """What a rank saved: file name -> place in it -> type, shape and size of what lies there."""
    found = {}
    for file in sorted((path / TAG).glob(f"*zero_pp_rank_{rank}_*.pt")):
        state = torch.load(file, weights_only=False)
        kept = {key: state[key] for key in state if key not in ("ds_config", "ds_version")}
        leaves = tree_flatten_with_path(kept)[0]
        found[file.name] = {keystr(place): describe(value) for place, value in leaves}
    return found


def describe(value: Any) -> str:
    """Type of a leaf; for a tensor also dtype, shape, and the bytes its storage takes in the
    file.
    """
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"{kind} {value.dtype} {value.shape} {value.untyped_storage().nbytes()} bytes"
    return f"{kind} {value}" if isinstance(value, torch.Size | str) else kind


def to_universal(saved: Path, universal: Path) -> None:
    """Have DeepSpeed make a universal checkpoint of a saved tag."""
    more = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
    }
    folders = {"input_folder": str(saved), "output_folder": str(universal)}
    ds_to_universal.main(Namespace(**folders, **more, inject_missing_state=False))


def common_directory(local: Path) -> Path:
    """Rank 0's directory, sent to all ranks. Collective."""
    sent = [str(local)]
    dist.broadcast_object_list(sent)
    return Path(sent[0])
