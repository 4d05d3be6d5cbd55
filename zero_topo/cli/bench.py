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

from zero_topo.cli.inputs import read_count
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
    with _progress(measured.ticks()) as tick:
        content = run(measured, tick)
    _finish(content, options, cluster_report)
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


def _finish(content: Mapping[str, Any], outputs: Outputs, report: ModuleType) -> None:
    """Write the record and its pictures, and print the table or the JSON.

    Args:
        content: the record.
        outputs: where to.
        report: a module with ``draw(content, folder)`` and ``show(content)``.
    """
    from zero_topo.bench import records
    from zero_topo.observe.runlog import new_run_folder

    file = outputs.record or new_run_folder(f"bench-{content['benchmark']}") / "record.json"
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
