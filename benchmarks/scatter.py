# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks scatter``: what the INT4 scatter leaves of each gradient, by what shares a
block's scale.

The gradients are those of a transformer with biases, after some steps on the example's text. Each
rank of a node has the same ones, so that all error is that of one quantization. Three ways to send
a bucket:

- ``joined``: parameters one after the other, so that a block holds values of two.
- ``blocks``: each parameter begins a block. This is what the engine does.
- ``bf16``: matrices so, and parameters of one dimension in BF16, which is an encoding and a sum
  more per bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.records import GrowingRecord, Tick, record
from zero_topo.collectives.transport import shard_view
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import BYTES
from zero_topo.observe.console import figures_table, wide_console
from zero_topo.plan import Plan
from zero_topo.quant import ops
from zero_topo.quant.operands import View, at_blocks
from zero_topo.quant.operators import select
from zero_topo.quant.spec import BlockSpec, Cast, Format

INT4 = BlockSpec("int4")
BF16 = Cast("bf16")
WAYS = ("joined", "blocks", "bf16")
SHAPE = (4, 64)
HEAD_WIDTH = 64
PICTURES = ()


@dataclass(frozen=True)
class ScatterBench:
    """What to measure.

    Attributes:
        widths: of the transformer, multiples of 64.
        ranks: of a node, which is all ranks.
        steps: of Adam before the gradients are taken.
        layers: of the transformer.
    """

    widths: tuple[int, ...]
    ranks: tuple[int, ...]
    steps: int = 10
    layers: int = 2


def run(bench: ScatterBench, tick: Tick) -> GrowingRecord:
    """Measure every width and number of ranks.

    Yields:
        The record so far; ``results``: for each the ``bytes`` of a rank's message to another, and
        :func:`losses`.
    """
    settings = {"layers": bench.layers, "steps": bench.steps, "shape": SHAPE, "spec": str(INT4)}
    results: list[dict[str, Any]] = []
    for width in bench.widths:
        grads = gradients(width, bench.layers, bench.steps)
        for ranks in bench.ranks:
            results += [
                {"width": width, "ranks": ranks, "way": way, **sent(grads, ranks, way)}
                for way in WAYS
            ]
            tick(f"width {width}, {ranks} ranks", 1)
        yield record("scatter", settings, {"results": results})


def gradients(width: int, layers: int, steps: int) -> dict[str, Tensor]:
    """Of each parameter, in the order in which a backward pass is done with them."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, width // HEAD_WIDTH, 4 * width, 0.0, batch_first=True, norm_first=True
    )
    inner = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(
        nn.Embedding(BYTES, width), inner, nn.LayerNorm(width), nn.Linear(width, BYTES)
    )
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    text = Corpus.load(None, SHAPE[1]).train
    for step in range(steps + 1):
        tokens, targets = batch(text, SHAPE, 0, step, 0)
        adam.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        if step < steps:
            adam.step()
    return {
        name: param.grad
        for name, param in reversed(list(model.named_parameters()))
        if param.grad is not None
    }


def sent(grads: Mapping[str, Tensor], ranks: int, way: str) -> dict[str, Any]:
    """What a bucket of all gradients costs, and what comes."""
    small = {name for name, grad in grads.items() if grad.dim() == 1 and way == "bf16"}
    came = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    plan = Plan(ranks, 1, None, ranks, ranks)
    nbytes = 0
    for names, spec in ((grads.keys() - small, INT4), (small, BF16)):
        read, written = (
            [shard_view(of[n].view(-1), plan, ranks) for n in of if n in names]
            for of in (grads, came)
        )
        if names:
            nbytes += through(read, written, spec, 1 if way == "joined" else spec.block_size)
    return {"bytes": nbytes, **losses(grads, came)}


def losses(grads: Mapping[str, Tensor], came: Mapping[str, Tensor]) -> dict[str, Any]:
    """What is lost of gradients, relative to the norm of each.

    Returns:
        Of vectors the mean share of elements that became ``zeros``, the mean ``error``, and the
        ``largest`` with the name of its parameter, ``worst``; of ``matrices`` the mean error.
    """
    errors = {name: float((came[name] - grad).norm() / grad.norm()) for name, grad in grads.items()}
    vectors = [name for name, grad in grads.items() if grad.dim() == 1]
    zeros = [float(((came[name] == 0) & (grads[name] != 0)).float().mean()) for name in vectors]
    worst = max(vectors, key=errors.__getitem__)
    return {
        "zeros": fmean(zeros),
        "error": fmean(errors[name] for name in vectors),
        "largest": errors[worst],
        "worst": worst,
        "matrices": fmean(errors[name] for name in errors.keys() - vectors),
    }


def through(read: Sequence[View], written: Sequence[View], spec: Format, block: int) -> int:
    """Encode pieces and decode them into others; bytes of a message."""
    select(torch.device("cpu"))
    messages = ops.quantize(at_blocks(read, block), spec)
    ops.dequantize(messages, spec, at_blocks(written, block))
    return messages.shape[1]


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of cells for each width and number of ranks; those of the three ways with arrows
    between them.
    """
    cells = []
    for first in range(0, len(results), len(WAYS)):
        ways = results[first : first + len(WAYS)]
        shares = [
            [f"{way[key]:.0%}" for way in ways] for key in ("zeros", "error", "largest", "matrices")
        ]
        figures = [*shares, [f"{way['bytes']:,}" for way in ways]]
        cells.append(
            [
                f"{ways[0]['width']:,}",
                str(ways[0]["ranks"]),
                *(" → ".join(found) for found in figures),
            ]
        )
    return cells


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record's table."""
    console = wide_console(120, console)
    console.print(
        "Zeros, mean and largest error of vectors; error of matrices; bytes to each rank: "
        f"{' → '.join(WAYS)}"
    )
    made = figures_table(("width", "ranks", "zeros", "error", "largest", "matrices", "bytes"))
    for cells in rows(content["results"]):
        made.add_row(*cells)
    console.print(made)


def draw(content: Mapping[str, Any]) -> dict[str, Any]:
    """No picture."""
    return {}
