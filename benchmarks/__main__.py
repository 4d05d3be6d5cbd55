# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks``: what proves this repository's claims. To add one, write its command
here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import cluster, convergence
from benchmarks.choice import load_blocks, load_record, read_rate, read_shape, schemes_named
from benchmarks.emulated_cluster import network
from benchmarks.emulated_cluster.spec import load_spec
from benchmarks.options import taking
from benchmarks.recording import FAILED, Columns, Outputs, Result, measure
from benchmarks.training_setup import TrainingSetup, width_for
from zero_topo.cli.app import run as run_command
from zero_topo.cli.inputs import LIKE_PARAMS, read_count
from zero_topo.strict import words_of
from zero_topo.units import format_bytes

app = typer.Typer(
    help="Measure what this repository claims.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Blocks = Annotated[
    Path | None, typer.Option(help="JSON file with more schemes: name -> zero_topo block.")
]
Params = Annotated[str, typer.Option(help="Parameters of the GPT, about.")]
Layers = Annotated[int, typer.Option(min=1, help="Its layers.")]
InFp32 = Annotated[bool, typer.Option("--fp32", help="Train in FP32 instead of BF16.")]


CLUSTER: Columns = {
    "K": itemgetter("micro_batches"),
    "scheme": itemgetter("scheme"),
    "step": lambda row: "{median:.2f} s ({min:.2f} - {max:.2f})".format(**row["step_s"]),
    "uplink": lambda row: format_bytes(row["uplink_bytes_per_step_per_node"]),
    "drops": itemgetter("drops"),
}
"""Bytes of the uplink are those that leave a node in a step, by the kernel."""
QUANTIZERS: Columns = {
    **{key: itemgetter(key) for key in ("dtype", "bits", "block_size", "backend", "threads", "op")},
    "GB/s": lambda row: f"{row['gb_per_s']:.1f}",
    "of a copy": lambda row: f"{row['memcpy_ratio']:.2f}",
}


def _difference(measure: str, row: Result) -> str:
    found = row[measure]
    shares = "mean {mean:+.2%}, worst {worst:+.2%}".format(**found["difference"])
    return f"{found['loss']:.4f} ({shares})"


CONVERGENCE: Columns = {
    "scheme": itemgetter("scheme"),
    "last tenth": partial(_difference, "last"),
    "evaluation": partial(_difference, "evaluation"),
}
"""Losses in nats per byte, and their differences from stock with the same seed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; the exit status, as ``zero-topo`` gives it."""
    return run_command(arguments, lambda word: app, "python -m benchmarks")


@dataclass(frozen=True)
class ClusterOptions(Outputs):
    """Of ``benchmarks cluster``."""

    spec: Annotated[
        str, typer.Option(metavar="t8|t16|t32|FILE", help="The cluster to emulate.")
    ] = "t8"
    schemes: Annotated[str, typer.Option(help="Comma-separated.")] = (
        "zero3,zero++,paper,topo,topo-nf4,zero2-nf4,topo-ternary,node-ternary,zero2-ternary,"
        "all-reduce,topo-oktopk,topo-radius,topo-tagc,topo-scape"
    )
    micro_batches: Annotated[str, typer.Option(help="Per optimizer step, comma-separated.")] = "1,8"
    steps: Annotated[int, typer.Option(min=2, help="Steps to time with each.")] = 3
    warmup: Annotated[
        int, typer.Option(min=1, help="Steps before them: Adam's first updates are the largest.")
    ] = 10
    params: Params = "20e6"
    layers: Layers = 4
    context: Annotated[
        int, typer.Option(min=1, help="Bytes of each sample: few, to compute little.")
    ] = 16
    lr: Annotated[
        float, typer.Option(help="Learning rate: how many codes change; a 20B model's.")
    ] = 1e-4
    bucket: Annotated[int, typer.Option(min=1, help="DeepSpeed's reduce_bucket_size.")] = 5_000_000
    prefetch: Annotated[
        int, typer.Option(min=0, help="DeepSpeed's stage3_prefetch_bucket_size.")
    ] = 0
    fp32: InFp32 = False
    blocks: Blocks = None


@app.command("cluster")
@taking(ClusterOptions)
def cluster_command(options: ClusterOptions) -> None:
    """Time optimizer steps on an emulated cluster and let the kernel count what crosses its links
    (needs root).
    """
    setup = TrainingSetup(
        layers=options.layers,
        width=width_for(read_count(options.params, "--params", LIKE_PARAMS), options.layers),
        context=options.context,
        batch=1,
        lr=options.lr,
        bucket_numel=options.bucket,
        prefetch_numel=options.prefetch,
        bf16=not options.fp32,
    )
    schemes = tuple(schemes_named(words_of(options.schemes), load_blocks(options.blocks)))
    counts = tuple(read_count(word, "--micro-batches") for word in words_of(options.micro_batches))
    wanted = cluster.ClusterBench(
        load_spec(options.spec), schemes, counts, setup, options.steps, options.warmup
    )
    network.require()
    content = measure(options, CLUSTER, wanted.ticks(), partial(cluster.run, wanted))
    spoiled = cluster.dropped(content["results"])
    if spoiled:
        typer.echo(f"zero-topo: {spoiled}", err=True)
        raise typer.Exit(FAILED)


