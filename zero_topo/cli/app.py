# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The list of commands, and how wrong input ends: one line on stderr, exit status 2.

To add a command, write its function in a file of its own, with heavy imports (torch, matplotlib)
inside the function, and add it to :data:`COMMANDS`. Only the file of the command that is run is
imported, so that each starts at once.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from zero_topo.strict import cut
from zero_topo.versions import installed

COMMANDS = (
    "topology",
    "plan",
    "check",
    "report",
    "carry",
    "doctor",
    "build",
    "launch",
)

WRONG_INPUT = 2
INTERRUPTED = 128 + 2  # the shell's number for SIGINT
READER_GONE = 128 + 13  # and for SIGPIPE
# ClickException, by way of a public name: typer carries its own copy of click since 0.22.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def build(word: str = "") -> typer.Typer:
    """The application with the command that a word names, or with all if it names none."""
    app = typer.Typer(name="zero-topo", pretty_exceptions_enable=False, rich_markup_mode=None)
    # A command stays a command where it is the only one
    app.callback(invoke_without_command=True)(_common)
    for name in [word] if word in COMMANDS else COMMANDS:
        found = getattr(importlib.import_module(f"{__package__}.{name}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def _common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the versions of zero_topo, DeepSpeed and torch."),
    ] = False,
) -> None:
    """Check, plan and measure DeepSpeed ZeRO-3 training whose shards follow the machine. No command
    needs a GPU.
    """
    if version:
        ours, *others = (
            f"{name} {installed(name) or 'not installed'}"
            for name in ("zero-topo", "deepspeed", "torch")
        )
        print(f"{ours} ({', '.join(others)}, Python {platform.python_version()})")
        raise typer.Exit


def run(
    arguments: Sequence[str] | None = None,
    make: Callable[[str], typer.Typer] = build,
    program: str = "zero-topo",
) -> int:
    """Run a command line and return the exit status; ``make`` gives the application for its first
    word.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        application = make(words[0] if words else "")
        status = application(args=words or ["--help"], prog_name=program, standalone_mode=False)
    except _CommandLineError as error:
        return _complain(error.format_message())  # type: ignore[attr-defined]
    except BrokenPipeError:  # the reader, such as head, has seen enough; spare the flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (ValueError, OSError) as error:
        return _complain(str(error))
    return status if isinstance(status, int) else 0


def _complain(message: str) -> int:
    for line in message.splitlines():
        print(f"zero-topo: {cut(line)}", file=sys.stderr)
    return WRONG_INPUT
