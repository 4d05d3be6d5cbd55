# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.one_of_many checks|more|times|calls|launches FOLDER`: rank 0 of 384 alone,
on some of 20B's layers.

Its kernels, streams and shard sizes are those of the real job under DeepSpeed. A collective fills
what it receives with copies of what is sent, so what is measured is the rank's own work, and no
step is skipped for what memory held before.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import zero_topo
from benchmarks import records
from benchmarks.bare import fake_world
from benchmarks.counting import Launches
from benchmarks.schemes import KNOWN
from benchmarks.training import build_model, engine_of
from benchmarks.training_setup import TrainingSetup
from tests.device import DEVICE, ON_GPU, device_name, synchronize
from tests.gpu.traces import traced

RANKS = 384
TOPOLOGY = {"emulated": {"nodes": RANKS // 8, "gpus_per_node": 4, "gcds_per_gpu": 2}}
LAYERS, WIDTH, CONTEXT, BATCH = (4, 6144, 2048, 2) if ON_GPU else (4, 64, 16, 2)
SETUP = TrainingSetup(
    LAYERS, WIDTH, CONTEXT, BATCH, bucket_numel=500_000_000, prefetch_numel=50_000_000
)
SCHEMES = ("stock", "zero++", "topo", "topo-16bit", "topo-nf4")
PERSISTENT = {"stage3_param_persistence_threshold": 100_000}  # DeepSpeed's default
ROWS = (
    *((scheme, scheme, {}) for scheme in SCHEMES),
    *((f"{scheme}-persistent", scheme, PERSISTENT) for scheme in ("stock", "topo")),
)
"""Name, scheme and keys of ``zero_optimization`` of each row of the times."""
STEPS, TURNS, WARM_UP = 4, 12 if ON_GPU else 4, 3
FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PACKAGE = str(Path(zero_topo.__file__).parent) + os.sep
CLOCKS = ("host_ms", "device_ms")
KINDS = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
PHASES = ("forward", "backward", "step")
WAITS = 1  # of the host in a step of ours: for the size of the changed weights


@contextmanager
def one_of_many() -> Iterator[None]:
    """This process is rank 0; a collective copies what it sends to all that it would receive."""

    def collective(received: Tensor, sent: Tensor) -> Any:
        parts = max(1, received.numel() // max(1, sent.numel()))
        table = received.view(parts, -1)
        in_place = sent.untyped_storage().data_ptr() == received.untyped_storage().data_ptr()
        if in_place:  # rank 0 sends the first part from where the others receive it
            table = table[1:]
        table.copy_(sent.view(-1)[: received.numel() // parts])
        return SimpleNamespace(wait=lambda: None)

    def copied(output_tensor: Tensor, input_tensor: Tensor, *group: Any, **how: Any) -> Any:
        return collective(output_tensor, input_tensor)

    def swap(received: Tensor, sent: Tensor, *sizes: Any, **how: Any) -> Any:
        return collective(received, sent[: len(received)])

    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    kinds = ("into_tensor", "tensor", "single")
    names = [f"{name}_{kind}" for name in ("all_gather", "reduce_scatter") for kind in kinds]
    own: dict[str, Any] = dict.fromkeys((name for name in names if hasattr(dist, name)), copied)
    own["all_to_all_single"] = swap
    with patch.dict(os.environ, alone), fake_world(RANKS), patch.multiple(dist, **own):
        yield


def config(scheme: str, micro_batches: int, zero: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """DeepSpeed's, of a scheme on 48 nodes."""
    found = SETUP.of_job(KNOWN[scheme].job_on(TOPOLOGY), micro_batches)
    found["zero_optimization"] |= {"overlap_comm": ON_GPU, **zero}
    return {**found, "zero_force_ds_cpu_optimizer": False, **keys}


def batch() -> Tensor:
    """Tokens of a micro-batch."""
    return torch.randint(
        0, 256, (SETUP.batch, SETUP.context), generator=torch.Generator().manual_seed(1)
    ).to(DEVICE)


def step(engine: Any, tokens: Tensor, after: Callable[[], None] = lambda: None) -> float:
    """One micro-batch and the optimizer's step; ``after`` is called after each phase. Returns the
    loss.
    """
    loss = engine(tokens, tokens)
    after()
    engine.backward(loss)
    after()
    engine.step()
    after()
    return float(loss.detach())


def taken_step(engine: Any, tokens: Tensor, after: Callable[[], None] = lambda: None) -> float:
    """A step that must not be skipped: the time of one without an optimizer is no baseline."""
    loss = step(engine, tokens, after)
    if engine.optimizer.overflow:
        raise RuntimeError("the optimizer skipped a step, so its time would not count")
    return loss


# -- checks ----------------------------------------------------------------------------------------


def checks(folder: Path) -> int:
    """Whether all overlap or none changes a bit of the loss, BF16; 1 if so, or if the host waits
    too often.

    The first setting runs twice: if its losses differ, the GPU's own kernels do, and a comparison
    would prove nothing.
    """
    cases = compare("bf16", {}, {}, [(True, True), (True, True), (False, False)])
    save(folder, "checks", {"cases": cases})
    return int(not all(case["right"] for case in cases))


def more(folder: Path) -> int:
    """The other settings: one overlap alone, FP16 (on a GPU), the optimizer on the host; 1 if one
    is wrong.
    """
    both = (True, True)
    cases = compare("bf16", {}, {}, [both, (True, False), (False, True)])
    cases += compare("bf16", OFFLOAD, {}, [both, (False, False)])
    if ON_GPU:
        cases += compare("fp16", {}, FP16, [both, (False, False)])
    save(folder, "more", {"cases": cases})
    return int(not all(case["right"] for case in cases))


def compare(
    dtype: str, zero: Mapping[str, Any], keys: Mapping[str, Any], overlaps: list[tuple[bool, bool]]
) -> list[dict[str, Any]]:
    """Train with each pair of zero_topo's ``overlap`` and DeepSpeed's ``overlap_comm``; one entry
    for each.

    ``right``: the losses have the first one's bits and are finite, and without offload the host
    waits `WAITS` times.
    """
    cases: list[dict[str, Any]] = []
    for overlap, overlap_comm in overlaps:
        ds = config("topo", 1, {"overlap_comm": overlap_comm, **zero}, **keys)
        ds["zero_topo"]["overlap"] = overlap
        case: dict[str, Any] = {"dtype": dtype, "zero": dict(zero), "overlap": overlap}
        case |= {"overlap_comm": overlap_comm, **looked_at(ds)}
        first = cases[0] if cases else case
        equal = case["losses"] == first["losses"]
        finite = all(map(math.isfinite, case["losses"]))
        few = bool(zero) or (case["host_waits"] or 0) <= WAITS
        cases.append({**case, "equal": equal, "finite": finite, "right": equal and finite and few})
        print({key: value for key, value in cases[-1].items() if key != "losses"}, flush=True)
    return cases


def looked_at(ds: dict[str, Any]) -> dict[str, Any]:
    """Losses, bytes of the device, and how often a line of zero_topo's waits for it in a step."""
    tokens = batch()[:1]
    # The faster attentions add gradients of queries by atomics, so that two equal runs differ.
    with engine_of(model(), ds) as engine, sdpa_kernel(SDPBackend.MATH):
        losses = [step(engine, tokens) for _ in range(STEPS)]
        memory = device_bytes() if ON_GPU else {}
        waits = own_waits(lambda: step(engine, tokens)) if ON_GPU else None
        engine.offload_states()
        if ON_GPU:
            memory["left_by_offload_states"] = torch.cuda.memory_allocated()
        engine.reload_states()
        losses += [step(engine, tokens) for _ in range(STEPS)]
        formulas = zero_topo.stats(engine).memory
    return {"losses": losses, "host_waits": waits, **memory, "formulas": formulas}


def device_bytes() -> dict[str, int]:
    """Of the device's memory, what is in use now and was at most."""
    most = torch.cuda.max_memory_allocated()
    return {"allocated": torch.cuda.memory_allocated(), "peak": most}


def own_waits(work: Callable[[], object]) -> int:
    """How often a line of zero_topo's makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    return sum(warning.filename.startswith(PACKAGE) for warning in caught)


def model() -> Any:
    """The layers, created on the device."""
    with DEVICE:
        return build_model(SETUP, 0)


# -- times -----------------------------------------------------------------------------------------


def times(folder: Path) -> int:
    """Milliseconds of each phase of each scheme, on the device and of the host, and beyond the
    model's own, and what two traced steps did on the device; 0.
    """
    tokens = batch()
    results = {"model": timed(partial(alone_step, model().bfloat16(), tokens))}
    for name, scheme, zero in ROWS:
        with engine_of(model(), config(scheme, 1, zero)) as engine:
            results[name] = timed(partial(taken_step, engine, tokens))
            path = folder / f"trace-{name}.json"
            with profile(activities=KINDS) as seen:
                for _ in range(2):
                    taken_step(engine, tokens)
                synchronize()
            seen.export_chrome_trace(str(path))
            results[name] |= traced(path)
    for (scheme, result), clock in product(results.items(), CLOCKS):
        medians = {name: spread["median"] for name, spread in result.get(clock, {}).items()}
        beyond = {
            name: median - results["model"][clock][name]["median"]
            for name, median in medians.items()
        }
        print(
            f"{scheme}: {clock}",
            *(f"{name} {medians[name]:.2f} ({beyond[name]:+.2f})" for name in medians),
        )
    for row, _, _ in ROWS:
        print(
            f"{row}:",
            {name: value for name, value in results[row].items() if name not in CLOCKS},
        )
    save(folder, "times", {"schemes": results})
    return 0


def alone_step(model: Any, tokens: Tensor, after: Callable[[], None]) -> None:
    """The model's own computation."""
    loss = model(tokens, tokens)
    after()
    loss.backward()
    after()
    model.zero_grad()
    after()


def timed(work: Callable[[Callable[[], None]], object]) -> dict[str, Any]:
    """The spread of each phase over steps that follow one another; nothing waits between phases."""
    host: list[list[float]] = []
    device: list[list[float]] = []
    for _ in range(WARM_UP + TURNS):
        clock, events = [time.perf_counter()], [event()]

        def after(clock: list[float] = clock, events: list[Any] = events) -> None:
            clock.append(time.perf_counter())
            events.append(event())

        work(after)
        synchronize()
        host.append([1000 * (end - begin) for begin, end in pairwise(clock)])
        device.append(
            [begin.elapsed_time(end) for begin, end in pairwise(events)] if ON_GPU else []
        )
    return {"host_ms": spreads(host[WARM_UP:])} | (
        {"device_ms": spreads(device[WARM_UP:])} if ON_GPU else {}
    )


def event() -> Any:
    """Of now, on the device's current stream."""
    made = torch.cuda.Event(enable_timing=True) if ON_GPU else None
    if made is not None:
        made.record()
    return made


def spreads(steps: list[list[float]]) -> dict[str, Any]:
    """By phase."""
    return {
        name: records.Spread.of(values).to_json()
        for name, *values in zip(PHASES, *steps, strict=True)
    }


# -- calls -----------------------------------------------------------------------------------------


def calls(folder: Path) -> int:
    """Calls of functions in each phase, of Python's and C's: what the host does, on any machine,
    however busy.

    Returns 1 if topo's forward pass makes more of them than stock's.
    """
    tokens, results = batch(), {}
    for scheme in ("stock", "topo"):
        with engine_of(model(), config(scheme, 1, {})) as engine:
            for _ in range(WARM_UP):
                step(engine, tokens)
            counter = Calls()
            sys.setprofile(counter.count)
            step(engine, tokens, counter.end)
            sys.setprofile(None)
            pairs = zip(PHASES, pairwise(counter.ends), strict=True)
            results[scheme] = {name: (end - begin) / (6 * LAYERS) for name, (begin, end) in pairs}
        print(
            f"{scheme}: calls for each module:",
            {name: round(value) for name, value in results[scheme].items()},
        )
    save(folder, "calls", {"schemes": results})
    return int(results["topo"]["forward"] > results["stock"]["forward"])


class Calls:
    """Counts calls; ``ends`` are the counts when a phase ended."""

    def __init__(self) -> None:
        self.ends, self._many = [0], 0

    def count(self, frame: Any, event: str, argument: Any) -> None:
        """For ``sys.setprofile``."""
        self._many += event in ("call", "c_call")

    def end(self) -> None:
        """A phase ends."""
        self.ends.append(self._many)


# -- launches --------------------------------------------------------------------------------------


SCALED = 6  # of a width, to which buckets are in the same proportion
MOST_LAUNCHES = 325


def launches(folder: Path) -> int:
    """Launches of a step, counted by the operations that torch dispatches, of layers narrow enough
    for a CPU; 1 if there are too many.
    """
    setup = replace(SETUP, width=6144 // SCALED, context=16)
    buckets = {
        "reduce_bucket_size": SETUP.bucket_numel // SCALED**2,
        "stage3_prefetch_bucket_size": SETUP.prefetch_numel // SCALED**2,
    }
    counted, losses = Launches(), list[Tensor]()
    with DEVICE:
        layers = build_model(setup, 0)
    tokens = batch()[:, : setup.context]
    with engine_of(layers, config("topo", 1, buckets)) as engine:
        for _ in range(2):
            taken_step(engine, tokens)
        with counted.phase("forward"):
            losses.append(engine(tokens, tokens))
        with counted.phase("backward"):
            engine.backward(losses.pop())
        with counted.phase("step"):
            engine.step()
    results = {name: counts.launches for name, counts in counted.phases.items()}
    print(results)
    save(folder, "launches", results)
    return int(sum(results.values()) > MOST_LAUNCHES)


def save(folder: Path, name: str, results: Mapping[str, Any]) -> None:
    """Write a record."""
    settings = {
        "device": device_name(),
        "ranks": RANKS,
        "layers": LAYERS,
        "width": WIDTH,
        "tokens": BATCH * CONTEXT,
    }
    records.write(folder / f"gpu-{name}.json", records.record(f"gpu-{name}", settings, results))


if __name__ == "__main__":
    with one_of_many():
        commands = {command.__name__: command for command in (checks, more, times, calls, launches)}
        sys.exit(commands[sys.argv[1]](Path(sys.argv[2])))
