# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a step costs must not grow with the number of nodes, nor with layers of the code: launches
and Python calls are counted, in pretended worlds of any size.

A launch is an ATen operation that is neither a view nor an allocation, a call of a kernel, or a
collective.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import FrameType, MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bare import BareStep, bare_engine, fake_world, matrices
from benchmarks.counting import Counts, Launches, count, total
from tests.launching import ROOT
from tests.marks import late, often
from tests.plans import resolve
from tests.ranks import worlds
from zero_topo.config import ResolvedConfig
from zero_topo.quant import reference_sparse
from zero_topo.topology.presets import emulated

PARAMS = 32
PER_PARAMETER = 12
PER_RUN = 3
GROWTH = 1.2
FEW, MANY, ALL = 2, 48, 9408
"""Nodes of 8 ranks: all are as many as Frontier has."""

SCHEMES: dict[str, dict[str, Any]] = {
    "zero3": {"scheme": "zero3"},
    "zero++": {"scheme": "zero++"},
    "hsdp": {"scheme": "hsdp"},
    "gpu": {"weights": "gpu", "gradients": "gpu", "optimizer": "gpu"},
    "paper": {"scheme": "paper"},
    "topo": {"scheme": "topo", "quantize": {"resident": None}},
    "scatter-gpu": {"scheme": "topo", "gradients": "gpu"},
    "replicated": {"weights": "rank", "gradients": "rank", "optimizer": "world"},
    "codes": {"scheme": "topo", "quantize": {"resident": "int8"}},
    "codes-whole": {
        "scheme": "topo",
        "weights": "rank",
        "secondary": None,
        "quantize": {"resident": "int8"},
    },
}
DENSE: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense-bf16": {"sync": {"mode": "dense", "dtype": "bf16"}},
    "all-reduce": {"sync": {"mode": "dense", "reduce": "all_reduce"}},
    "int8": {"sync": {"mode": "quantized", "bits": 8}},
    "nf4": {"sync": {"mode": "quantized"}},
}
CODES = ("codes", "codes-whole")
SPARSE: dict[str, dict[str, Any]] = {
    **{name: {"sync": sync} for name, sync in worlds.SPARSE.items()},
    "oktopk-whole": {"sync": {**worlds.OKTOPK, "sharded": False}},
    "scape": {"optimizer": "node", "sync": {"mode": "scape"}},
}
CASES = {
    **{f"{s}+{m}": SCHEMES[s] | DENSE[m] for s in SCHEMES for m in ("dense", "nf4")},
    **{f"topo+{mode}": SCHEMES["topo"] | DENSE[mode] for mode in DENSE},
    **{f"topo+{mode}": SCHEMES["topo"] | SPARSE[mode] for mode in SPARSE},
    **{f"codes+{mode}": SCHEMES["codes"] | SPARSE[mode] for mode in ("oktopk", "ternary")},
}
WAITS = ("oktopk", "oktopk-whole", "sharded", "tagc")
"""Modes whose hosts wait for the lengths of messages."""
OFTEN = [name for name in CASES if name.partition("+")[0] in ("zero3", "zero++", "topo", "codes")]


def on(block: dict[str, Any], nodes: int) -> ResolvedConfig:
    """A block on so many nodes of 4 GPUs x 2 GCDs."""
    return resolve(emulated(nodes, 4, 2), **block, overlap=False)


def numels(ranks: int, width: int = 8) -> list[int]:
    """Parameters of which each rank stores ``width`` elements or one more, some with padding at the
    end.
    """
    return [width * ranks, width * ranks - 5, (width + 1) * ranks, (width + 1) * ranks - 1] * (
        PARAMS // 4
    )


@cache
def counted(name: str, nodes: int, together: int | None = None) -> Mapping[str, Counts]:
    """Counts of a step by phase; sparse modes may do other work in each second one."""
    steps = 2 if name.partition("+")[2] in SPARSE else 1
    width = 64 if name.partition("+")[0] in CODES else 8  # a block, so that half of them have codes
    return count(on(CASES[name], nodes), numels(8 * nodes, width), together, steps)


def launched(name: str, nodes: int, together: int | None = None) -> float:
    """Launches of a step for each parameter."""
    return total(counted(name, nodes, together)) / PARAMS


@pytest.mark.parametrize(
    ("name", "nodes", "together"),
    [
        *((name, MANY, None) if name in OFTEN else late(name, MANY, None) for name in CASES),
        *(late(name, ALL, None) for name in ("zero3+dense", "topo+nf4", "codes+dense")),
        *(
            (name, MANY, 4)
            for name in ("zero3+dense", "zero+++dense", "gpu+nf4", "topo+nf4", "codes+dense")
        ),
    ],
)
def test_a_step_launches_no_more_on_many_nodes(name: str, nodes: int, together: int | None) -> None:
    """At most 12 launches for each parameter in a step, and as many on 384 ranks, or on Frontier's
    75,264, as on 16.

    But each run costs three launches, where collectives are of a few parameters each.

    The host waits for nothing but the size of changed codes, once in a publish, and in some modes
    for the number of what is selected.
    """
    scheme, _, mode = name.partition("+")
    if mode not in WAITS:
        waits = {"publish": 1} if scheme in CODES else {}
        counts = counted(name, FEW, together).items()
        assert {phase: found.syncs for phase, found in counts if found.syncs} == waits
    few, many = launched(name, FEW, together), launched(name, nodes, together)
    assert max(few, many) <= PER_PARAMETER + (PER_RUN / together if together else 0), (few, many)
    assert many <= GROWTH * few