@dataclass(frozen=True)
class QuantizerOptions(Outputs):
    """Of ``benchmarks quantizers``."""

    size: Annotated[str, typer.Option(help="Bytes of the buffer before quantization.")] = "67108864"
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Timed calls per kernel, each next to a copy of the same bytes."),
    ] = 15
    threads: Annotated[str, typer.Option(help="Thread counts, comma-separated (CPU only).")] = "1,2"
    dtypes: Annotated[str, typer.Option(help="Value types, comma-separated: fp32, bf16, fp16.")] = (
        "fp32,bf16"
    )
    blocks: Annotated[str, typer.Option(help="Block sizes, comma-separated.")] = "256,2048"
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Device: cpu or cuda (AMD GPUs too).")
    ] = "cpu"


@app.command("quantizers")
@taking(QuantizerOptions)
def quantizers_command(options: QuantizerOptions) -> None:
    """Time quantization kernels next to a copy of the same bytes. Other libraries' too, if
    installed.
    """
    from benchmarks import quantizers  # imports torch

    settings = quantizers.Settings(
        nbytes=read_count(options.size, "--size"),
        repeats=options.repeats,
        threads=tuple(read_count(word, "--threads") for word in words_of(options.threads)),
        dtypes=tuple(words_of(options.dtypes)),
        block_sizes=tuple(read_count(word, "--blocks") for word in words_of(options.blocks)),
        device=options.device,
    )
    measure(options, QUANTIZERS, settings.ticks(), partial(quantizers.run, settings))


@dataclass(frozen=True)
class ConvergenceOptions(Outputs):
    """Of ``benchmarks convergence``."""

    schemes: Annotated[str, typer.Option(help="Comma-separated.")] = (
        "zero3,zero++,paper,topo-scatter4,topo,topo-nf4"
    )
    steps: Annotated[int, typer.Option(min=10, help="Optimizer steps of each run.")] = 300
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each scheme.")] = 3
    floors: Annotated[int, typer.Option(min=1, help="Of them with the chaos floor.")] = 3
    micro_batches: Annotated[int, typer.Option(min=1, help="Per optimizer step.")] = 1
    params: Params = "400e3"
    layers: Layers = 2
    context: Annotated[int, typer.Option(min=1, help="Bytes of each sample.")] = 64
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank's micro-batch.")] = 4
    lr: Annotated[
        float, typer.Option(help="Learning rate of stock's optimizer, and of the others'.")
    ] = 2e-3
    rates: Annotated[
        str, typer.Option(help="Of the others instead, each at each, comma-separated.")
    ] = ""
    shape: Annotated[str, typer.Option(help="Nodes x GPUs of a node x GCDs of a GPU.")] = "2x2x2"
    fp32: InFp32 = False
    blocks: Blocks = None
    more: Annotated[
        bool, typer.Option("--more", help="Keep the runs that --record has, and add the others.")
    ] = False
    again: Annotated[
        str, typer.Option(help="With --more: train these schemes of it again, comma-separated.")
    ] = ""
    one_process: Annotated[
        bool,
        typer.Option(
            "--one-process",
            help="Ranks are threads, without DeepSpeed: only sync and optimizer differ.",
        ),
    ] = False


@app.command("convergence")
@taking(ConvergenceOptions)
def convergence_command(options: ConvergenceOptions) -> None:
    """Train every scheme and stock ZeRO-3 on the same data, and show how far their losses
    differ.
    """
    width = width_for(read_count(options.params, "--params", LIKE_PARAMS), options.layers)
    schemes = schemes_named(words_of(options.schemes), load_blocks(options.blocks))
    rates = [read_rate(word) for word in words_of(options.rates)]
    wanted = convergence.Convergence(
        schemes=tuple(scheme.at(rate) for scheme in schemes for rate in rates)
        if rates
        else tuple(schemes),
        setup=TrainingSetup(
            options.layers,
            width,
            options.context,
            options.batch,
            lr=options.lr,
            bf16=not options.fp32,
        ),
        steps=options.steps,
        seeds=tuple(range(options.seeds)),
        floors=options.floors,
        micro_batches=options.micro_batches,
        shape=read_shape(options.shape),
        before=load_record(options.record, "convergence") if options.more else None,
        again=tuple(words_of(options.again)),
        one_process=options.one_process,
    )
    measure(options, CONVERGENCE, wanted.ticks(), partial(convergence.run, wanted))


if __name__ == "__main__":
    sys.exit(main())
