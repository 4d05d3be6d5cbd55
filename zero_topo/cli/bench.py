# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo bench``: measurements on this machine. To add one, write its command here, heavy imports inside."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.inputs import read_count, words_of
from zero_topo.cli.options import taking
from zero_topo.cli.recording import Outputs, measure

bench = typer.Typer(
    help="Measure schemes against each other on this machine.", rich_markup_mode=None, no_args_is_help=True
)


@dataclass(frozen=True)
class QuantizerOptions(Outputs):
    """Of ``bench quantizers``."""

    size: Annotated[str, typer.Option(help="Bytes of the unquantized buffer.")] = "67108864"
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each kernel, each beside a copy.")] = 15
    threads: Annotated[str, typer.Option(help="Numbers of threads, comma-separated; CPU only.")] = "1,2"
    dtypes: Annotated[str, typer.Option(help="Of the values: fp32, bf16, fp16, comma-separated.")] = "fp32,bf16"
    blocks: Annotated[str, typer.Option(help="Block sizes, comma-separated.")] = "256,2048"
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where; AMD GPUs are cuda too.")] = "cpu"


@bench.command()
@taking(QuantizerOptions)
def quantizers(options: QuantizerOptions) -> None:
    """Time every quantization backend and its peers against a plain copy of as many bytes."""
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


@dataclass(frozen=True)
class SparseOptions(Outputs):
    """Of ``bench sparse``."""

    modes: Annotated[str, typer.Option(help="Comma-separated; all, and dense, if empty.")] = ""
    densities: Annotated[str, typer.Option(help="Shares that a rank picks, comma-separated.")] = "0.1,0.01,0.001"
    ranks: Annotated[str, typer.Option(help="Sizes of the group, comma-separated.")] = "4,8,16"
    sources: Annotated[str, typer.Option(help="Of gradients: synthetic, model.")] = "synthetic,model"
    numel: Annotated[str, typer.Option(help="Elements of a gradient.")] = "1048576"
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure with each.")] = 8


@bench.command()
@taking(SparseOptions)
def sparse(options: SparseOptions) -> None:
    """Compare the sparse modes of sync on the same gradients: bytes, time, and what they leave out."""
    from zero_topo.bench import sparse_report
    from zero_topo.bench.sparse import MODES, SparseBench, run

    wanted = SparseBench(
        modes=tuple(words_of(options.modes)) or MODES,
        densities=tuple(float(word) for word in words_of(options.densities)),
        ranks=tuple(read_count(word, "--ranks") for word in words_of(options.ranks)),
        sources=tuple(words_of(options.sources)),
        numel=read_count(options.numel, "--numel"),
        steps=options.steps,
    )
    measure(options, sparse_report, wanted.ticks(), partial(run, wanted))


@dataclass(frozen=True)
class ScaleOptions(Outputs):
    """Of ``bench scale``."""

    ranks: Annotated[str, typer.Option(help="Of the pretended worlds, comma-separated; multiples of 8.")] = (
        "8,16,128,384,4096,75264"
    )
    schemes: Annotated[str, typer.Option(help="Comma-separated.")] = (
        "zero3,zero++,hsdp,paper,topo,topo-q8,topo-q4,oktopk,radius,tagc,scape"
    )
    blocks: Annotated[Path | None, typer.Option(help="JSON file with more schemes: name -> zero_topo block.")] = None
    params: Annotated[int, typer.Option(min=1, help="Parameters of the model.")] = 32
    numel: Annotated[str, typer.Option(help="Elements of each.")] = "131072"
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 5
    real_ranks: Annotated[int, typer.Option(min=0, help="Processes that count in DeepSpeed's engine; 0: none.")] = 8


@bench.command()
@taking(ScaleOptions)
def scale(options: ScaleOptions) -> None:
    """Count what a step launches, by scheme and number of ranks, in pretended worlds of up to 75,264 ranks."""
    from zero_topo.bench import scale_report
    from zero_topo.bench.scale import ScaleBench, run
    from zero_topo.bench.schemes import load_blocks, schemes_named

    wanted = ScaleBench(
        schemes=tuple(schemes_named(words_of(options.schemes), load_blocks(options.blocks))),
        ranks=tuple(read_count(word, "--ranks") for word in words_of(options.ranks)),
        params=options.params,
        numel=read_count(options.numel, "--numel"),
        repeats=options.repeats,
        real_ranks=options.real_ranks,
    )
    measure(options, scale_report, wanted.ticks(), partial(run, wanted))


def _moved(context: typer.Context) -> None:
    """A benchmark that is run in a checkout alone."""
    raise ValueError(
        f"'bench {context.info_name}' is not installed; in a checkout: python -m benchmarks {context.info_name}"
    )


for name in ("cluster", "convergence"):
    bench.command(name, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
        _moved
    )
