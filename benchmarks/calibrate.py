# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks fit``: fits a machine's rates to measured steps, and predicts those of
other schemes.

A record of ``python -m benchmarks cluster --json`` holds what is needed: the cluster's links, the
model, each scheme's block, and the median step at each number of micro-batches.

Note [Fit]
    FLOP/s follow from the record's time of a micro-batch without communication. Two factors of the
    machine are fitted: the share of the links' rates that is reached, and bytes/s of packing and
    quantization. The sum of squared logarithms of predicted over measured is minimized by a pattern
    search on a logarithmic scale: of a point and its eight neighbours the best one is taken, and
    the distance is halved wherever that is the point itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from zero_topo.cli.output import print_json
from zero_topo.cli.tables import show
from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.config.deepspeed_json import parse_object
from zero_topo.cost.job import Job
from zero_topo.cost.step import predict_step
from zero_topo.cost.transformer import Transformer
from zero_topo.observe.console import figures_table
from zero_topo.strict import Count, Positive, did_you_mean, read, read_text, to_json
from zero_topo.topology.model import LINKED_DOMAINS, Link, Topology
from zero_topo.topology.rates import Rates
from zero_topo.units import GB, MB

VOCABULARY = 256  # of the benchmarks' model, which reads bytes
HEAD_WIDTH = 64
MBIT = MB / 8
LATENCY_S = 1e-3  # of a message between two processes on one host that share its cores
FACTORS = ("links", "memory")
FARTHEST = 50.0  # that a factor gets from 1, in powers of e
STRIDE = 1.0
LEAST = 1e-4  # distances of the search's neighbours, first and last, in powers of e
Point = tuple[float, ...]


class _Mbit(TypedDict):
    gcd: Positive
    gpu: Positive
    node: Positive


class _Spec(TypedDict):
    nodes: Count
    gpus_per_node: Count
    gcds_per_gpu: Count
    rates_mbit: _Mbit


class _Setup(TypedDict):
    layers: Count
    width: Count
    context: Count
    batch: Count
    prefetch_numel: Annotated[int, Field(strict=True, ge=0)]


class _Trained(TypedDict):
    scheme: str
    block: dict[str, Any] | None


class _Settings(TypedDict):
    spec: _Spec
    setup: _Setup
    jobs: list[_Trained]


class _Median(TypedDict):
    median: Annotated[float, Field(strict=True, ge=1e-9, le=1e9)]


class _Result(TypedDict):
    scheme: str
    micro_batches: Annotated[int, Field(strict=True, ge=1, le=1024)]
    step_s: _Median


class _Record(TypedDict):
    settings: _Settings
    results: list[_Result]


@dataclass(frozen=True)
class Measured:
    """One result of a record.

    Attributes:
        scheme: its name.
        config: its block, resolved on the record's cluster.
        job: what was trained.
        step_s: the median.
    """

    scheme: str
    config: ResolvedConfig
    job: Job
    step_s: float


@dataclass(frozen=True)
class Prediction:
    """A measured step and the model's; seconds."""

    scheme: str
    micro_batches: int
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s


def read_record(record: Mapping[str, Any]) -> list[Measured]:
    """The results of a cluster record, stock DeepSpeed's left out.

    Raises:
        ValueError: if it is no such record.
    """
    try:
        read(_Record, "record", record)
    except ValueError as error:
        raise ValueError(
            f"not a record of 'python -m benchmarks cluster --json': {error}; give one"
        ) from None
    settings = record["settings"]
    results = record["results"]
    codes = record.get("format") not in (None, 1)
    cluster = topology_of(settings["spec"])
    setup = settings["setup"]
    blocks = {job["scheme"]: job["block"] for job in settings["jobs"] if job["block"] is not None}
    found = [
        Measured(
            row["scheme"],
            _config(blocks[row["scheme"]], cluster, codes),
            _job(setup, row),
            row["step_s"]["median"],
        )
        for row in results
        if row["scheme"] in blocks
    ]
    if not found:
        raise ValueError(
            "the record holds no results of schemes that the model knows; measure some first"
        )
    return found


def host_rates(record: Mapping[str, Any]) -> Rates:
    """Where a fit begins: ranks that share a host's cores, whose links have the rates that the
    record names.

    Raises:
        ValueError: if the record has no time of computing.
    """
    job = read_record(record)[0].job
    seconds = record.get("compute_s_per_micro_batch")
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(
            f"the record's compute_s_per_micro_batch is {seconds!r}; it must be seconds, measured "
            "again"
        )
    return Rates(
        peak_flops=job.flops / job.micro_batches / seconds,
        compute_efficiency=1.0,
        memory_bandwidth=float(GB),
        memory_efficiency=1.0,
        link_efficiency=MappingProxyType({}),
        shared=LINKED_DOMAINS,
        gather="direct",
        host_codec=True,
    )


def topology_of(spec: Mapping[str, Any]) -> Topology:
    """The machine of a record's ``spec``: a rank's share of each link when all ranks send."""
    dies = spec["gcds_per_gpu"]
    gpus = spec["gpus_per_node"]
    rates = spec["rates_mbit"]
    sharers = {"gpu": 1, "node": dies, "world": dies * gpus}
    levels = zip(LINKED_DOMAINS, ("gcd", "gpu", "node"), strict=True)
    links = {
        domain: Link(rates[level] * MBIT / sharers[domain], LATENCY_S) for domain, level in levels
    }
    return Topology(
        f"emulated-{spec.get('name', 'cluster')}",
        spec["nodes"],
        gpus,
        dies,
        links=links,
        emulated=True,
    )


