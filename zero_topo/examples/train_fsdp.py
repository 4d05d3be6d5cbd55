# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Train the example's GPT on PyTorch's FSDP2, without DeepSpeed: the lines with ``topo`` are all
that FSDP2 lacks.

    torchrun --nproc-per-node 4 zero_topo/examples/train_fsdp.py --nodes 2

Four CPU ranks emulate two nodes of two GPUs. On GPUs, leave ``--nodes`` out: the ranks find the
machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zero_topo
import zero_topo.fsdp as topo
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT
from zero_topo.examples.process import behave

LAYERS = 2
WIDTH = 64
CONTEXT = 32
MICRO_BATCHES = 2  # of an optimizer step


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on FSDP2.")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument(
        "--q4", action="store_true", help="send gradients and weights between nodes in 4 bits"
    )
    parser.add_argument("--nodes", type=int, help="emulate so many nodes on the CPU")
    parser.add_argument("--data", type=Path, help="a text file; by default Python's own library")
    parser.add_argument("--checkpoint", type=Path, help="a folder to resume from and to save to")
    parser.add_argument("--report", type=Path, help="a folder for the report")
    return parser.parse_args()


def block_of(args: argparse.Namespace) -> dict[str, Any]:
    """The ``zero_topo`` block: which ranks share what, and what is quantized."""
    block: dict[str, Any] = {"scheme": "topo"}
    if args.q4:
        block["sync"] = {"mode": "quantized"}
        block["quantize"] = {"publish": "int4"}
    if args.nodes:
        gpus = dist.get_world_size() // args.nodes
        machine = {"nodes": args.nodes, "gpus_per_node": gpus, "gcds_per_gpu": 1}
        block["topology"] = {"emulated": machine}
    return block


def main() -> None:
    """Train, save, and report."""
    args = arguments()
    behave()
    dist.init_process_group()
    torch.manual_seed(0)  # every rank begins with the same weights
    model: Any = GPT(LAYERS, WIDTH, context=CONTEXT)
    topo.fully_shard(model, block_of(args))
    optimizer = topo.shard_optimizer(torch.optim.AdamW, model, lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    if args.checkpoint is not None and args.checkpoint.exists():
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    corpus = Corpus.load(args.data, CONTEXT)
    for step in range(args.steps):
        total = torch.zeros(())
        for number in range(MICRO_BATCHES):
            place = step * MICRO_BATCHES + number
            tokens, targets = batch(corpus.train, (4, CONTEXT), 0, place, dist.get_rank())
            # FSDP2's own call: gradients cross nodes in the last backward pass of a step alone.
            model.set_is_last_backward(number == MICRO_BATCHES - 1)
            loss = model(tokens, targets) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        dist.all_reduce(total)
        mean = float(total) / dist.get_world_size()
        print(f"step {step + 1}: loss {mean:.4f}, gradient norm {float(norm):.3f}")
    print(topo.stats(optimizer))
    if args.checkpoint is not None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=args.checkpoint)
    if args.report is not None:
        topo.report(optimizer, args.report)
    zero_topo.leave()


if __name__ == "__main__":
    main()
