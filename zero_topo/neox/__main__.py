# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m zero_topo.neox``; wrong input ends with one line per problem and
exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zero_topo.cli.output import plain_output
from zero_topo.doctor.refusals import unasked
from zero_topo.neox.check import check
from zero_topo.strict import cut

WRONG_INPUT = 2
FRONTIER_STEP = "-c7 --gpus-per-task=1 --gpu-bind=closest"


@plain_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    options = parser().parse_args(argv)
    try:
        if options.ranks is not None and options.ranks < 1:
            raise ValueError(f"--ranks {options.ranks}: give a whole number of at least 1")
        if options.command == "check":
            print(check(options))
            if (note := unasked()) is not None:
                print(f"- {note}")
        elif options.command == "launch":
            from zero_topo.neox.launch import launch

            return launch(options)
        else:
            from zero_topo.neox.train import train

            train(options)
        return 0
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"zero_topo.neox: {cut(line)}", file=sys.stderr)
        return WRONG_INPUT


def parser() -> argparse.ArgumentParser:
    """Return the parser of all three commands; options that a command lacks have their defaults."""
    whole = argparse.ArgumentParser(
        prog="python -m zero_topo.neox", description="GPT-NeoX with zero_topo."
    )
    whole.set_defaults(cpu=False, dry_run=False, plain=False, srun=None, megatron_config=None)
    commands = whole.add_subparsers(dest="command", required=True)
    check_ = commands.add_parser(
        "check", help="validate the configs; imports neither NeoX nor torch"
    )
    launch_ = commands.add_parser("launch", help="start a run, by DeepSpeed's launcher or by srun")
    train_ = commands.add_parser("train", help="what each rank runs")
    for command in (check_, launch_, train_):
        command.add_argument(
            "configs", nargs="*" if command is train_ else "+", metavar="CONFIG.yml"
        )
        command.add_argument(
            "--neox-path", default=os.environ.get("NEOX_PATH"), help="checkout; default: NEOX_PATH"
        )
        command.add_argument(
            "--ranks", type=int, help="ranks of all nodes; default: the launcher's number"
        )
    for command in (launch_, train_):
        command.add_argument("--cpu", action="store_true", help="train on CPUs, over gloo")
    launch_.add_argument(
        "--dry-run", action="store_true", help="print the command instead of running it"
    )
    launch_.add_argument(
        "--plain", action="store_true", help="without the zero_topo block: the baseline to compare"
    )
    launch_.add_argument(
        "--srun",
        nargs="?",
        const=FRONTIER_STEP,
        type=_srun_options,
        metavar="OPTIONS",
        help=f'start by srun with these options (default "{FRONTIER_STEP}", Frontier\'s) rather '
        "than by DeepSpeed",
    )
    train_.add_argument(
        "--megatron_config", help="base64 of NeoX's arguments, as `launch` writes them"
    )
    train_.add_argument("--deepspeed_config", help="accepted and left to NeoX's autotuning")
    return whole


def _srun_options(text: str) -> str:
    # Argparse gives --srun the word after it, mostly a config
    if text and not text.startswith("-"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no option of srun; put the configs before --srun"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
