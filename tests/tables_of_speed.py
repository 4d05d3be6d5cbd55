# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables of speed, bytes and launches in README and docs, as the records have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from tests.documents import record, row
from zero_topo.quant.spec import NF4
from zero_topo.units import format_bytes

# Processes that computed in the minute before, above the eight ranks of a run that just ended
BUSY = 10


COMPARED = ("zero3", "zero++", "paper", "topo", "topo-q4", "codes-q4", "zero2-q4")
DENSE = (*COMPARED[:5], "topo-q4-gpu", *COMPARED[5:])
TERNARY = ("topo-ternary", "node-ternary", "zero2-ternary")
IN_SHORT = MappingProxyType(
    {
        **{name: f"`{name}`" for name in COMPARED[:4]},
        "codes-q4": "`topo`, quantized `sync`",
        "zero2-q4": "`topo-zero2`, quantized `sync`",
    }
)
"""The schemes of the README, as a user writes them."""
SPARSE = ("topo-oktopk", "topo-radius", "topo-tagc", "topo-scape")


def cluster_rows(slowest: str, schemes: tuple[str, ...]) -> list[str]:
    """A table of schemes on the emulated cluster, with one and eight micro-batches, from the record
    committed.
    """
    optimizers = {
        job["scheme"]: job["optimizer"] for job in record("cluster-t8")["settings"]["jobs"]
    }
    found, rows = _cluster(slowest=slowest), []
    for name in schemes:
        cells = [f"`{name}`", optimizers[name]]
        for count in (1, 8):
            result, faster = found[name, count]
            cells += [
                format_bytes(result["uplink_bytes_per_step_per_node"]),
                _spread(result),
                faster,
            ]
        rows.append(row(cells))
    return rows


def cluster_rows_in_short() -> list[str]:
    """Medians of some schemes, with one and eight micro-batches."""
    found, rows = _cluster(), []
    for name, words in IN_SHORT.items():
        cells = [
            (f"{_median(result):.2f} s", faster)
            for result, faster in (found[name, count] for count in (1, 8))
        ]
        rows.append(row([words, *cells[0], *cells[1]]))
    return rows


def muon_rows() -> list[str]:
    """The table of Muon on the emulated cluster, from the record committed; steps of a busy machine
    are left out.
    """
    content = record("cluster-t8-muon")
    optimizers = {job["scheme"]: job["optimizer"] for job in content["settings"]["jobs"]}
    busy = content["machine"]["load_average"][0] > BUSY
    rows = []
    for (name, count), (result, _) in _cluster("cluster-t8-muon").items():
        sent = format_bytes(result["uplink_bytes_per_step_per_node"])
        step = "-" if busy else f"{_median(result):.2f} s"
        rows.append(row([str(count), f"`{name}`", optimizers[name], sent, step]))
    return rows


def fsdp_rows() -> list[str]:
    """The table of FSDP2 on the emulated cluster, with one micro-batch, from the record."""
    rows = []
    for (name, _), (result, faster) in _cluster("cluster-t8-fsdp", "fsdp").items():
        sent = format_bytes(result["uplink_bytes_per_step_per_node"])
        rows.append(row([f"`{name}`", sent, _spread(result), faster]))
    return rows


def tensor_rows() -> list[str]:
    """The table of tensor parallelism on the emulated cluster, from the record."""
    rows = []
    for (name, count), (result, faster) in _cluster("cluster-t8-tensor", "stock-ring").items():
        sent = format_bytes(result["uplink_bytes_per_step_per_node"])
        rows.append(row([str(count), f"`{name}`", sent, _spread(result), faster]))
    return rows


def _spread(result: Any) -> str:
    step = result["step_s"]
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
    single = [row for row in results if row["threads"] == 1]

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


def scale_rows() -> list[str]:
    """The table of launches, from the record committed."""
    results = record("scale")["results"]
    found = {(row["scheme"], row["ranks"]): row["launches_per_parameter"] for row in results}
    return [
        f"| `{scheme}` | {' | '.join(f'{found[scheme, ranks]:.1f}' for ranks in (16, 384, 75264))} "
        "|"
        for scheme in dict.fromkeys(row["scheme"] for row in results)
    ]


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
        step = found["step_seconds"]
        spread = f"{step['median']:.2f} s ({step['min']:.2f} - {step['max']:.2f})"
        speed = found["tokens_per_s"]
        rows.append(row([name, spread, f"{speed:,.0f}", f"{speed / stock:.2f}"]))
    return rows


def gpu_h100_rows() -> list[str]:
    """Steps and memory of a billion parameters on two ranks of an H100, from the record
    committed.
    """
    rows = []
    for name, found in record("gpu-h100")["large"]["schemes"].items():
        step = found.get("step_seconds")
        if step is not None:
            spread = f"{step['median']:.2f} s ({step['min']:.2f} - {step['max']:.2f})"
            rows.append(row([name, spread, f"{found['peak_bytes'] / 1e9:.1f} GB"]))
    return rows


def gpu_time_rows() -> list[str]:
    """What schemes add to the model's own time on the device, one rank of 384, from the record
    committed.
    """
    schemes = record("gpu-times")["schemes"]
    own = schemes["model"]["device_ms"]
    rows = []
    for name, found in schemes.items():
        if name == "model":
            continue
        added = [found["device_ms"][phase]["median"] - own[phase]["median"] for phase in own]
        rows.append(
            row([f"`{name}`", *(f"{value:.1f}" for value in added), str(found["launches"] // 2)])
        )
    return rows


def _median(result: Any) -> float:
    return float(result["step_s"]["median"])


def _floor(result: Any) -> float:
    return float(result["floor_s"]["serial"])


SPEEDS: Mapping[str, Callable[[], list[str]]] = MappingProxyType(
    {
        "cluster": partial(cluster_rows, "zero3", (*DENSE, *TERNARY)),
        "cluster, short": cluster_rows_in_short,
        "cluster, sparse": partial(
            cluster_rows, "all-reduce", ("all-reduce", *DENSE[3:], *TERNARY, *SPARSE)
        ),
        "cluster, muon": muon_rows,
        "cluster, fsdp": fsdp_rows,
        "cluster, tensor": tensor_rows,
        "quantizers": partial(quantizer_rows, "quantizers-cpu"),
        "quantizers, AVX2": partial(quantizer_rows, "quantizers-avx2"),
        "quantizers, GPU": partial(quantizer_rows, "quantizers-gpu"),
        "gpu, parity": gpu_parity_rows,
        "gpu, large": gpu_large_rows,
        "gpu, H100": gpu_h100_rows,
        "gpu, times": gpu_time_rows,
        "scale": scale_rows,
    }
)
"""By the name in the page's comment: the rows that the record gives."""
