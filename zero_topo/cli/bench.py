# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo bench``: measurements on this machine. To add one, write its command here, heavy imports inside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from zero_topo.cli.inputs import read_count, read_shape
from zero_topo.cli.options import taking

if TYPE_CHECKING:
    from zero_topo.bench.cluster import ClusterBench

bench = typer.Typer(
    help="Measure schemes against each other on this machine.", rich_markup_mode=None, no_args_is_help=True
)

FAILED = 1
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")]
Record = Annotated[Path | None, typer.Option(help="File for the record; default: a new folder under runs/.")]
Plots = Annotated[Path | None, typer.Option(help="Folder for the pictures; default: where the record is.")]
Blocks = Annotated[Path | None, typer.Option(help="JSON file with more schemes: name -> zero_topo block.")]
Params = Annotated[str, typer.Option(help="Parameters of the GPT, about.")]
Layers = Annotated[int, typer.Option(min=1, help="Its layers.")]


@dataclass(frozen=True)
class ClusterOptions:
    """Of ``bench cluster``."""

    spec: Annotated[str, typer.Option(metavar="t8|t32|FILE", help="The cluster to emulate.")] = "t8"
    schemes: Annotated[str, typer.Option(help="Comma-separated.")] = "zero3,zero++,paper,topo,topo-q4"
    micro_batches: Annotated[str, typer.Option(help="Per optimizer step, comma-separated.")] = "1,4,8"
    steps: Annotated[int, typer.Option(min=2, help="Steps to time with each.")] = 5
    params: Params = "20e6"
    layers: Layers = 4
    context: Annotated[int, typer.Option(min=1, help="Bytes of each sample: few, to compute little.")] = 16
    bucket: Annotated[int, typer.Option(min=1, help="DeepSpeed's reduce_bucket_size.")] = 5_000_000
    prefetch: Annotated[int, typer.Option(min=0, help="DeepSpeed's stage3_prefetch_bucket_size.")] = 0
    blocks: Blocks = None
    as_json: Json = False
    record: Record = None
    plots: Plots = None
    clean: Annotated[bool, typer.Option("--clean", help="Only remove what crashed runs left behind.")] = False


@bench.command()
@taking(ClusterOptions)
def cluster(options: ClusterOptions) -> None:
    """Time optimizer steps on an emulated cluster and let the kernel count what crosses its links (needs root)."""
    from zero_topo.bench import cluster_report
    from zero_topo.bench.cluster import dropped, run
    from zero_topo.bench.emulated_cluster import network

    if options.clean:
        print(f"removed {len(network.clean())} network namespaces of crashed runs")
        return
    measured = _cluster_bench(options)
    network.require()
    keep = _Keeper(_file(options, "cluster"))
    with _told(keep), _progress(measured.ticks()) as tick:
        content = run(measured, tick, keep)
    _finish(content, options, cluster_report, keep.file)
    spoiled = dropped(content["results"])
    if spoiled:
        typer.echo(f"zero-topo: {spoiled}", err=True)
        raise typer.Exit(FAILED)


def _cluster_bench(options: ClusterOptions) -> ClusterBench:
    from zero_topo.bench.cluster import ClusterBench
    from zero_topo.bench.emulated_cluster.spec import load_spec
    from zero_topo.bench.schemes import choose, load_blocks
    from zero_topo.bench.training_setup import TrainingSetup, width_for

    setup = TrainingSetup(
        layers=options.layers,
        width=width_for(read_count(options.params, "--params"), options.layers),
        context=options.context,
        batch=1,
        bucket_numel=options.bucket,
        prefetch_numel=options.prefetch,
    )
    schemes = tuple(choose(_words(options.schemes), load_blocks(options.blocks)))
    counts = tuple(read_count(word, "--micro-batches") for word in _words(options.micro_batches))
    return ClusterBench(load_spec(options.spec), schemes, counts, setup, options.steps)


@dataclass(frozen=True)
class ConvergenceOptions:
    """Of ``bench convergence``."""

    schemes: Annotated[str, typer.Option(help="Comma-separated.")] = "zero3,zero++,paper,topo-scatter4,topo,topo-q4"
    steps: Annotated[int, typer.Option(min=10, help="Optimizer steps of each run.")] = 300
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each scheme.")] = 3
    micro_batches: Annotated[int, typer.Option(min=1, help="Per optimizer step.")] = 1
    params: Params = "400e3"
    layers: Layers = 2
    context: Annotated[int, typer.Option(min=1, help="Bytes of each sample.")] = 64
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank's micro-batch.")] = 4
    lr: Annotated[float, typer.Option(help="Learning rate of the optimizer.")] = 2e-3
    shape: Annotated[str, typer.Option(help="Nodes x GPUs of a node x dies of a GPU.")] = "2x2x2"
    blocks: Blocks = None
    as_json: Json = False
    record: Record = None
    plots: Plots = None


@bench.command()
@taking(ConvergenceOptions)
def convergence(options: ConvergenceOptions) -> None:
    """Train every scheme and stock ZeRO-3 on the same data, and show how far their losses differ."""
    from zero_topo.bench import convergence_report
    from zero_topo.bench.convergence import Convergence, run
    from zero_topo.bench.schemes import choose, load_blocks
    from zero_topo.bench.training_setup import TrainingSetup, width_for

    width = width_for(read_count(options.params, "--params"), options.layers)
    setup = TrainingSetup(options.layers, width, options.context, options.batch, lr=options.lr)
    schemes = tuple(choose(_words(options.schemes), load_blocks(options.blocks)))
    seeds = tuple(range(options.seeds))
    shape = read_shape(options.shape)
    wanted = Convergence(schemes, setup, options.steps, seeds, micro_batches=options.micro_batches, shape=shape)
    keep = _Keeper(_file(options, "convergence"))
    with _told(keep), _progress(wanted.ticks()) as tick:
        content = run(wanted, tick, keep)
    _finish(content, options, convergence_report, keep.file)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


