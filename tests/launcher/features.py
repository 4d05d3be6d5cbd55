# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Features of ZeRO-3 by schemes: what each cell of the matrix in `docs/works-with.md` trains, and
what it must equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.launcher import feature_jobs as jobs
from tests.launcher.feature_jobs import STEPS, Block, small, zero
from tests.launcher.models import (
    Checkpointed,
    External,
    Routed,
    Scalar,
    Tied,
    Tiny,
    adapted,
    hooked,
    partly_frozen,
    tied_and_adapted,
    with_leaves,
)
from tests.launcher.parity import Result, assert_equal, run
from tests.launcher.training import EMULATED, Job, block

PASS = "pass"


@dataclass(frozen=True)
class Way:
    """One way to run a scheme.

    Attributes:
        block: without quantization, or as the scheme comes.
        tolerance: of losses; None for a run without quantization, whose weights and all else are
            compared too.
    """

    block: dict[str, Any]
    tolerance: float | None = None


def as_it_comes(tolerance: float, **keys: Any) -> Way:
    """With the scheme's own quantization."""
    return Way({"topology": EMULATED, "debug_checks": True, **keys}, tolerance)


SCHEMES: dict[str, tuple[Way, ...]] = {
    "zero3": (Way(block("zero3")),),
    "zero++": (Way(block("zero++")), as_it_comes(0.1, scheme="zero++")),
    "hsdp": (Way(block("hsdp")),),
    "paper": (Way(block("paper")), as_it_comes(0.1, scheme="paper")),
    "topo": (Way(block("topo")), as_it_comes(0.1, scheme="topo")),
    "oktopk": (Way(block("topo", sync={"mode": "oktopk", "density": 0.2}), 0.25),),
}


@dataclass(frozen=True)
class Feature:
    """A row.

    Attributes:
        run: of a block or, for stock ZeRO-3, None: a training that uses the feature.
        like: what the training must equal where stock ZeRO-3 itself is wrong.
        tolerance: without quantization, of losses, weights and what else was seen.
        unlike: another row, from whose losses its own must differ: else equal losses would say
            nothing.
        refused: the part that matters of the sentence with which every scheme refuses it.
    """

    run: Callable[[Block], Result]
    like: Callable[[], Result] | None = None
    tolerance: float = 1e-5
    unlike: str = ""
    refused: str = ""


def of(case: Callable[[], Job], **more: Any) -> Feature:
    """A feature that one job uses."""
    return Feature(lambda zero_topo: run(case().under(zero_topo)), **more)


WARMUP = {
    "warmup_min_lr": 0.0,
    "warmup_max_lr": [1e-2, 2e-3],
    "warmup_num_steps": 4,
    "warmup_type": "linear",
}
MOMENTUM = {
    "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "zero_allow_untested_optimizer": True,
}
FAR_AHEAD = zero(
    stage3_param_persistence_threshold=20,
    stage3_max_live_parameters=10**9,
    stage3_prefetch_bucket_size=10**6,
    stage3_max_reuse_distance=10**9,
)
ON_HOST = {
    **zero(offload_optimizer={"device": "cpu"}, sub_group_size=20),
    "zero_force_ds_cpu_optimizer": False,
}

