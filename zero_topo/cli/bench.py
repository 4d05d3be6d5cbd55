# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo bench``: measurements on this machine. To add one, write its command here, heavy imports inside."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from zero_topo.cli.inputs import read_count, words_of
from zero_topo.cli.options import taking
from zero_topo.cli.recording import Outputs, measure

bench = typer.Typer(help="Time the quantization kernels of this machine.", rich_markup_mode=None, no_args_is_help=True)


@dataclass(frozen=True)
class QuantizerOptions(Outputs):
    """Of ``bench quantizers``."""

    size: Annotated[str, typer.Option(help="Bytes of the buffer before quantization.")] = "67108864"
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed calls per kernel, each next to a copy of the same bytes.")
    ] = 15
    threads: Annotated[str, typer.Option(help="Thread counts, comma-separated (CPU only).")] = "1,2"
    dtypes: Annotated[str, typer.Option(help="Value types, comma-separated: fp32, bf16, fp16.")] = "fp32,bf16"
    blocks: Annotated[str, typer.Option(help="Block sizes, comma-separated.")] = "256,2048"
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Device: cpu or cuda (AMD GPUs too).")] = "cpu"


@bench.command()
@taking(QuantizerOptions)
def quantizers(options: QuantizerOptions) -> None:
    """Time quantization kernels next to a copy of the same bytes. Other libraries' too, if installed."""
    from zero_topo.bench import quantizers_report
    from zero_topo.bench.quantizers import Settings, run

    settings = Settings(
        nbytes=read_count(options.size, "--size"),
        repeats=options.repeats,
        threads=tuple(read_count(word, "--threads") for word in words_of(options.threads)),
        dtypes=tuple(words_of(options.dtypes)),
        block_sizes=tuple(read_count(word, "--blocks") for word in words_of(options.blocks)),
        device=options.device,
    )
    measure(options, quantizers_report, settings.ticks(), partial(run, settings))


def _moved(context: typer.Context) -> None:
    """A benchmark that is run in a checkout alone."""
    raise ValueError(
        f"'bench {context.info_name}' is not installed; in a checkout: python -m benchmarks {context.info_name}"
    )


for name in ("cluster", "convergence", "scale", "sparse"):
    bench.command(name, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
        _moved
    )
