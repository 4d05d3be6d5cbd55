# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Plans for the tests that only calculate, and the files and answers of commands that plan."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.commands import Run
from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.job import Job
from zero_topo.cost.transformer import Transformer
from zero_topo.topology import Topology

BLOCK = 64
"""Values that share a scale in the tests of ranks, whose parameters are small."""

TREE = Topology("tree", nodes=2, gpus_per_node=2, ranks_per_gpu=2)
FRONTIER = Topology("frontier", nodes=48, gpus_per_node=4, ranks_per_gpu=2)
NEOX = Transformer("gpt-neox-20b", 44, 6144, 64, 50432, 2048, 4 * 6144)
GPT2 = Transformer("gpt2", 12, 768, 12, 50257, 1024, 3072, tied=True, positions=1024)


def resolve(topology: Topology = TREE, **block: Any) -> ResolvedConfig:
    """The plan of a block with these keys."""
    return resolve_config(ZeroTopoConfig.parse(block), topology)


def config_file(folder: Path, block: Any, name: str = "ds.json", **keys: Any) -> str:
    """The path of a DeepSpeed config of stage 3 in BF16 with this block and these keys."""
    stated = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    (folder / name).write_text(json.dumps({**stated, "zero_topo": block, **keys}))
    return str(folder / name)


def printed(run: Run, *words: str) -> Any:
    """What a command that succeeds in silence prints as JSON."""
    status, out, err = run(*words, "--json")
    assert (status, err) == (0, ""), err
    return json.loads(out)


def engine(*numels: int, job: Job = Job(NEOX)) -> Any:  # noqa: B008 (frozen)
    """What the hook asks of an engine whose parameters zero.Init has partitioned: none has elements
    of its own.

    Of a frozen one there are -n.
    """
    import torch

    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(
        torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) for _ in numels
    )
    for layer, n in zip(module.layers, numels, strict=True):
        width = next(width for width in (4096, 10**4, 1) if n % width == 0)
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=n > 0)
        vars(layer.weight)["ds_shape"] = torch.Size((abs(n) // width, width))
    return SimpleNamespace(
        module=module,
        train_micro_batch_size_per_gpu=lambda: 2,
        gradient_accumulation_steps=lambda: 4,
        zero_max_live_parameters=lambda: job.live,
        zero_reduce_bucket_size=lambda: job.bucket,
        zero_sub_group_size=lambda: job.sub_group,
        zero_cpu_offload=lambda: job.offload,
        fp16_enabled=lambda: job.loss_scaled,
        optimizer_name=lambda: "adamw",
    )
