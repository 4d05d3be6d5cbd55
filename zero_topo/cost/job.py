# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A training job: the model, its batch, and the settings of DeepSpeed that prices depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from zero_topo.config.deepspeed_parts import ABSENT, ZERO, lookup, on
from zero_topo.cost.tensor import part_of
from zero_topo.cost.transformer import Model
from zero_topo.strict import must_be, read

Attention = Literal["flash", "eager"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
OVERLAP = 0.0
"""Default share of the communication able to overlap with computation that does overlap.

Among published step times of ZeRO-3 and its variants, this model can be compared only with those of
the ZeRO-topo paper (384 GCDs of Frontier). With the presets' rates and 8 micro-batches its three
ratios come out within 15% at 0, 22% at 0.25, 30% at 0.5 and 49% at 1. The default is thus fitted to
Frontier; on other machines it is a conservative guess.
"""
Elements = Annotated[
    float, Field(strict=True, ge=0, allow_inf_nan=False), must_be("a number of elements")
]
LEAST = (
    ("micro_batch", 1),
    ("micro_batches", 1),
    ("itemsize", 1),
    ("prefetch", 0),
    ("tensor", 1),
    ("expert", 1),
)
COUNTS = {
    "live": ("stage3_max_live_parameters", "max_live_parameters"),
    "bucket": ("reduce_bucket_size",),
    "sub_group": ("sub_group_size",),
}
"""Field of a job -> the names of a key of ``zero_optimization``, a number of elements."""


@dataclass(frozen=True)
class Job:
    """Describes a training job: model, micro-batches, recomputation, overlap.

    Attributes:
        model: its shape.
        micro_batch: sequences per rank and micro-batch.
        micro_batches: micro-batches per optimizer step (``K``).
        checkpointing: whether activations are recomputed: layers run forward again before their
            backward.
        itemsize: bytes per weight and gradient.
        prefetch: modules gathered ahead (DeepSpeed's ``stage3_prefetch_bucket_size``).
        overlap_scatter: whether scatters overlap with the backward pass (DeepSpeed's
            ``overlap_comm``).
        attention: "flash", or "eager", which stores the matrix of scores for the backward pass.
        fused_loss: whether the loss never stores all logits.
        stock: whether stock DeepSpeed does all communication, see Note [Stock].
        overlap: share of the communication able to overlap that does; None (unknown) takes
            :data:`OVERLAP`.
        muon: method of Newton-Schulz ("gram" or "standard") if the optimizer is Muon; None is Adam.
        live: gathered elements that DeepSpeed keeps (``stage3_max_live_parameters``); see
            ``memory.py``.
        bucket: elements of a gradient bucket (``reduce_bucket_size``).
        sub_group: elements that the optimizer updates at a time (``sub_group_size``).
        offload: whether ``offload_optimizer`` names the CPU.
        loss_scaled: whether ``fp16`` is enabled.
        tensor: tensor parallel ranks, which train each micro-batch together; see Note [Tensor
            parallelism].
        expert: expert parallel ranks, which share each layer's experts; see Note [Expert
            parallelism].

    Raises:
        ValueError: if a number is out of range.
    """

    model: Model
    micro_batch: int
    micro_batches: int
    checkpointing: bool = True
    itemsize: int = 2
    prefetch: int = 1
    overlap_scatter: bool = True
    attention: Attention = "flash"
    fused_loss: bool = False
    stock: bool = False
    overlap: float | None = None
    muon: str | None = None
    live: int = 10**9
    bucket: int = 5 * 10**8
    sub_group: int = 10**9
    offload: bool = False
    loss_scaled: bool = False
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for key, least in LEAST:
            if getattr(self, key) < least:
                raise ValueError(f"job: {key} is {getattr(self, key)}; it must be at least {least}")
        if self.tensor > 1 < self.expert:
            raise ValueError(
                f"job: {self.tensor} tensor parallel and {self.expert} expert parallel ranks: both "
                "together are not priced; leave one out"
            )
        if not 0 <= self.hidden <= 1:
            raise ValueError(
                f"job: overlap is {self.overlap}; it must be a share, from 0 (nothing) to 1 (all)"
            )

    @property
    def hidden(self) -> float:
        """Return the share of the overlappable communication that overlaps."""
        return OVERLAP if self.overlap is None else self.overlap

    @property
    def part(self) -> Model:
        """Return a rank's part of the model: all of it without tensor parallelism."""
        return part_of(self.model, self.tensor)

    @property
    def boundary_bytes(self) -> int:
        """Return the bytes of a micro-batch's activations between two layers."""
        return self.micro_batch * self.model.sequence * self.model.hidden * self.itemsize

    @cached_property
    def gathered(self) -> int:
        """Return the most elements that DeepSpeed has gathered: of a module and those gathered
        ahead, or all that it keeps.
        """
        sizes = self.part.module_sizes
        ahead = max(sum(sizes[index : index + self.prefetch + 1]) for index in range(len(sizes)))
        return min(self.part.params, max(self.live, ahead))

    @property
    def flops(self) -> float:
        """Return the model FLOPs of one rank in a step: forward and backward, without
        recomputation.
        """
        tokens = self.micro_batch * self.model.sequence
        return 3.0 * self.micro_batches * sum(self.part.module_flops(tokens))


def deepspeed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a :class:`Job` that a DeepSpeed config sets; "auto" counts as absent.

    Raises:
        ValueError: if a value is not a number.
    """
    counts = {}
    for name, keys in COUNTS.items():
        for key in keys:
            value = lookup(config, f"{ZERO}.{key}")
            if value is not ABSENT:
                counts[name] = int(read(Elements, f"{ZERO}.{key}", value))
    offload = lookup(config, f"{ZERO}.offload_optimizer.device") == "cpu"
    scaled = on(lookup(config, "fp16.enabled"))
    return {**counts, "offload": offload, "loss_scaled": scaled, "muon": method_of(config)}


def method_of(ds_config: Mapping[str, Any]) -> str | None:
    """Return the method of Newton-Schulz in a DeepSpeed config; None if its optimizer is not
    Muon.
    """
    if str(lookup(ds_config, "optimizer.type")).lower() != "muon":
        return None
    return "standard" if lookup(ds_config, "optimizer.params.ns_method") == "standard" else "gram"
