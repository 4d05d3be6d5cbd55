# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables of speed, bytes and launches in README and docs, as the records have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from tests.documents import record, row
from zero_topo.quant.spec import BLOCK, NF4
from zero_topo.units import format_bytes

CLUSTER = MappingProxyType(
    {
        "zero3": "`zero3`",
        "zero++": "`zero++`",
        "paper": "`paper`",
        "topo": "`topo`",
        "codes-q4": "`topo`, `quantized`",
        "zero2-q4": "`topo-zero2`, `quantized`",
        "topo-ternary": "`topo`, `ternary`",
        "zero2-ternary": "`topo-zero2`, `ternary`",
        "topo-oktopk": "`topo`, `oktopk`",
        "topo-radius": "`topo`, `radius`",
        "topo-tagc": "`topo`, `tagc`",
        "topo-scape": "`topo`, `scape`",
        "all-reduce": "no block",
    }
)
"""Schemes of the record that are shown, as a user writes them; INT4 sync, of as many bytes as NF4,
stands for quantized sync.
"""
IN_SHORT = MappingProxyType(
    {
        "zero3": '`"scheme": "zero3"`',
        "zero++": '`"scheme": "zero++"`',
        "paper": '`"scheme": "paper"`',
        "topo": '`"scheme": "topo"`',
        "codes-q4": '`"scheme": "topo", "sync": {"mode": "quantized"}`',
        "zero2-q4": '`"scheme": "topo-zero2", "sync": {"mode": "quantized"}`',
    }
)
"""Those of the README, as blocks."""


def cluster_rows(shown: Mapping[str, str], short: bool) -> list[str]:
    """The table of the emulated cluster, with one and eight micro-batches; in short medians and how
    much faster.
    """
    found, rows = _cluster(), []
    for name, words in shown.items():
        cells = [words]
        for count in (1, 8):
            result, faster = found[name, count]
            step = result["step_s"]
            sent = format_bytes(result["uplink_bytes_per_step_per_node"])
            cells += [f"{step['median']:.2f} s"] if short else [sent, _spread(step)]
            cells.append(faster)
        rows.append(row(cells))
    return rows


FSDP = MappingProxyType(
    {
        "fsdp-ring": "FSDP2",
        "hsdp-fsdp-ring": "FSDP2, HSDP: sharded in a node, replicated between nodes",
        "fsdp-paper": "`zero_topo.fsdp`, `paper`",
        "fsdp-q4": "`zero_topo.fsdp`, `paper`, quantized `sync` and `publish`",
    }
)
TENSOR = MappingProxyType(
    {
        "stock-ring": "DeepSpeed ZeRO-3",
        "topo": "`topo`",
        "stock-ring-tp2": "DeepSpeed ZeRO-3, TP",
        "topo-tp2": "`topo`, TP",
    }
)


def host_rows(name: str, shown: Mapping[str, str]) -> list[str]:
    """A table of the emulated cluster with one micro-batch, from a record; the first scheme shown
    is the baseline.
    """
    found, rows = _cluster(name, next(iter(shown))), []
    for scheme, words in shown.items():
        result, faster = found[scheme, 1]
        sent = format_bytes(result["uplink_bytes_per_step_per_node"])
        rows.append(row([words, sent, _spread(result["step_s"]), faster]))
    return rows


def _spread(step: Mapping[str, float]) -> str:
    return f"{step['median']:.2f} s ({step['min']:.2f} - {step['max']:.2f})"


def _cluster(
    name: str = "cluster-t8", slowest: str = "zero3"
) -> dict[tuple[str, int], tuple[Any, str]]:
    """Scheme and micro-batches -> result, and times faster than the slowest."""
    found = {
        (result["scheme"], result["micro_batches"]): result for result in record(name)["results"]
    }
    median = {key: result["step_s"]["median"] for key, result in found.items()}
    return {
        key: (result, f"{median[slowest, key[1]] / median[key]:.2f}")
        for key, result in found.items()
    }


def quantizer_rows(name: str) -> list[str]:
    """The table of the kernels' speed, from a record committed."""
    results = record(name)["results"]
    blocks = (NF4.block_size, BLOCK)
    single = [row for row in results if row["threads"] == 1 and row["block_size"] in blocks]

    def cell(row: dict[str, Any]) -> str:
        return f"{row['gb_per_s']:.1f} ({row['memcpy_ratio']:.2f})"

    rows = []
    for kind in dict.fromkeys((r["dtype"], r["bits"], r["block_size"]) for r in single):
        same = [r for r in single if (r["dtype"], r["bits"], r["block_size"]) == kind]
        cells = []
        for op in ("quantize", "dequantize", "dequantize_reduce"):
            found = sorted(
                (row for row in same if row["op"] == op), key=lambda row: -row["gb_per_s"]
            )
            (own,) = (row for row in found if row["backend"] == "native")
            others = [row for row in found if row["backend"] not in ("native", "reference")]
            cells += [cell(own), f"{cell(others[0])} {others[0]['backend']}" if others else "-"]
        dtype, bits, block = kind
        form = "NF4" if (bits, block) == (NF4.bits, NF4.block_size) else f"INT{bits}"
        rows.append(f"| {dtype.upper()} to {form}, {block} | {' | '.join(cells)} |")
    return rows


def gpu_parity_rows() -> list[str]:
    """How near losses of two ranks on one GPU are to unmodified ZeRO-3's, by case, from the record
    committed.
    """
    cases = record("gpu-parity")["cases"]
    return [row([case["case"], f"{case['difference']:.1e}"]) for case in cases]


def gpu_large_rows() -> list[str]:
    """Steps of a billion parameters on two ranks of one GPU, from the record committed."""
    schemes = record("gpu-large")["schemes"]
    stock = schemes["unmodified ZeRO-3"]["tokens_per_s"]
    rows = []
    for name, found in schemes.items():
        speed = found["tokens_per_s"]
        cells = [_spread(found["step_seconds"]), f"{speed:,.0f}", f"{speed / stock:.2f}"]
        rows.append(row([name, *cells]))
    return rows


def gpu_h100_rows() -> list[str]:
    """Steps and memory of a billion parameters on two ranks of an H100, from the record
    committed.
    """
    rows = []
    for name, found in record("gpu-h100")["large"]["schemes"].items():
        step = found.get("step_seconds")
        if step is not None:
            rows.append(row([name, _spread(step), f"{found['peak_bytes'] / 1e9:.1f} GB"]))
    return rows


SPEEDS: Mapping[str, Callable[[], list[str]]] = MappingProxyType(
    {
        "cluster": partial(cluster_rows, CLUSTER, short=False),
        "cluster, short": partial(cluster_rows, IN_SHORT, short=True),
        "cluster, fsdp": partial(host_rows, "cluster-t8-fsdp", FSDP),
        "cluster, tensor": partial(host_rows, "cluster-t8-tensor", TENSOR),
        "quantizers": partial(quantizer_rows, "quantizers-cpu"),
        "quantizers, AVX2": partial(quantizer_rows, "quantizers-avx2"),
        "quantizers, GPU": partial(quantizer_rows, "quantizers-gpu"),
        "gpu, parity": gpu_parity_rows,
        "gpu, large": gpu_large_rows,
        "gpu, H100": gpu_h100_rows,
    }
)
"""By the name in the page's comment: the rows that the record gives."""