class Outputs(Protocol):
    """The options that say where a benchmark's results go."""

    @property
    def as_json(self) -> bool: ...
    @property
    def record(self) -> Path | None: ...
    @property
    def plots(self) -> Path | None: ...


def _file(outputs: Outputs, benchmark: str) -> Path:
    from zero_topo.observe.runlog import new_run_folder

    return outputs.record or new_run_folder(f"bench-{benchmark}") / "record.json"


class _Keeper:
    """Writes a record that grows."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.begun = False

    def __call__(self, content: Mapping[str, Any]) -> None:
        """Write what is measured so far."""
        from zero_topo.bench import records

        records.write(self.file, content)
        self.begun = True


@contextmanager
def _told(keep: _Keeper) -> Iterator[None]:
    """If the block fails: what the ranks said instead of a traceback of ours, and where to find what was measured."""
    try:
        yield
    except BaseException as error:
        if keep.begun:
            typer.echo(f"zero-topo: what was measured until then is in {keep.file}", err=True)
        if not isinstance(error, RuntimeError):
            raise
        typer.echo(f"zero-topo: {error}", err=True)
        raise typer.Exit(FAILED) from error


def _finish(content: Mapping[str, Any], outputs: Outputs, report: ModuleType, record: Path | None = None) -> None:
    """Write the record and its pictures, and print the table or the JSON.

    Args:
        content: the record.
        outputs: where to.
        report: a module with ``draw(content, folder)`` and ``show(content)``.
        record: the record's file, if one was begun.
    """
    from zero_topo.bench import records

    file = record or _file(outputs, content["benchmark"])
    records.write(file, content)
    pictures = report.draw(content, outputs.plots or file.parent)
    if outputs.as_json:
        print(json.dumps(content, indent=2))
        return
    report.show(content)
    print(f"Written: {', '.join(str(path) for path in (file, *pictures))}")


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr if that is a terminal; gives what is to be called with a few words at each step."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def tick(words: str, done: int = 0) -> None:
            bar.update(task, description=words, advance=done)

        yield tick


@dataclass(frozen=True)
class QuantizerOptions:
    """Of ``bench quantizers``."""

    size: Annotated[str, typer.Option(help="Bytes of the unquantized buffer.")] = "67108864"
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each kernel, each beside a copy.")] = 15
    threads: Annotated[str, typer.Option(help="Numbers of threads, comma-separated; CPU only.")] = "1,2"
    dtypes: Annotated[str, typer.Option(help="Of the values: fp32, bf16, fp16, comma-separated.")] = "fp32,bf16"
    blocks: Annotated[str, typer.Option(help="Block sizes, comma-separated.")] = "256,2048"
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where; AMD GPUs are cuda too.")] = "cpu"
    as_json: Json = False
    record: Record = None
    plots: Plots = None


@bench.command()
@taking(QuantizerOptions)
def quantizers(options: QuantizerOptions) -> None:
    """Time every quantization backend and its peers against a plain copy of as many bytes."""
    from zero_topo.bench import quantizers_report
    from zero_topo.bench.quantizers import Settings, run

    settings = Settings(
        nbytes=read_count(options.size, "--size"),
        repeats=options.repeats,
        threads=tuple(read_count(word, "--threads") for word in _words(options.threads)),
        dtypes=tuple(_words(options.dtypes)),
        block_sizes=tuple(read_count(word, "--blocks") for word in _words(options.blocks)),
        device=options.device,
    )
    _finish(run(settings), options, quantizers_report)


@dataclass(frozen=True)
class SparseOptions:
    """Of ``bench sparse``."""

    modes: Annotated[str, typer.Option(help="Comma-separated; all, and dense, if empty.")] = ""
    densities: Annotated[str, typer.Option(help="Shares that a rank picks, comma-separated.")] = "0.1,0.01,0.001"
    ranks: Annotated[str, typer.Option(help="Sizes of the group, comma-separated.")] = "4,8,16"
    sources: Annotated[str, typer.Option(help="Of gradients: synthetic, model.")] = "synthetic,model"
    numel: Annotated[str, typer.Option(help="Elements of a gradient.")] = "1048576"
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure with each.")] = 8
    as_json: Json = False
    record: Record = None
    plots: Plots = None


@bench.command()
@taking(SparseOptions)
def sparse(options: SparseOptions) -> None:
    """Compare the sparse modes of sync on the same gradients: bytes, time, and what they leave out."""
    from zero_topo.bench import sparse_report
    from zero_topo.bench.sparse import MODES, SparseBench, run

    wanted = SparseBench(
        modes=tuple(_words(options.modes)) or MODES,
        densities=tuple(float(word) for word in _words(options.densities)),
        ranks=tuple(read_count(word, "--ranks") for word in _words(options.ranks)),
        sources=tuple(_words(options.sources)),
        numel=read_count(options.numel, "--numel"),
        steps=options.steps,
    )
    keep = _Keeper(_file(options, "sparse"))
    with _told(keep), _progress(len(list(wanted.jobs())) * len(wanted.ranks)) as tick:
        content = run(wanted, tick, keep)
    _finish(content, options, sparse_report, keep.file)