UNDISTURBED = "`zero.Init`"
FEATURES: dict[str, Feature] = {
    "parameter groups, a scheduler": of(
        lambda: small(
            groups=jobs.matrices_and_vectors,
            ds={"scheduler": {"type": "WarmupLR", "params": WARMUP}},
        ),
        unlike=UNDISTURBED,
    ),
    "the caller's optimizer and scheduler": of(jobs.clients, unlike=UNDISTURBED),
    "another optimizer of the config": of(lambda: small(ds=MOMENTUM), unlike=UNDISTURBED),
    # the optimizer steps through slices of the shard, one after the other; and with everything on
    # one stream
    "sub-groups, no overlap": of(
        lambda: small(
            groups=jobs.matrices_and_vectors, ds=zero(sub_group_size=20, overlap_comm=False)
        )
    ),
    # a whole module, a bias only, a weight only
    "frozen parameters": of(lambda: Job(model=partly_frozen, steps=STEPS)),
    "frozen parameters with adapters": of(lambda: Job(model=adapted, steps=STEPS, micro_batches=2)),
    # the embedding, which is the head too, is frozen
    "frozen parameters, tied": of(lambda: Job(model=tied_and_adapted, steps=STEPS)),
    "parameters unused in some steps": of(
        lambda: jobs.branching(1), like=lambda: jobs.branching_in_torch(1)
    ),
    "parameters unused in some micro-batches": of(
        lambda: jobs.branching(2), like=lambda: jobs.branching_in_torch(2)
    ),
    # embedding and head share one parameter: gathered for either, one gradient
    "tied weights": of(lambda: Job(model=Tied, steps=STEPS)),
    # ranks that hold only padding take part in everything
    "parameters of 1 to 9 elements": of(lambda: Job(model=Tiny, steps=STEPS)),
    # DeepSpeed's own: it broadcasts parameters as bytes, under `zero.Init` too
    "parameters of 0 dimensions": of(
        lambda: Job(model=Scalar, steps=STEPS), refused="self.dim() cannot be 0"
    ),
    "leaf modules": of(lambda: Job(model=with_leaves, steps=STEPS)),
    "experts that get no token": of(lambda: Job(model=Routed, steps=STEPS)),
    "external parameters": of(lambda: Job(model=External, steps=STEPS)),
    "hooks of modules and parameters": of(
        lambda: Job(model=hooked, steps=STEPS), unlike=UNDISTURBED
    ),
    # the backward pass is many small ones; recomputation gathers from the copy that backward reads
    "activation checkpointing, reentrant": of(
        lambda: Job(model=partial(Checkpointed, True), steps=STEPS)
    ),
    "activation checkpointing, not reentrant": of(
        lambda: Job(model=partial(Checkpointed, False), steps=STEPS)
    ),
    "a parameter inside and outside a checkpoint": Feature(
        jobs.twice_used, like=jobs.twice_used_in_torch
    ),
    # parameters partitioned as they are built are adopted as they are
    UNDISTURBED: of(lambda: small(zero_init=True)),
    "`zero.Init`, nested": Feature(jobs.nested),
    "`GatheredParameters`, read": of(jobs.read),
    "`GatheredParameters`, written": of(jobs.edited, unlike=UNDISTURBED),
    "`GatheredParameters`, written before backward": of(
        jobs.edited_before_backward, unlike=UNDISTURBED
    ),
    "`GatheredParameters`, written where weights are masters": Feature(
        jobs.edited_masters, unlike="`GatheredParameters`, written"
    ),
    "`safe_get_*`, `safe_set_*`": Feature(jobs.with_states),
    "gradient accumulation": of(lambda: small(micro_batches=3)),
    "gradient accumulation under `no_sync`": of(
        jobs.with_no_sync, refused="no_sync context manager is incompatible"
    ),
    # `zero_grad` of the optimizer forgets what was accumulated, that of the engine does not
    "`zero_grad` between micro-batches": of(jobs.discarding),
    "evaluation inside steps": of(jobs.evaluating),
    "generation between steps": of(jobs.generating),
    # below the threshold: never partitioned, whole and new after each step
    "persistent parameters": of(lambda: small(ds=zero(stage3_param_persistence_threshold=10**6))),
    # large prefetch buckets and reuse distances, as by default: a kept parameter is not a stale one
    "prefetch, reuse": of(lambda: small(micro_batches=2, ds=FAR_AHEAD)),
    "BF16": of(lambda: small(dtype="bf16"), tolerance=1e-2),
    "FP16, overflows": Feature(jobs.overflowing, tolerance=3e-3),
    "`torch.autocast` of the caller": of(jobs.autocast),
    # stock sums gradients in BF16
    "`torch_autocast` of the config": Feature(jobs.autocast_of_the_config, tolerance=1e-3),
    # masters and states on the host, the gradient shard on the accelerator
    "`offload_optimizer` to the CPU": of(lambda: small(micro_batches=2, ds=ON_HOST)),
    "`offload_optimizer` to NVMe": of(
        lambda: small(ds=zero(offload_optimizer={"device": "nvme", "nvme_path": "/tmp"})),
        refused="NVMe offload",
    ),
    "`offload_param` in training": of(lambda: small(ds=zero(offload_param={"device": "cpu"}))),
    "`offload_states`": Feature(jobs.offloading_states),
    "several engines": Feature(jobs.two_engines),
    "destroyed and started again": Feature(jobs.started_again),
    "saved and resumed": Feature(jobs.resumed),
}


@cache
def expected(name: str) -> Result:
    """What a feature must equal; trained once, on every rank alike."""
    feature = FEATURES[name]
    return feature.like() if feature.like else feature.run(None)


def verdict(name: str, ways: Sequence[Way]) -> str:
    """A cell: "pass", or the sentence of the refusal.

    Raises:
        AssertionError: if it trains something else, or is not refused as it should be.
    """
    feature = FEATURES[name]
    if feature.refused:
        with pytest.raises(
            (ValueError, RuntimeError, AssertionError), match=re.escape(feature.refused)
        ) as error:
            feature.run(ways[-1].block)
        return next(
            line.strip(" -") for line in str(error.value).splitlines() if feature.refused in line
        )
    for way in ways:
        mine = feature.run(way.block)
        if way.tolerance is None:
            assert_equal(mine, expected(name), feature.tolerance)
        else:
            torch.testing.assert_close(
                mine.losses, expected(name).losses, rtol=way.tolerance, atol=way.tolerance
            )
    return PASS
