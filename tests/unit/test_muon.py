# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the planner counts of Muon: states, exchange and Newton-Schulz, by hand; and that equal
matrices are one batch.

Two layers of width 64 have eight matrices: 64 x 192, 64 x 64 and two of 64 x 256 each, 98,304
elements. All sizes are multiples of 16 ranks, so nothing is padded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.counting import Launches
from tests.commands import Run
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.cost.job import Job
from zero_topo.cost.model_files import load_model
from zero_topo.cost.planner import Request
from zero_topo.cost.step import newton_schulz_flops, owner_flops
from zero_topo.cost.transformer import SEQUENCE, VOCABULARY, Transformer
from zero_topo.hook.muon import orthogonalized
from zero_topo.topology.presets import load_preset

TWO_LAYERS = Transformer("two layers", 2, 64, 1, 1, VOCABULARY, SEQUENCE, 256)
ELEMENTS = 98_304
SENT = 2 * 2 * ELEMENTS
"""Bytes of all gradients to the owners and of all updates back, in 16 bits."""


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """DeepSpeed compiles Muon's functions, which takes minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def config(optimizer: str, **block: Any) -> dict[str, Any]:
    """A DeepSpeed config on 16 ranks of Frontier."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "reduce_scatter": False},
        **({"zero_topo": {"topology": "frontier", **block}} if block else {}),
    }


@pytest.mark.parametrize(("method", "flops"), [("gram", 11_534_336), ("standard", 13_107_200)])
def test_flops_are_those_of_deepspeeds_functions(method: str, flops: int) -> None:
    """By hand for 64 x 128; square and upright matrices and stacks too, as torch counts them."""
    assert newton_schulz_flops((64, 128), method) == flops
    for shape in ((1, 64, 128), (1, 48, 48), (3, 80, 32)):
        with FlopCounterMode(display=False) as counter:
            orthogonalized(torch.randn(shape), [None] * shape[0], method)
        assert newton_schulz_flops(shape, method) == counter.get_total_flops()


def test_the_busiest_owner_computes_the_largest_of_each_turn() -> None:
    """Three owners of five matrices: the first gets the largest and the fourth."""
    sizes = [(8, 8), (8, 64), (8, 16), (8, 48), (8, 32)]
    assert owner_flops(sizes, 3, "gram") == sum(
        newton_schulz_flops((8, n), "gram") for n in (64, 16)
    )


def price(muon: str | None, stock: bool = False, **block: Any) -> Any:
    """What a step costs on 16 ranks of Frontier."""
    request = Request(load_preset("frontier", 16), Job(TWO_LAYERS, 1, 8, muon=muon, stock=stock))
    return request.price(resolve_config(ZeroTopoConfig.parse(block), request.topology))


@pytest.mark.parametrize(("scheme", "owners"), [("zero3", 16), ("hsdp", 8)])
def test_memory_bytes_and_seconds_of_a_plan(scheme: str, owners: int) -> None:
    """A rank stores 4 bytes less of each element of its shard, sends its part of the matrices,
    computes one.
    """
    muon, adam = price("gram", scheme=scheme), price(None, scheme=scheme)
    assert adam.stored - muon.stored == 4 * ELEMENTS // owners
    (key,) = muon.sent.keys() - adam.sent.keys()
    assert key == ("matrices", "world" if owners == 16 else "node")
    sent = SENT // owners * (owners - 1) // owners
    assert muon.sent == {**adam.sent, key: sent}
    rates, link = muon.request.rates, muon.request.machine.links["node"]
    steps = muon.step.breakdown, adam.step.breakdown
    computed, saved = 2 * 64**2 * (4 * 256 + 14 * 64), 8 * ELEMENTS // owners
    gained = computed / rates.flops - saved / rates.memory
    assert steps[0]["optimizer"] - steps[1]["optimizer"] == pytest.approx(gained)
    if owners == 8:  # six of a rank's seven peers are on other GPUs of the node
        seconds = link.latency + sent * 6 / 7 / (
            link.bandwidth * rates.link_efficiency.get("node", 1.0)
        )
        assert steps[0]["matrices"] == pytest.approx(seconds)


