# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables of ``docs/when-it-helps.md`` and ``docs/simulator.md``: predicted gains, and published
steps next to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from tests.documents import record, row
from tests.plans import resolve
from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.divided import rank_experts, rank_tensor
from zero_topo.cost.job import Job, method_of
from zero_topo.cost.model_files import load_model
from zero_topo.cost.pipeline import Pipeline, best_pipeline, pipeline_step
from zero_topo.cost.planner import Price, Ranking, Request, rank_plans
from zero_topo.cost.step import predict_step
from zero_topo.cost.transformer import Transformer
from zero_topo.topology import Link, Topology
from zero_topo.topology.presets import load_machine, load_preset, preset_names
from zero_topo.topology.rates import UNKNOWN_SPREAD, Rates
from zero_topo.units import format_seconds

CASES = (
    ("frontier", 384, "gpt-neox-20b", 1),
    ("frontier", 384, "gpt-neox-20b", 8),
    ("frontier", 64, "gpt-neox-20b", 8),
    ("frontier", 64, "llama-2-7b", 1),
    ("lumi-g", 128, "llama-2-13b", 4),
    ("perlmutter", 128, "llama-2-7b", 1),
    ("perlmutter", 128, "llama-2-7b", 8),
    ("dgx-a100", 128, "llama-2-13b", 4),
    ("dgx-h100", 64, "llama-2-70b", 1),
    ("dgx-h100", 64, "llama-2-70b", 8),
    ("dgx-h100", 512, "llama-2-70b", 1),
    ("dgx-h100", 8, "llama-2-7b", 4),
)
"""Machine, ranks, model, micro-batches."""


DIVIDED = (
    ("frontier", 384, "gpt-neox-20b", 1),
    ("frontier", 384, "gpt-neox-20b", 4),
    ("frontier", 384, "gpt-neox-20b", 8),
    ("frontier", 64, "gpt-neox-20b", 8),
    ("dgx-h100", 512, "llama-2-70b", 1),
    ("dgx-h100", 512, "llama-2-70b", 4),
    ("lumi-g", 128, "llama-2-13b", 4),
    ("perlmutter", 128, "llama-2-7b", 1),
)
"""Machine, ranks, model, micro-batches."""


def tensor_rows() -> list[str]:
    """Seconds of the best plans without and with tensor parallelism, and of the best pipeline."""
    return [row(_divided(case)) for case in DIVIDED]


def _divided(case: tuple[str, int, str, int]) -> list[str]:
    machine, ranks, model, count = case
    request = Request(
        load_preset(machine, ranks), Job(load_model(model), 1, count), keeps_if_fits=True
    )
    cells = [machine, str(ranks), model, str(count)]
    cells += _without_and_with(request, rank_tensor, lambda job: f"TP {job.tensor}")
    pipeline = best_pipeline(request)
    assert pipeline is not None
    return [*cells, f"{pipeline.seconds:.2f} ({pipeline.config.stages} x {pipeline.config.tensor})"]


SPREAD = (("frontier", 128, "mixtral-8x7b", 2), ("dgx-h100", 64, "mixtral-8x7b", 2))


def expert_rows() -> list[str]:
    """Seconds of the best plans without and with expert parallelism."""
    return [row(_spread(case)) for case in SPREAD]


def _spread(case: tuple[str, int, str, int]) -> list[str]:
    machine, ranks, model, count = case
    request = Request(load_preset(machine, ranks), Job(load_model(model), 1, count))
    cells = [machine, str(ranks), model, str(count)]
    return cells + _without_and_with(request, rank_experts, lambda job: f"EP {job.expert}")


def _without_and_with(
    request: Request,
    rank: Callable[[ZeroTopoConfig, Request], Sequence[Ranking]],
    divided: Callable[[Job], str],
) -> list[str]:
    """Seconds of the best plan without, then with ranks that divide the layers: without and with
    loss.
    """
    cells = []
    for lossy in (False, True):
        asked = ZeroTopoConfig.parse({"lossy": lossy})
        best = rank(asked, request)[0].best
        cells.append(f"{rank_plans(asked, request).best.seconds:.2f}")
        cells.append(f"{best.seconds:.2f} ({divided(best.request.job)})")
    return cells


