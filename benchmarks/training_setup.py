# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The model and the DeepSpeed config that benchmarks train under every scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD_WIDTH = 64
BYTES = 256  # the example's vocabulary
SPLIT: tuple[dict[str, Any], ...] = (
    # Three matrices in one: each is split by itself, so that a rank has whole heads
    {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
)
"""How AutoTP splits a layer of the example's GPT."""


@dataclass(frozen=True)
class TrainingSetup:
    """What all schemes of a benchmark have in common.

    Attributes:
        layers, width, context: of the example's GPT; heads are 64 wide.
        batch: samples of each rank's micro-batch.
        lr: learning rate.
        bucket_numel: DeepSpeed's ``reduce_bucket_size``.
        prefetch_numel: DeepSpeed's ``stage3_prefetch_bucket_size``.
        bf16: train in BF16, else in FP32.

    Raises:
        ValueError: for a width that is no multiple of 64, or a number that is not positive.
    """

    layers: int
    width: int
    context: int
    batch: int
    lr: float = 1e-4
    bucket_numel: int = 5_000_000
    prefetch_numel: int = 0
    bf16: bool = True

    def __post_init__(self) -> None:
        if (
            min(self.layers, self.width, self.context, self.batch, self.bucket_numel) < 1
            or self.width % HEAD_WIDTH
        ):
            raise ValueError(
                f"the model needs positive sizes and a width that is a multiple of {HEAD_WIDTH}: "
                f"{self}"
            )

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.width // HEAD_WIDTH

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        block = 12 * self.width**2 + 4 * self.width
        return self.layers * block + (2 * BYTES + self.context + 2) * self.width

    @property
    def activations(self) -> int:
        """Elements between two layers of a rank's micro-batch."""
        return self.batch * self.context * self.width

    @property
    def message_bytes(self) -> int:
        """The model in 16 bits: the unit ``M`` of communication volumes."""
        return 2 * self.parameters

    def of_job(self, job: Mapping[str, Any], micro_batches: int) -> dict[str, Any]:
        """The DeepSpeed config of a scheme's job, whose optimizer may have a rate of its own.

        Ranks that share a layer see the samples of all of them.
        """
        config = self.deepspeed(job["block"], micro_batches, job["optimizer"])
        shared = job.get("tensor", 1)
        if shared > 1:
            partition = {"use_default_specs": False, "layer_specs": list(SPLIT)}
            config["tensor_parallel"] = {"autotp_size": shared, "partition_config": partition}
            config["train_micro_batch_size_per_gpu"] *= shared
        if job.get("stage", 3) == 0:
            config["zero_optimization"] = {"stage": 0}
        if "lr" in job:
            config["optimizer"]["params"]["muon_lr" if job["optimizer"] == "Muon" else "lr"] = job[
                "lr"
            ]
        return config

    def deepspeed(
        self, block: Mapping[str, Any] | None, micro_batches: int, optimizer: str = "AdamW"
    ) -> dict[str, Any]:
        """The DeepSpeed config: no parameter resident, none kept for reuse.

        Gradients are clipped, except with Muon: DeepSpeed clips Muon's updates, whose norm does not
        depend on them.
        """
        zero = {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": self.bucket_numel,
            "stage3_prefetch_bucket_size": self.prefetch_numel,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }
        adam = {"lr": self.lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
        muon = optimizer == "Muon"
        stock = {"torch_adam": True} if optimizer == "AdamW" else {}
        if muon:
            zero["reduce_scatter"] = False
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0 if muon else 1.0,
            "steps_per_print": 10**9,
            "bf16": {"enabled": self.bf16},
            "optimizer": {"type": optimizer, "params": {**adam, **stock}},
            "zero_optimization": zero,
        }
        return config if block is None else {**config, "zero_topo": dict(block)}


def width_for(parameters: int, layers: int) -> int:
    """The width, a multiple of 64, that brings a GPT of so many layers nearest to a number of
    parameters.
    """
    fitting = (math.sqrt(parameters / (12 * layers)) // HEAD_WIDTH) * HEAD_WIDTH
    candidates = [max(HEAD_WIDTH, int(fitting) + offset) for offset in (-HEAD_WIDTH, 0, HEAD_WIDTH)]
    return min(
        candidates,
        key=lambda width: abs(TrainingSetup(layers, width, 1, 1).parameters - parameters),
    )