@pytest.mark.parametrize("name", ["zero3", "zero++", "topo", "codes"])
def test_gathers_of_frozen_parameters_launch_no_more_on_many_nodes(name: str) -> None:
    """No more than those of the trained ones, on 16 ranks and on 384, and the host waits for
    nothing.
    """

    def launched(nodes: int) -> list[int]:
        found = Launches()
        parameters = matrices(numels(8 * nodes, 64))
        with fake_world(8 * nodes):
            engine = bare_engine(
                on(SCHEMES[name], nodes), parameters, torch.bfloat16, frozen=parameters
            )
            engine.restart()
            engine.restart_frozen()
            for weights, phase in zip(engine.sets, ("trained", "frozen"), strict=True):
                with found.phase(phase):
                    for gather in ("gather_forward", "gather_backward"):
                        weights.gather(range(len(parameters)), gather).wait()
        assert not any(counts.syncs for counts in found.phases.values())
        return [found.phases[phase].launches for phase in ("trained", "frozen")]

    (few, frozen), (many, frozen_many) = launched(FEW), launched(MANY)
    assert frozen <= few and frozen_many <= many <= GROWTH * few


ENOUGH_COLUMNS = 1024
"""Columns from which on a GPU's threads are busy where each scans a column."""


class SlowOperations(TorchDispatchMode):
    """Collects operations of torch that are slow on a GPU by their shapes; a CPU runs them as fast
    as others.

    Attributes:
        found: what is slow, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func._schema.name.partition("::")[2].rstrip("_"))
        if rule is not None and (slow := rule(*args)):
            self.found.append(f"{func._schema.name}: {slow}")
        return func(*args, **(kwargs or {}))


def scan(x: Tensor, dim: int, *_: Any) -> str:
    """torch gives each column of a scan over an outer dimension one thread, which walks all
    rows.
    """
    columns = x.shape[dim % x.dim() + 1 :].numel()
    return f"over dimension {dim} of {tuple(x.shape)}" if 1 < columns < ENOUGH_COLUMNS else ""


def copies(x: Tensor, times: Sequence[int], *_: Any) -> str:
    """A collective can be given the same memory for all ranks."""
    return f"{tuple(x.shape)}, {times[0]} times" if x.numel() > 1 else ""


def positions(mask: Tensor, *_: Any) -> str:
    """On a GPU of more than 256 multiprocessors the offsets of one-byte elements are not all
    written.
    """
    return f"a mask of {mask.dtype}" if mask.element_size() == 1 else ""


RULES: Mapping[str, Callable[..., str]] = MappingProxyType(
    {"cumsum": scan, "cummax": scan, "repeat": copies, "nonzero_static": positions}
)
"""Operation -> what is slow about a call of it, in words; empty if nothing is."""


NODE = {"scheme": "topo", "optimizer": "node"}
BACK = {f"replicated+{mode}": NODE | SPARSE[mode] for mode in ("oktopk", "tagc")}
"""Modes that send sums back to all peers, each of which owns other elements."""


@pytest.mark.parametrize("name", often([*OFTEN, *BACK], CASES | BACK))
def test_no_operation_of_a_step_is_slow_by_its_shape(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathers, scatters, sync and publish call no operation that leaves most of a GPU idle, or
    fails on a large one.
    """
    monkeypatch.setattr(reference_sparse, "_scans_half", lambda device: True)
    slow = SlowOperations()
    with fake_world(16):
        step = BareStep(on((CASES | BACK)[name], FEW), numels(16, 64))
        for _ in range(3):
            for do in step.phases().values():
                with slow:
                    do()
    assert not slow.found


@pytest.mark.parametrize("mode", often(("oktopk", "tagc", "scape"), SPARSE))
def test_a_monitor_makes_the_host_wait_once(mode: str) -> None:
    """However many runs and numbers a sparse mode has."""
    found = Launches()
    with fake_world(16):
        step = BareStep(on(SCHEMES["topo"] | SPARSE[mode], FEW), numels(16), together=4)
        for _ in range(3):
            for do in step.phases().values():
                do()
        with found.phase("report"):
            report = step.engine.gradients.mode.report()
    assert report["density"] > 0 and found.phases["report"].syncs == 1


PACKAGE = str(ROOT / "zero_topo")
MOST_CALLS: dict[str, tuple[int, ...]] = {
    "codes": (68, 87, 28, 92, 17),
    "topo": (80, 89, 28, 71, 17),
    "q4": (68, 82, 31, 92, 20),
    "sharded": (68, 192, 33, 92, 29),
}
"""Today's counts of gathers, scatter, sync, publish and the end of a step. Lower them when the path
of a step gets shorter.
"""


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_phase_makes_no_more_python_calls_than_it_did(name: str) -> None:
    """Of the package's functions, in a second step of two matrices."""
    calls: Counter[str] = Counter()

    def seen(phase: str, frame: FrameType, event: str, _: object) -> None:
        calls[phase] += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    with fake_world(8):
        step = BareStep(resolve(emulated(2, 2, 2), **worlds.BLOCKS[name]), [4096, 8192])
        for _ in range(2):
            calls.clear()
            for phase, do in step.phases().items():
                sys.setprofile(partial(seen, phase))
                do()
                sys.setprofile(None)
    phases = ("gather_forward", "scatter", "sync", "publish", "commit")
    for phase, most in zip(phases, MOST_CALLS[name], strict=True):
        assert calls[phase] <= most