def gain_rows() -> list[str]:
    """Steps of unmodified ZeRO-3, and how many times as fast other plans are."""
    return [row(cells) for cells in map(_gains, CASES)]


def _gains(case: tuple[str, int, str, int]) -> list[str]:
    machine, ranks, model, count = case
    request = Request(load_preset(machine, ranks), Job(load_model(model), 1, count))
    stock = replace(request, job=replace(request.job, stock=True)).price(
        resolve(request.topology, scheme="zero3")
    )
    ranking = rank_plans(ZeroTopoConfig.parse({}), request)
    lossy, pipeline = ranking.faster, best_pipeline(request)
    cells = [machine, str(ranks), model, str(count), format_seconds(stock.seconds)]
    cells += [_gain(stock, ranking.best), "-" if lossy is None else _gain(stock, lossy)]
    divided = rank_tensor(ZeroTopoConfig.parse({}), request)
    best = divided[0].best if divided else None
    cells += [
        "none fits" if best is None else f"{_gain(stock, best)}, TP {best.request.job.tensor}"
    ]
    return [*cells, "none fits" if pipeline is None else _gain(stock, pipeline)]


def _gain(stock: Price, other: Price) -> str:
    """Times faster, and the range: overlap from none to all, computation as far off as it may be;
    for both alike.
    """
    found = []
    for overlap in (0.0, 1.0):
        for sign in (1, -1):
            steps = [_seconds(price, overlap, sign) for price in (stock, other)]
            found.append(steps[0] / steps[1])
    return f"{stock.seconds / other.step.seconds:.2f} ({min(found):.2f} - {max(found):.2f})"


def _seconds(price: Price, overlap: float, sign: int) -> float:
    rates, job = price.request.rates, replace(price.request.job, overlap=overlap)
    share = 1 + sign * rates.spread.get("compute", UNKNOWN_SPREAD)
    config = replace(price.config, topology=price.request.machine)
    return price.predict(config, job, replace(rates, peak_flops=rates.peak_flops * share)).seconds


def muon_steps() -> list[str]:
    """What the page of optimizers says Muon adds to a step."""
    job, muon = Job(load_model("gpt-neox-20b"), 1, 8), method_of({"optimizer": {"type": "Muon"}})
    steps = []
    for place in ("node", "world"):
        request = Request(load_preset("frontier", 384), job)
        config = resolve(request.topology, scheme="topo", optimizer=place)
        adam, other = (
            replace(request, job=own).price(config).seconds
            for own in (job, replace(job, muon=muon))
        )
        steps += [f"{other - adam:.2f} s", f"{adam:.2f} s"]
    return ['adds {} to AdamW\'s step of {} with "node", and {} to {} with "world"'.format(*steps)]


TOKENS = 2048


def balance_rows() -> list[str]:
    """How long the link between nodes takes for ZeRO-3's bytes, over the computation for the same
    micro-batch.

    Of each parameter a rank sends 6 bytes (two gathers, one reduction) and computes 8 FLOP a token.
    """
    rows = []
    for name in (name for name in preset_names() if name != "single-node"):
        machine = load_machine(name)
        assert machine.rates is not None
        emulated = name.startswith("emulated")
        tokens = record("cluster-t8")["settings"]["setup"]["context"] if emulated else TOKENS
        balance, work = machine.rates.flops / machine.links["world"].bandwidth, 8 * tokens / 6
        rows.append(
            row(
                [
                    f"`{name}`",
                    f"{tokens:,}",
                    f"{work:,.0f}",
                    f"{balance:,.0f}",
                    f"{balance / work:.1f}",
                ]
            )
        )
    return rows


# -- Aurora ----------------------------------------------------------------------------------------

