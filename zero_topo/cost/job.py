# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A training job: the model, its batch, and the settings of DeepSpeed that costs depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from zero_topo.config.deepspeed_parts import ABSENT, ZERO, lookup, on
from zero_topo.cost.model_files import TRAINED, read_modules, shape_of
from zero_topo.cost.tensor import part_of
from zero_topo.cost.transformer import Model
from zero_topo.cost.volume import Workload
from zero_topo.strict import read
from zero_topo.units import format_count

Elements = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
COUNTS = {
    "live": ("stage3_max_live_parameters", "max_live_parameters"),
    "bucket": ("reduce_bucket_size",),
    "sub_group": ("sub_group_size",),
}
"""Field of a job -> the names of a key of ``zero_optimization``, a number of elements."""


@dataclass(frozen=True)
class Job:
    """Describes a training job: model, micro-batches, recomputation, DeepSpeed's settings.

    Attributes:
        model: its shape.
        micro_batch: sequences per rank and micro-batch.
        micro_batches: micro-batches per optimizer step (``K``).
        checkpointing: whether activations are recomputed: layers run forward again before their
            backward.
        itemsize: bytes per weight and gradient.
        prefetch: modules gathered ahead (DeepSpeed's ``stage3_prefetch_bucket_size``).
        muon: whether the optimizer is Muon; else it is Adam.
        live: gathered elements that DeepSpeed keeps (``stage3_max_live_parameters``); see
            ``memory.py``.
        bucket: elements of a gradient bucket (``reduce_bucket_size``).
        sub_group: elements that the optimizer updates at a time (``sub_group_size``).
        offload: whether ``offload_optimizer`` names the CPU.
        loss_scaled: whether ``fp16`` is enabled.
        tensor: tensor parallel ranks, which train each micro-batch together; see Note [Tensor
            parallelism].
        numels: elements of each trained parameter of a live model; None takes those of ``model``.
        frozen: elements of each parameter that no optimizer updates.
        whole: for each of ``numels``, whether its update is Muon's; empty if none.
    """

    model: Model
    micro_batch: int = 1
    micro_batches: int = 1
    checkpointing: bool = True
    itemsize: int = 2
    prefetch: int = 1
    muon: bool = False
    live: int = 10**9
    bucket: int = 5 * 10**8
    sub_group: int = 10**9
    offload: bool = False
    loss_scaled: bool = False
    tensor: int = 1
    numels: tuple[int, ...] | None = None
    frozen: tuple[int, ...] = ()
    whole: tuple[bool, ...] = ()

    @property
    def part(self) -> Model:
        """Return a rank's part of the model: all of it without tensor parallelism."""
        return part_of(self.model, self.tensor)

    @cached_property
    def gathered(self) -> int:
        """Return the most elements that DeepSpeed has gathered: of a module and those gathered
        ahead, or all that it keeps.
        """
        sizes = self.part.module_sizes
        ahead = max(sum(sizes[index : index + self.prefetch + 1]) for index in range(len(sizes)))
        return min(self.part.params, max(self.live, ahead))

    @cached_property
    def work(self) -> Workload:
        """Return the parameters and the step, as far as bytes depend on them."""
        whole = self.whole
        if self.numels is None:
            shapes = self.part.shapes()
            work = Workload.uniform(
                map(math.prod, shapes), self.itemsize, self.micro_batches, map(len, shapes)
            )
            whole = self.part.matrices() if self.muon else ()
        else:
            work = Workload.uniform(self.numels, self.itemsize, self.micro_batches)
        frozen = None
        if self.frozen:
            frozen = Workload.uniform(self.frozen, self.itemsize, self.micro_batches)
        return replace(work, frozen=frozen, whole=whole, loss_scaled=self.loss_scaled)

    def describe(self) -> str:
        """Return the settings on which memory and seconds depend; printed with each."""
        model = self.model
        where = "a rank" if self.tensor == 1 else f"{self.tensor} tensor parallel ranks"
        activations = "recomputed" if self.checkpointing else "kept"
        return (
            f"{format_count(model.params)} parameters, as {model.layers} layers of width "
            f"{model.hidden}; {self.micro_batch} x {model.sequence:,} tokens a micro-batch on "
            f"{where}, activations {activations}{'; Muon' if self.muon else ''}"
        )


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
    return {
        **counts,
        "offload": lookup(config, f"{ZERO}.offload_optimizer.device") == "cpu",
        "loss_scaled": on(lookup(config, "fp16.enabled")),
        "muon": str(lookup(config, "optimizer.type")).lower() == "muon",
    }


def job_of_module(
    module: Any, sequence: int | None = None, trains: bool = True, **settings: Any
) -> Job:
    """Return the job of a live model, whose parameters DeepSpeed may have partitioned.

    Args:
        module: the ``torch.nn.Module``.
        sequence: tokens of a sequence; None takes the limit of the model's config, at most 4096;
            without one, 2048.
        trains: whether there are gradients and optimizer states. A model without a trained
            parameter counts as trained.
        settings: other fields of :class:`Job`.
    """
    tree = read_modules(module, type(module).__name__)
    tree = replace(tree, sequence=sequence or min(tree.sequence, TRAINED))
    parameters = [*module.parameters()]
    trained = [p for p in parameters if p.requires_grad and trains]
    frozen = [p for p in parameters if not (p.requires_grad and trains)]
    if trains and not trained:
        trained, frozen = frozen, trained
    return Job(
        tree,
        numels=tuple(math.prod(shape_of(p)) for p in trained),
        frozen=tuple(math.prod(shape_of(p)) for p in frozen),
        whole=tuple(bool(getattr(p, "use_muon", False)) for p in trained),  # DeepSpeed's mark
        **settings,
    )