def test_stock_reduces_on_all_ranks_and_gathers_four_times() -> None:
    """Its all-reduce is two reduce-scatters; it gathers gradients, momenta, updates and new momenta
    on all ranks.
    """
    muon, adam = price("gram", stock=True, scheme="zero3"), price(None, stock=True, scheme="zero3")
    scatter = ("scatter", "world")
    gathered = 4 * 2 * ELEMENTS // 16 * 15
    assert muon.sent == {
        **adam.sent,
        scatter: 2 * adam.sent[scatter],
        ("matrices", "world"): gathered,
    }
    assert muon.step.breakdown["scatter"] == pytest.approx(
        2 * adam.step.breakdown["scatter"],
        rel=0.03,  # packing is not doubled
    )


def test_muon_has_the_matrices_of_layers() -> None:
    """Not those of the embedding and the head, nor vectors."""
    model = load_model("llama-2-7b")
    elements = sum(numel for numel, muon in zip(model.numels(), model.whole(), strict=True) if muon)
    assert elements == 32 * (4 * 4096**2 + 3 * 4096 * 11008)


MODEL = ("--model", "gpt-neox-20b", "--ranks", "16")
LARGE = 44 * 12 * 6144**2
COMMANDS = {
    "check": ("check", "{file}", *MODEL),
    "plan": ("plan", *MODEL, "--machine", "frontier", "--set", "deepspeed_config={file}"),
    "simulate": (
        "simulate",
        *MODEL,
        "--micro-batches",
        "8",
        "--schemes",
        "{file}",
        "--set",
        "checkpointing=true",
    ),
    "migrate": ("migrate", "{file}", *MODEL, "--machine", "frontier"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_counts_muon(command: str, run: Run, tmp_path: Path) -> None:
    """As the optimizer of the config that it reads: twelve squares of the width in each of 44
    layers.
    """
    found = []
    for optimizer in ("Muon", "AdamW"):
        file = tmp_path / f"{optimizer}.json"
        file.write_text(
            json.dumps(config(optimizer, **({} if command == "migrate" else {"scheme": "hsdp"})))
        )
        status, out, err = run(*(word.format(file=file) for word in COMMANDS[command]), "--json")
        assert (status, err) == (0, "")
        found.append(json.loads(out))
    muon, adam = (_costs(command, content) for content in found)
    owners, domain = (16, "world") if command == "migrate" else (8, "node")
    sent = 2 * 2 * LARGE // owners * (owners - 1) // owners
    assert (adam[0] - muon[0], muon[1][domain] - adam[1][domain]) == (4 * LARGE // owners, sent)


def _costs(command: str, content: Any) -> tuple[int, dict[str, int]]:
    """Bytes on a rank, and bytes that it sends, by domain."""
    if command == "check":
        return content["cost"]["stored"], content["cost"]["sent_by_domain"]
    if command == "simulate":
        (point,) = content["results"]
        return point["stored"], point["sent_by_domain"]
    if command == "plan":
        (scheme,) = [of for of in content["schemes"] if of["scheme"] == "hsdp"]
        return sum(scheme["memory"].values()), scheme["sent_by_domain"]
    return sum(content["costs"]["memory"]["after"].values()), content["costs"]["sent_by_domain"][
        "after"
    ]


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_equal_matrices_are_one_batch(method: str, heads: int | None) -> None:
    """Sixteen take no more launches than two, whole or head by head, and give what each gives by
    itself.
    """
    matrices, found = torch.randn(16, 32, 24), Launches()
    for count in (2, 16):
        with found.phase(str(count)):
            together = orthogonalized(matrices[:count].clone(), [heads] * count, method)
    alone = [orthogonalized(matrix[None].clone(), [heads], method)[0] for matrix in matrices]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-5)
    assert found.phases["2"].launches == found.phases["16"].launches
