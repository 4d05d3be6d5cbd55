# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Fits a machine's rates to measured steps, and predicts those of other schemes.

A record of ``python -m benchmarks cluster --json`` holds what is needed: the cluster's links, the model, each scheme's
block, and the median step at each number of micro-batches.

Note [Fit]
    FLOP/s follow from the record's time of a micro-batch without communication. Sought are two factors of the machine:
    what share of the links' rates is reached, and bytes/s of packing and quantization. The sum of squared logarithms
    of predicted over measured is made least, by a simplex search on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.cost.step import Job, predict_step
from zero_topo.cost.transformer import Transformer
from zero_topo.strict import Count, Positive, did_you_mean, read
from zero_topo.topology.model import LINKED_DOMAINS, Link, Topology
from zero_topo.topology.rates import Rates
from zero_topo.units import GB, MB

VOCABULARY = 256  # of the benchmarks' model, which reads bytes
HEAD_WIDTH = 64
MBIT = MB / 8
LATENCY_S = 1e-3  # of a message between two processes on one host that share its cores
FACTORS = ("links", "memory")
STRIDE = 1.0  # of the search's first moves, in powers of e
MOVES = 200
FARTHEST = 50.0  # that a factor gets from 1, in powers of e
ENOUGH = 1e-7  # difference of squared logarithms at which the search ends
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
    """A measured step beside the model's; seconds."""

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
        raise ValueError(f"not a record of 'python -m benchmarks cluster --json': {error}; give one") from None
    settings, results, codes = record["settings"], record["results"], record.get("format") not in (None, 1)
    cluster, setup = topology_of(settings["spec"]), settings["setup"]
    blocks = {job["scheme"]: job["block"] for job in settings["jobs"] if job["block"] is not None}
    found = [
        Measured(
            row["scheme"], _config(blocks[row["scheme"]], cluster, codes), _job(setup, row), row["step_s"]["median"]
        )
        for row in results
        if row["scheme"] in blocks
    ]
    if not found:
        raise ValueError("the record holds no results of schemes that the model knows; measure some first")
    return found


def host_rates(record: Mapping[str, Any]) -> Rates:
    """Where a fit begins: ranks that share a host's cores, whose links have the rates that the record names.

    Raises:
        ValueError: if the record has no time of computing.
    """
    job, seconds = read_record(record)[0].job, record.get("compute_s_per_micro_batch")
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"the record's compute_s_per_micro_batch is {seconds!r}; it must be seconds, measured again")
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
    dies, gpus = spec["gcds_per_gpu"], spec["gpus_per_node"]
    rates, sharers = spec["rates_mbit"], {"gpu": 1, "node": dies, "world": dies * gpus}
    levels = zip(LINKED_DOMAINS, ("gcd", "gpu", "node"), strict=True)
    links = {domain: Link(rates[level] * MBIT / sharers[domain], LATENCY_S) for domain, level in levels}
    return Topology(f"emulated-{spec.get('name', 'cluster')}", spec["nodes"], gpus, dies, links=links, emulated=True)


def _config(block: Mapping[str, Any], cluster: Topology, codes: bool) -> ResolvedConfig:
    """A block on the record's cluster; none of format 1 held codes, whatever the scheme's default is now."""
    keys = {key: value for key, value in block.items() if key != "topology"}
    bits = keys.get("quantize", {})
    if not codes and isinstance(bits, Mapping):
        keys["quantize"] = {**bits, "resident": None}
    return resolve_config(ZeroTopoConfig.parse(keys), cluster)


def _job(setup: Mapping[str, Any], row: Mapping[str, Any]) -> Job:
    """The benchmark's GPT, whose DeepSpeed config gathers nothing ahead unless told and waits for every scatter."""
    width, heads = setup["width"], setup["width"] // HEAD_WIDTH
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
    return Job(model, setup["batch"], row["micro_batches"], False, prefetch=ahead, overlap_scatter=False, overlap=1.0)


def fit(measured: Sequence[Measured], start: Rates) -> Rates:
    """Rates with which the model comes nearest to measured steps; see Note [Fit].

    Args:
        measured: of at least one scheme.
        start: where to begin; what is not fitted is kept.
    """

    def error(logarithms: Point) -> float:
        rates = _scaled(start, dict(zip(FACTORS, logarithms, strict=True)))
        return sum(math.log(row.ratio) ** 2 for row in predict(measured, rates))

    return _scaled(start, dict(zip(FACTORS, least(error, (0.0,) * len(FACTORS)), strict=True)))


def _scaled(start: Rates, logarithms: Mapping[str, float]) -> Rates:
    links, memory = (math.exp(max(-FARTHEST, min(FARTHEST, logarithms[name]))) for name in FACTORS)
    return replace(
        start,
        link_efficiency={domain: start.link_efficiency.get(domain, 1.0) * links for domain in LINKED_DOMAINS},
        memory_bandwidth=start.memory_bandwidth * memory,
    )


def least(function: Callable[[Point], float], start: Point) -> Point:
    """Where a function is least near a point: the simplex search of Nelder and Mead (1965)."""
    corners = [start, *(_moved(start, index, STRIDE) for index in range(len(start)))]
    values = {corner: function(corner) for corner in corners}
    for _ in range(MOVES):
        corners.sort(key=values.__getitem__)
        if values[corners[-1]] - values[corners[0]] < ENOUGH:
            break
        middle = _mean(corners[:-1])
        tried = [_between(middle, corners[-1], -1.0)]
        values[tried[0]] = function(tried[0])
        if not values[corners[0]] <= values[tried[0]] < values[corners[-2]]:
            far = values[tried[0]] < values[corners[0]]
            tried.append(_between(middle, corners[-1], -2.0 if far else 0.5))
            values[tried[1]] = function(tried[1])
        better = min(tried, key=values.__getitem__)
        if values[better] < values[corners[-1]]:
            corners[-1] = better
            continue
        corners = [corners[0], *(_between(corners[0], corner, 0.5) for corner in corners[1:])]
        values |= {corner: function(corner) for corner in corners[1:]}
    return min(corners, key=values.__getitem__)


def _moved(point: Point, index: int, by: float) -> Point:
    return tuple(value + by * (at == index) for at, value in enumerate(point))


def _mean(points: Sequence[Point]) -> Point:
    return tuple(sum(values) / len(points) for values in zip(*points, strict=True))


def _between(origin: Point, point: Point, share: float) -> Point:
    return tuple(a + share * (b - a) for a, b in zip(origin, point, strict=True))


def predict(measured: Iterable[Measured], rates: Rates) -> list[Prediction]:
    """The model's step beside each measured one."""
    return [
        Prediction(row.scheme, row.job.micro_batches, row.step_s, predict_step(row.config, row.job, rates).seconds)
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
            raise ValueError(f"scheme {name!r} is not in the record{did_you_mean(name, known)} ({known})")
    return [row for row in measured if row.scheme in schemes]