def _config(block: Mapping[str, Any], cluster: Topology, codes: bool) -> ResolvedConfig:
    """A block on the record's cluster; those of format 1 had no INT8 weights, whatever the scheme's
    default is now.
    """
    keys = {key: value for key, value in block.items() if key != "topology"}
    bits = keys.get("quantize", {})
    if not codes and isinstance(bits, Mapping):
        keys["quantize"] = {**bits, "resident": None}
    return resolve_config(ZeroTopoConfig.parse(keys), cluster)


def _job(setup: Mapping[str, Any], row: Mapping[str, Any]) -> Job:
    """The benchmark's GPT, whose DeepSpeed config prefetches nothing unless configured, and waits
    for every scatter.
    """
    width = setup["width"]
    heads = setup["width"] // HEAD_WIDTH
    model = Transformer(
        name="benchmark",
        layers=setup["layers"],
        hidden=width,
        heads=heads,
        kv_heads=heads,
        vocab=VOCABULARY,
        sequence=setup["context"],
        intermediate=4 * width,
        biases=False,
        positions=setup["context"],
    )
    layer = model.params // model.layers
    ahead = setup["prefetch_numel"] // layer
    return Job(
        model,
        setup["batch"],
        row["micro_batches"],
        False,
        prefetch=ahead,
        overlap_scatter=False,
        overlap=1.0,
    )


def fit(measured: Sequence[Measured], start: Rates) -> Rates:
    """Rates with which the model comes nearest to measured steps; see Note [Fit].

    Args:
        measured: of at least one scheme.
        start: where to begin; what is not fitted is kept.
    """

    def error(logarithms: Point) -> float:
        rates = _scaled(start, dict(zip(FACTORS, logarithms, strict=True)))
        return sum(math.log(row.ratio) ** 2 for row in predict(measured, rates))

    point = (0.0, 0.0)
    stride = STRIDE
    while stride > LEAST:
        neighbours = [
            (point[0] + a * stride, point[1] + b * stride) for a, b in product((0, -1, 1), repeat=2)
        ]
        best = min(neighbours, key=error)
        point, stride = best, stride / 2 if best == point else stride
    return _scaled(start, dict(zip(FACTORS, point, strict=True)))


def _scaled(start: Rates, logarithms: Mapping[str, float]) -> Rates:
    links, memory = (math.exp(max(-FARTHEST, min(FARTHEST, logarithms[name]))) for name in FACTORS)
    return replace(
        start,
        link_efficiency={
            domain: start.link_efficiency.get(domain, 1.0) * links for domain in LINKED_DOMAINS
        },
        memory_bandwidth=start.memory_bandwidth * memory,
    )


def predict(measured: Iterable[Measured], rates: Rates) -> list[Prediction]:
    """The model's step for each measured one."""
    return [
        Prediction(
            row.scheme,
            row.job.micro_batches,
            row.step_s,
            predict_step(row.config, row.job, rates).seconds,
        )
        for row in measured
    ]


def measured_schemes(measured: Sequence[Measured], schemes: Sequence[str]) -> list[Measured]:
    """The results of some schemes.

    Raises:
        ValueError: for a scheme that was not measured.
    """
    known = list(dict.fromkeys(row.scheme for row in measured))
    for name in schemes:
        if name not in known:
            raise ValueError(
                f"scheme {name!r} is not in the record{did_you_mean(name, known)} ({known})"
            )
    return [row for row in measured if row.scheme in schemes]


def show_fit(path: Path, on: Sequence[str], wanted: Sequence[str], as_json: bool) -> None:
    """Fit a record's rates and print them, with the predictions and the measurements.

    Args:
        path: of the record.
        on: schemes to fit to.
        wanted: schemes to predict; all others if empty.
        as_json: print JSON.

    Raises:
        ValueError: if the file is no record, or lacks a scheme.
    """
    record = parse_object(read_text(path, f"record {path}"), f"record {path}")
    measured = read_record(record)
    wanted = wanted or list(dict.fromkeys(row.scheme for row in measured if row.scheme not in on))
    fitting = measured_schemes(measured, on)
    others = measured_schemes(measured, wanted)
    if not fitting:
        raise ValueError(f"--on {','.join(on)!r} names no scheme; give one or more of the record's")
    rates = fit(fitting, host_rates(record))
    fitted = predict(fitting, rates)
    predicted = predict(others, rates)
    if as_json:
        rows = [
            {**asdict(row), "ratio": row.ratio, "fitted": row in fitted}
            for row in (*fitted, *predicted)
        ]
        print_json({"rates": to_json(rates), "results": rows})
        return
    table = figures_table(
        ["", "K", "measured", "model", "ratio", ""], f"{path.name}: seconds of a step"
    )
    for rows_of, what in ((fitted, "fitted"), (predicted, "predicted")):
        for row in rows_of:
            cells = (f"{row.measured_s:.2f}", f"{row.predicted_s:.2f}", f"{row.ratio:.2f}", what)
            table.add_row(row.scheme, str(row.micro_batches), *cells)
    show(table)
    links = ", ".join(f"{domain} {share:.2f}" for domain, share in rates.link_efficiency.items())
    print(
        f"Rates: {rates.flops:.3g} FLOP/s, packing {rates.memory:.3g} bytes/s, share of links' "
        f"rates: {links}"
    )
