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
from functools import partial
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
from zero_topo.observe.tables import pace_words, render
from zero_topo.units import format_seconds

LINES = 12  # of progress, about this many
PROMPT = b"def "
EVALUATION_SEED = 1_000_000  # evaluation draws the same windows every time


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--deepspeed_config` and `--local_rank` are DeepSpeed's own."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on source code.")
    parser.add_argument(
        "--data", type=Path, help="text file or folder; default: Python's standard library"
    )
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default 150)")
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
    if args.eval_every < 2:
        parser.error(
            f"--eval-every {args.eval_every} is below 2: the report wants a step with no "
            "evaluation before it"
        )
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
    schedule = partial(warm_up_and_cosine, args.steps, args.warmup)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
    )
    return Run(args, config, corpus, engine, dist.get_rank(), dist.get_world_size())


def warm_up_and_cosine(steps: int, warmup: int, step: int) -> float:
    """The factor of the learning rate at a step: a linear warm-up, then a cosine down to a
    tenth.
    """
    done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    return min(1.0, (step + 1) / max(1, warmup)) * (0.55 + 0.45 * math.cos(math.pi * done))


def train(run: Run, log: Path | None, first: int) -> None:
    """Take optimizer steps from `first` on; `log` is the run's folder, on rank 0 alone."""
    args = run.args
    engine = run.engine
    if (
        engine.device.type == "cpu"
        and engine.bfloat16_enabled()
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        # torch 2.13 on an EPYC: 1 to 7 GFLOP/s per core in BF16, 37 to 54 in FP32
        print(
            "This processor has no AVX-512: BF16 takes about ten times as long. For a short run, "
            "give --steps 15."
        )
    accumulation = engine.gradient_accumulation_steps()
    start_s = time.perf_counter()
    for step in range(first, args.steps):
        began = time.perf_counter()
        losses = []
        for number in range(step * accumulation, (step + 1) * accumulation):
            loss = engine(*run.micro_batch(run.corpus.train, args.seed, number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = run.mean(torch.stack(losses).mean())
        seconds = time.perf_counter() - began
        stats = zero_topo.stats(engine) if "zero_topo" in run.config else None
        pace = {} if stats is None else stats.pace
        log_step(log, step + 1, mean, engine.get_lr()[0], seconds, stats and stats.step_bytes, pace)
        if is_due(step + 1, first, args.steps):
            place = f"step {step + 1:>{len(str(args.steps))}}/{args.steps}"
            words = (
                place,
                f"loss {mean:.3f}",
                format_seconds(time.perf_counter() - start_s),
                pace_words(pace),
            )
            print("  ".join(filter(None, words)), flush=True)
        if (step + 1) % args.eval_every == 0 and step + 1 < args.steps:
            print(
                f"step {step + 1}: evaluation loss "
                f"{log_evaluation(log, step + 1, evaluate(run)):.3f}",
                flush=True,
            )


def is_due(step: int, first: int, total: int) -> bool:
    """Return whether a line of progress is due after a step: after the first, the last, and now and
    then between.
    """
    return step in (first + 1, total) or step % max(1, (total - first) // LINES) == 0


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
