# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m zero_topo.neox``; wrong input ends with one line per problem and
exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zero_topo.neox.check import check
from zero_topo.strict import cut

WRONG_INPUT = 2
OF_CHECK = ("ranks", "machine", "model")
"""Options of ``zero-topo check``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    options = parser().parse_args(argv)
    try:
        if options.command == "check":
            given = {name: getattr(options, name) for name in OF_CHECK}
            words = [f"--{name}={value}" for name, value in given.items() if value is not None]
            return check(options.configs, words)
        from zero_topo.neox import train

        if options.command == "launch":
            train.launch(options.configs, options.neox_path)
        else:
            train.train(options.configs, options.neox_path)
        return 0
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"zero_topo.neox: {cut(line)}", file=sys.stderr)
        return WRONG_INPUT


def parser() -> argparse.ArgumentParser:
    """Return the parser of all three commands."""
    whole = argparse.ArgumentParser(
        prog="python -m zero_topo.neox", description="GPT-NeoX with zero_topo."
    )
    commands = whole.add_subparsers(dest="command", required=True)
    check_ = commands.add_parser("check", help="zero-topo check for the YAML's DeepSpeed config")
    launch = commands.add_parser("launch", help="start a run by NeoX's own launcher, deepy.py")
    train = commands.add_parser("train", help="what each rank runs, under any launcher")
    for command in (check_, launch, train):
        command.add_argument("configs", nargs="+", metavar="CONFIG.yml")
    for name in OF_CHECK:
        check_.add_argument(f"--{name}", help="as zero-topo check takes it")
    for command in (launch, train):
        command.add_argument(
            "--neox-path", default=os.environ.get("NEOX_PATH"), help="checkout; default: NEOX_PATH"
        )
    return whole


if __name__ == "__main__":
    sys.exit(main())
