# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT with DeepSpeed ZeRO-3, sharded as the JSON's "zero_topo" block says.

    deepspeed --no_local_rank --num_accelerators 8 zero_topo/examples/train_gpt.py
    --deepspeed_config configs/demo.json

Only ``import zero_topo``, the report and ``leave()`` are zero_topo's; all else is plain DeepSpeed.
A JSON without the block trains with unmodified ZeRO-3.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zero_topo
from zero_topo.config import load_deepspeed_config
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT
from zero_topo.examples.process import behave
from zero_topo.observe.runlog import log_evaluation, log_step, new_run_folder
from zero_topo.observe.tables import render
from zero_topo.units import format_seconds

LINES = 12  # of progress, about this many, where the output is no terminal
BAR = 20  # characters of the bar on a terminal
EVALUATION_SEED = 1_000_000  # every evaluation draws the same windows
EVALUATION_BATCHES = 4


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--deepspeed_config` and `--local_rank` are DeepSpeed's own."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on source code.")
    add = parser.add_argument
    add("--data", type=Path, help="text file or folder; default: Python's standard library")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=150, help="optimizer steps (default 150)")
    length.add_argument(
        "--seconds", type=float, help="train as many steps as fit, by the time of the warm-up's"
    )
    add("--warmup", type=int, default=10, help="steps until the full learning rate (default 10)")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--context", type=int, default=64, help="bytes the model sees (default 64)")
    add("--seed", type=int, default=0)
    add("--save", type=Path, help="folder for a checkpoint at the end")
    add("--resume", type=Path, help="folder of the checkpoint to go on from")
    add("--run-dir", type=Path, help="folder for the report (default runs/<config>-<time>)")
    add("--local_rank", "--local-rank", type=int, default=-1, help=argparse.SUPPRESS)
    args = deepspeed.add_config_arguments(parser).parse_args(argv)
    if args.deepspeed_config is None:
        parser.error("give a DeepSpeed JSON: --deepspeed_config configs/demo.json")
    if args.seconds is not None:
        if args.warmup < 2 or args.resume is not None:
            parser.error(
                "--seconds times the warm-up of a new run, 2 steps or more: give --steps instead"
            )
        args.steps = math.inf  # until the end of the warm-up
    return args


@dataclass(frozen=True)
class Run:
    """The objects that the parts of a run share."""

    args: argparse.Namespace
    corpus: Corpus
    engine: Any

    def loss(self, text: torch.Tensor, seed: int, number: int) -> torch.Tensor:
        """Return the loss of this rank's micro-batch with the given number."""
        shape = self.engine.train_micro_batch_size_per_gpu(), self.args.context
        tokens, targets = batch(text, shape, seed, number, dist.get_rank())
        loss: torch.Tensor = self.engine(
            tokens.to(self.engine.device), targets.to(self.engine.device)
        )
        return loss

    def mean(self, losses: list[torch.Tensor]) -> float:
        """Return the mean of losses over ranks."""
        total = torch.stack(losses).float().mean()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


def start(args: argparse.Namespace) -> Run:
    """Load the data, build the model and hand it to DeepSpeed.

    Raises:
        ValueError: for wrong settings, before a process group exists.
    """
    config = load_deepspeed_config(args.deepspeed_config)
    corpus = Corpus.load(args.data, args.context)
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, context=args.context)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warm_up_and_cosine(args.steps, args.warmup, step)
        ),
    )
    return Run(args, corpus, engine)


def warm_up_and_cosine(steps: float, warmup: int, step: int) -> float:
    """The factor of the learning rate at a step: a linear warm-up, then a cosine down to a
    tenth.
    """
    done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    return min(1.0, (step + 1) / max(1, warmup)) * (0.55 + 0.45 * math.cos(math.pi * done))


def train(run: Run, log: Path | None, first: int) -> None:
    """Take optimizer steps from `first` on; `log` is the run's folder, on rank 0 alone."""
    args = run.args
    engine = run.engine
    accumulation = engine.gradient_accumulation_steps()
    times_s = [time.perf_counter()]
    step = first
    while step < args.steps:
        losses = []
        for number in range(step * accumulation, (step + 1) * accumulation):
            loss = run.loss(run.corpus.train, args.seed, number)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = run.mean(losses)
        step += 1
        times_s.append(time.perf_counter())
        stats = zero_topo.stats(engine) if "zero_topo" in engine.config else None
        sent = stats and stats.step_bytes
        log_step(log, step, mean, engine.get_lr()[0], times_s[-1] - times_s[-2], sent)
        if step == args.warmup and args.seconds is not None:
            args.steps = steps_that_fit(times_s, args.seconds, engine.device)
        words = f"loss {mean:.3f}  {format_seconds(times_s[-1] - times_s[0])}"
        show_progress(first, step, args.steps, words)


def steps_that_fit(times_s: list[float], seconds: float, device: torch.device) -> int:
    """Return the optimizer steps that fit into ``seconds``, at least one more than there were.

    Args:
        times_s: when the run began, and when each step ended. The first step takes longer than
            others. Clocks differ: those of rank 0 decide for all ranks.
        seconds: of the whole run.
        device: of the ranks' messages.
    """
    begin_s, first_s, *_, last_s = times_s
    steps = len(times_s) - 1
    step_s = (last_s - first_s) / (steps - 1)
    more = int((seconds - (last_s - begin_s)) / step_s)
    decided = torch.tensor(steps + max(1, more), device=device)
    dist.broadcast(decided, src=0)
    return int(decided)


def show_progress(first: int, step: int, total: float, words: str) -> None:
    """Redraw a bar on a terminal; elsewhere print a line after some of the steps.

    Args:
        first: steps before this run.
        step: steps so far.
        total: steps at the end, infinite while that is open.
        words: what to show next to it.
    """
    known = math.isfinite(total)
    line = f"step {step}/{total if known else '?'}  {words}"
    if sys.stdout.isatty():
        bar = "#" * int(BAR * step / total)
        print(f"\r\x1b[K[{bar:<{BAR}}] {line}", end="\n" * (step == total), flush=True)
        return
    every = (int(total - first) // LINES or 1) if known else 1
    if step in (first + 1, total) or step % every == 0:
        print(line, flush=True)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss in nats per byte over ranks, on text the training never sees."""
    run.engine.eval()
    text = run.corpus.evaluation
    losses = [run.loss(text, EVALUATION_SEED, number) for number in range(EVALUATION_BATCHES)]
    run.engine.train()
    return run.mean(losses)


def main() -> None:
    """Build the model and the engine, train, evaluate, save and report."""
    behave()
    if not torch.cuda.is_available():
        # It serves inference alone, and compiling it would be most of the demo's set-up
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    args = parse_arguments()
    try:
        run = start(args)
    except ValueError as error:
        sys.exit(f"train_gpt: {error}")
    first = 0
    if args.resume is not None:
        path, client = run.engine.load_checkpoint(args.resume)
        if path is None or client["step"] >= args.steps:
            sys.exit(
                f"train_gpt: --resume {args.resume} has no checkpoint of fewer than {args.steps} "
                "steps: give the folder that --save wrote, and more --steps"
            )
        first = client["step"]
    folder = args.run_dir or new_run_folder(Path(args.deepspeed_config).stem)
    log = folder if dist.get_rank() == 0 else None
    train(run, log, first)
    if args.save is not None:
        run.engine.save_checkpoint(args.save, client_state={"step": args.steps})
    log_evaluation(log, args.steps, evaluate(run))
    title = f"Byte-level GPT, {len(run.corpus.train):,} bytes of text"
    zero_topo.report(run.engine, folder, title, vars(args))
    if log:
        print(render(log))
    zero_topo.leave()


if __name__ == "__main__":
    main()