AURORA_70B = Transformer(
    "AuroraGPT-70B", 80, 8192, 64, 8, 32000, 8192, 28672, gated=True, biases=False
)
PIPELINE_TFLOPS = MappingProxyType({1: 10.26, 2: 17.75, 4: 28.93, 8: 42.27, 16: 54.66, 32: 64.02})
"""Micro-batches of a replica -> TFLOP/s of a tile: 8 stages x 2 tensor parallel ranks, ZeRO-1, 96
tiles.
"""
HPZ_TFLOPS = MappingProxyType(
    {(96, 1): 47.60, (96, 2): 55.69, (96, 4): 59.66, (96, 8): 62.19, (192, 1): 57.6}
)
"""(tiles, micro-batches of a rank) -> TFLOP/s of a tile: ZeRO-3 with hpZ over a node."""


def aurora(tiles: int) -> Topology:
    """Aurora: 196 GB/s between the tiles of a GPU and 15 between GPUs, as ALCF measured; 8 adapters
    of 25 for 12.
    """
    links = {"gpu": Link(196e9, 10e-6), "node": Link(15e9, 10e-6), "world": Link(200e9 / 12, 20e-6)}
    return Topology("aurora", tiles // 12, 6, 2, links=links, memory_per_rank=64 * 2**30)


@cache
def aurora_rates() -> Rates:
    """Rates whose computation is fitted to one number: 64.02 TFLOP/s of the pipeline at 32
    micro-batches.
    """
    rates = Rates(100e12, 1.0, 1e12, 0.7, {"world": 0.8})
    for _ in range(20):
        rates = replace(
            rates, peak_flops=rates.peak_flops * PIPELINE_TFLOPS[32] / pipeline_tflops(32, rates)
        )
    return rates


def pipeline_tflops(count: int, rates: Rates) -> float:
    """TFLOP/s of the pipeline with so many micro-batches of a replica; a rank's share of them is
    linear.
    """
    plan, job = Pipeline(aurora(96), 8, 2), Job(AURORA_70B, 1, 1)
    one, two = (pipeline_step(plan, replace(job, micro_batches=k), rates).seconds for k in (1, 2))
    share = count / (plan.stages * plan.tensor)
    return share * job.flops / (one + (share - 1) * (two - one)) / 1e12


def hpz_tflops(tiles: int, count: int, overlap: float = 0.0) -> float:
    """TFLOP/s of ZeRO-3 with hpZ, sent as unmodified DeepSpeed sends it."""
    config = resolve(aurora(tiles), scheme="zero3", secondary="node")
    job = Job(AURORA_70B, 1, count, stock=True, overlap=overlap)
    return predict_step(config, job, aurora_rates()).tflops_per_gpu


def aurora_rows() -> list[str]:
    """Published TFLOP/s of Aurora's 70B model and the prediction."""
    rows = []
    for count, measured in PIPELINE_TFLOPS.items():
        found = f"{pipeline_tflops(count, aurora_rates()):.1f}"
        rows.append(
            row(
                [
                    "pipeline 8 x tensor 2, ZeRO-1",
                    "96",
                    str(6 * count),
                    f"{measured:.1f}",
                    found,
                    "-",
                ]
            )
        )
    for (tiles, count), measured in HPZ_TFLOPS.items():
        none, all_of_it = (f"{hpz_tflops(tiles, count, overlap):.1f}" for overlap in (0.0, 1.0))
        rows.append(
            row(
                [
                    "ZeRO-3 with hpZ",
                    str(tiles),
                    str(tiles * count),
                    f"{measured:.1f}",
                    none,
                    all_of_it,
                ]
            )
        )
    return rows


GAINS: Mapping[str, Callable[[], list[Any]]] = MappingProxyType(
    {
        "gain": gain_rows,
        "tensor": tensor_rows,
        "experts": expert_rows,
        "balance": balance_rows,
        "aurora": aurora_rows,
    }
)
"""Marker of a page -> rows of its table."""
