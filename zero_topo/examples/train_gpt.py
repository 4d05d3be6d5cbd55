# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT under ZeRO-3, laid out over the machine as the JSON's "zero_topo" block
says.

    deepspeed --no_local_rank --num_accelerators 8 zero_topo/examples/train_gpt.py
    --deepspeed_config configs/demo.json

To zero_topo belong the import and the report at the end; all else is plain DeepSpeed, and a JSON
without the block trains with stock ZeRO-3. In order: arguments, data, engine, steps, evaluation, a
sample of text, the report.
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
from zero_topo.examples.gpt import GPT, sample
from zero_topo.examples.process import behave
from zero_topo.observe.runlog import log_evaluation, log_step, new_run_folder
from zero_topo.observe.tables import render
from zero_topo.units import format_seconds

LINES = 12  # of progress, about this many, where the output is no terminal
BAR = 20  # characters of the bar on a terminal
FOR_STEPS = 0.9  # of --seconds: evaluations take about a tenth
PROMPT = b"def "
EVALUATION_SEED = 1_000_000  # evaluation draws the same windows every time


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--deepspeed_config` and `--local_rank` are DeepSpeed's own."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on source code.")
    parser.add_argument(
        "--data", type=Path, help="text file or folder; default: Python's standard library"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=150, help="optimizer steps (default 150)")
    length.add_argument(
        "--seconds", type=float, help="train as many steps as fit, by the time of the warm-up's"
    )
    parser.add_argument(
        "--warmup", type=int, default=10, help="steps until the full learning rate (default 10)"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64, help="bytes the model sees (default 64)")
    parser.add_argument(
        "--eval-every", type=int, default=25, help="steps between evaluations (default 25)"
    )
    parser.add_argument(
        "--eval-batches", type=int, default=4, help="micro-batches of each evaluation (default 4)"
    )
    parser.add_argument(
        "--sample", type=int, default=200, help="bytes of text to write at the end, 0 for none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    parser.add_argument("--resume", type=Path, help="folder of the checkpoint to go on from")
    parser.add_argument(
        "--run-dir", type=Path, help="folder for the report (default runs/<config>-<time>)"
    )
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=-1, help=argparse.SUPPRESS
    )
    args = deepspeed.add_config_arguments(parser).parse_args(argv)
    if args.deepspeed_config is None:
        parser.error(
            "--deepspeed_config is missing: give a DeepSpeed JSON such as configs/demo.json"
        )
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
    config: dict[str, Any]
    corpus: Corpus
    engine: Any
    rank: int
    world: int

    def micro_batch(
        self, text: torch.Tensor, seed: int, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's micro-batch with the given number, on the engine's device."""
        shape = (self.engine.train_micro_batch_size_per_gpu(), self.args.context)
        tokens, targets = batch(text, shape, seed, number, self.rank)
        return tokens.to(self.engine.device), targets.to(self.engine.device)

    def mean(self, value: torch.Tensor) -> float:
        """Mean of a scalar over ranks."""
        dist.all_reduce(total := value.detach().float().clone())
        return total.item() / self.world


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
    return Run(args, config, corpus, engine, dist.get_rank(), dist.get_world_size())


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
    start_s = time.perf_counter()
    first_s = 0.0
    evaluated = ""
    step = first
    while step < args.steps:
        began = time.perf_counter()
        losses = []
        for number in range(step * accumulation, (step + 1) * accumulation):
            loss = engine(*run.micro_batch(run.corpus.train, args.seed, number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = run.mean(torch.stack(losses).mean())
        seconds = time.perf_counter() - began
        step += 1
        stats = zero_topo.stats(engine) if "zero_topo" in run.config else None
        pace = {} if stats is None else stats.pace
        log_step(log, step, mean, engine.get_lr()[0], seconds, stats and stats.step_bytes, pace)
        if step == first + 1:
            first_s = time.perf_counter() - start_s
        if step == args.warmup and args.seconds is not None:
            spent_s = time.perf_counter() - start_s
            args.steps = steps_that_fit(run, step, spent_s, (spent_s - first_s) / (step - 1))
        # An evaluation's bytes count toward the step after it, and the report shows the last step
        if step % args.eval_every == 0 and step < args.steps - 1:
            evaluated = f"evaluation {log_evaluation(log, step, evaluate(run)):.3f}"
        spent = format_seconds(time.perf_counter() - start_s)
        show_progress(first, step, args.steps, [f"loss {mean:.3f}", evaluated, spent])


def steps_that_fit(run: Run, step: int, spent_s: float, step_s: float) -> int:
    """Return the optimizer steps of a run of `--seconds`, at least one more than there were.

    Args:
        run: the run.
        step: steps so far.
        spent_s: seconds so far.
        step_s: seconds of a step. Clocks differ: rank 0's measurement decides for all ranks.
    """
    more = int((FOR_STEPS * run.args.seconds - spent_s) / step_s)
    decided = torch.tensor(step + max(1, more), device=run.engine.device)
    dist.broadcast(decided, src=0)
    return int(decided)


def show_progress(first: int, step: int, total: float, words: list[str]) -> None:
    """Redraw a bar on a terminal; elsewhere print a line after some of the steps.

    Args:
        first: steps before this run.
        step: steps so far.
        total: steps at the end, infinite while that is open.
        words: what to show next to it.
    """
    known = math.isfinite(total)
    line = "  ".join(filter(None, [f"step {step}/{total if known else '?'}", *words]))
    if sys.stdout.isatty():
        bar = "#" * int(BAR * step / total)
        end = "\n" if step == total else ""
        print(f"\r\x1b[K[{bar:<{BAR}}] {line}", end=end, flush=True)
        return
    every = max(1, int(total - first) // LINES) if known else 1
    if step in (first + 1, total) or step % every == 0:
        print(line, flush=True)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss in nats per byte over ranks, on text the training never sees."""
    run.engine.eval()
    data = (
        run.micro_batch(run.corpus.evaluation, EVALUATION_SEED, i)
        for i in range(run.args.eval_batches)
    )
    losses = [run.engine(*pair) for pair in data]
    run.engine.train()
    return run.mean(torch.stack(losses).mean())


def write_sample(run: Run) -> None:
    """Rank 0 copies the gathered weights into a plain model and lets it write; the other ranks help
    to gather.
    """
    model = run.engine.module
    args = run.args
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = (
            {name: value.float().cpu() for name, value in model.state_dict().items()}
            if run.rank == 0
            else None
        )
    if weights is not None:
        plain = GPT(args.layers, args.width, context=args.context)
        plain.load_state_dict(weights)
        text = sample(plain, PROMPT, args.sample, args.seed).decode("utf-8", errors="replace")
        print(f"\n--- the model writes\n{text}\n---\n")


def main() -> None:
    """Build the model and the engine, train, evaluate, and save."""
    behave()
    args = parse_arguments()
    try:
        run = start(args)
    except ValueError as error:
        sys.exit(f"train_gpt: {error}")
    first = 0
    if args.resume is not None:
        path, client = run.engine.load_checkpoint(args.resume)
        if path is None:
            sys.exit(
                f"train_gpt: --resume {args.resume} holds no checkpoint: give the folder that "
                "--save wrote"
            )
        first = client["step"]
        if first >= args.steps:
            sys.exit(
                f"train_gpt: --resume {args.resume} has {first} steps behind it: give --steps more "
                "than that"
            )
    folder = args.run_dir or new_run_folder(Path(args.deepspeed_config).stem)
    log = folder if run.rank == 0 else None
    train(run, log, first)
    log_evaluation(log, args.steps, evaluate(run))
    if args.sample:
        write_sample(run)
    if args.save is not None:
        run.engine.save_checkpoint(args.save, client_state={"step": args.steps})
    title = f"Byte-level GPT, {len(run.corpus.train):,} bytes of text"
    zero_topo.report(run.engine, folder, title, vars(args))
    print(render(folder) if run.rank == 0 else "")
    zero_topo.leave()


if __name__ == "__main__":
    main()
