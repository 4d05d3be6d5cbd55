# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""FSDP2 on ranks that are processes: the example, and torchtitan's model with its own parallelize
function.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import zero_topo.fsdp as topo
from tests.harness import run_threads
from tests.launching import ROOT, LaunchSettings, free_port, output, succeeded

EXAMPLE = "zero_topo/examples/train_fsdp.py"
MACHINE = {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 2}}
EXACT: dict[str, Any] = {
    "topology": MACHINE,
    "scheme": "paper",
    "quantize": {"weights": None, "gradients": None},
}


def launched(ranks: int, program: str, folder: Path) -> None:
    """Run a program on some ranks that torchrun starts."""
    words = ["--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    words += [f"tests/e2e/programs/{program}.py", str(folder)]
    output([sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT, timeout=300)


@pytest.mark.long
def test_leave_waits_for_an_asynchronous_checkpoint(tmp_path: Path) -> None:
    """And for executors and threads, on all ranks: their collectives come before its barrier."""
    launched(2, "leaves", tmp_path)
    names = {f"{name}{rank}" for name in ("pool", "thread") for rank in range(2)}
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", *names}
    state: dict[str, Any] = {"weight 1": torch.zeros(1000), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert torch.equal(state["weight 1"], torch.ones(1000)) and state["step"] == 3


def trained(logs: Path, ranks: int, *words: str) -> list[float]:
    """The losses that the example prints."""
    command = [EXAMPLE, *words, "--data", "LICENSE"]
    printed = succeeded(command, LaunchSettings(logs, ranks, forked=True)).log(0)
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--q4",), marks=pytest.mark.long)], ids=["paper", "q4"]
)
def test_the_example_trains_and_resumes_on_half_the_ranks(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """Two nodes of two ranks over gloo, then two nodes of one from the checkpoint; the report has
    all ranks' bytes.
    """
    common = [
        "--nodes",
        "2",
        "--checkpoint",
        str(tmp_path / "saved"),
        "--report",
        str(tmp_path / "report"),
        *words,
    ]
    first = trained(tmp_path / "first", 4, "--steps", "6", *common)
    report = json.loads((tmp_path / "report" / "report.json").read_text())["zero_topo"]
    assert report["ranks"] == 4
    assert all(row["min"] == row["max"] == row["formula"] for row in report["sent"] if row["max"])
    assert first[-1] < first[0] - 0.1
    again = trained(tmp_path / "again", 2, "--steps", "2", *common)
    assert again[0] < first[0] - 0.1


@pytest.mark.long
def test_accelerate_trains_a_prepared_model(tmp_path: Path) -> None:
    """Accumulation, clipping, saving and loading by accelerate, on two nodes of two ranks: losses,
    norms and weights as of accelerate's own FSDP2.
    """
    launched(4, "accelerate_fsdp2", tmp_path)


def titan(rank: int, block: dict[str, Any] | None) -> list[float]:
    """Losses of torchtitan's debug model, sharded by its own function; plain FSDP2 over all ranks
    without a block.

    Its attention, FlexAttention, has no backward pass on CPUs: its ``ScaledDotProductAttention``
    takes the place. Our mesh takes the place of its trainer's, and as in its trainer the loss is
    divided by the tokens of all ranks.
    """
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs, parallelize_llama

    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model: Any = config.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            drawn = 0.02 * torch.randn(param.shape, generator=generator)
            param.copy_(drawn if param.dim() > 1 else torch.ones_like(param))
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,)) if block is None else topo.shard_mesh(block)
    off = dict.fromkeys(("cp_enabled", "tp_enabled", "pp_enabled", "dp_replicate_enabled"), False)
    parallelize_llama(
        model,
        parallel_dims=SimpleNamespace(**off, get_mesh=lambda names: mesh),
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    optimizer: torch.optim.Optimizer
    if block is None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The threads' groups have no weighted sum
                module.set_force_sum_reduction_for_comms(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = topo.shard_optimizer(
            torch.optim.AdamW, topo.attach(model, block, divisor=1), lr=1e-3
        )
    losses = []
    for step in range(3):
        tokens = torch.randint(
            0, 2048, (2, 33), generator=torch.Generator().manual_seed(100 * step + rank)
        )
        logits = model(tokens[:, :-1], positions=torch.arange(32).expand(2, -1))
        summed = nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        loss = summed / (64 * world)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


@pytest.mark.long
def test_torchtitans_model_trains_as_under_plain_fsdp2() -> None:
    """Its Llama, sharded by its own parallelize function, and attached: losses of plain FSDP2 over
    all ranks.
    """
    pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    expected = run_threads(4, titan, None, timeout=300)[0]
    assert run_threads(4, titan, EXACT, timeout=300)[0] == pytest.approx(expected, abs=1e-5)
    quantized = run_threads(4, titan, {**EXACT, "quantize": {}}, timeout=300)[0]
    assert quantized == pytest.approx(expected, abs=0.05)
