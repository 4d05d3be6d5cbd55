# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The settings of the sparse modes of ``sync``: what crosses between gradient domains is a share of the elements."""

from __future__ import annotations

import importlib.util
from typing import ClassVar, Literal, Self

from pydantic import Field

from zero_topo.config.sync_settings import Dtype, SyncSettings
from zero_topo.plan import Plan


def index_bytes(numel: int) -> int:
    """Bytes of an index into a vector of so many elements, as picks travel with it: 4 while 32 bits tell them apart."""
    return 4 if numel <= 2**32 else 8


class SparseSync(SyncSettings):
    """What all sparse modes have in common; one optimizer step syncs all parameters at once."""

    WHOLE: ClassVar[bool] = True

    density: float = Field(0.01, gt=0, le=1, description="Share of the elements that a rank picks.")
    error_feedback: bool = Field(
        True,
        strict=True,
        description="Keep what was not sent, in FP32 where it was not sent, and add it at the next step. Costs 4 bytes "
        "for each element of the gradient shard.",
    )
    offload_residual: bool = Field(
        False,
        strict=True,
        description="Keep the residual in the host's memory and bring it to the device once a step.",
    )
    value_dtype: Dtype = Field(
        "fp32",
        description="Type of the values on the wire; each comes with an index of 4 bytes, or 8 above 2^32 elements.",
    )
    include: tuple[str, ...] = Field(
        ("*",), description="Parameters to sparsify: shell patterns of their names, any of which must fit."
    )
    exclude: tuple[str, ...] = Field((), description="Parameters to reduce densely after all: shell patterns.")
    dense_vectors: bool = Field(
        True, strict=True, description="Reduce parameters of fewer than two dimensions (norms, biases) densely."
    )
    start: int = Field(0, ge=0, description="Optimizer steps at the beginning that reduce everything.")
    start_density: float = Field(
        0.25, gt=0, le=1, description="Density of the step after start, if there is a warm-up; DGC begins with 0.25."
    )
    warmup: int = Field(
        0,
        ge=0,
        description="Steps after start over which the density goes geometrically from start_density to density, as in "
        "DGC (arXiv 1712.01887, section 3.4).",
    )

    def density_at(self, step: int) -> float:
        """Density of a step, counted from 0: 1 up to ``start``, then ``d_0 (d / d_0) ** (t / warmup)``, then ``d``."""
        since = step - self.start
        if since < 0:
            return 1.0
        if since >= self.warmup:
            return self.density
        return float(self.start_density * (self.density / self.start_density) ** (since / self.warmup))

    @property
    def busiest(self) -> Self:
        """The settings of the step that sends most, but for those before ``start``."""
        return self.model_copy(update={"density": max(self.density, self.density_at(self.start))})


class TopkASync(SparseSync):
    """Every rank's picks go to all others."""

    mode: Literal["topk_a"] = Field("topk_a", description="All-gather of every rank's largest elements.")


class GaussianKSync(SparseSync):
    """As ``topk_a``, the threshold estimated from a normal distribution."""

    mode: Literal["gaussian_k"] = Field(
        "gaussian_k", description="All-gather of the elements above a threshold that a normal distribution suggests."
    )


class TopkDsaSync(SparseSync):
    """Picks are reduced where they belong, and the sums gathered, sparse or dense, whichever is shorter."""

    mode: Literal["topk_dsa"] = Field(
        "topk_dsa", description="Sparse reduce-scatter of the picks, then an all-gather that may turn dense (SparCML)."
    )


class GTopkSync(SparseSync):
    """The largest elements of the sum, found in a tree."""

    mode: Literal["gtopk"] = Field(
        "gtopk", description="Pairwise sums in a tree, the largest elements chosen anew at each level (gTopk)."
    )


class OkTopkSync(SparseSync):
    """The largest elements of the sum of the largest, with O(k) words whatever the number of ranks."""

    mode: Literal["oktopk"] = Field("oktopk", description="The sparse all-reduce of Ok-Topk.")
    tau: int = Field(64, ge=1, description="Steps between two balancings of the regions.")
    tau_prime: int = Field(32, ge=1, description="Steps between two exact thresholds.")
    sharded: bool = Field(
        False,
        strict=True,
        description="Regions are the optimizer shards and sums stay with their owners, with all of these' own rows: "
        "about 2k words in place of 4k. Needs an optimizer that is sharded over the world.",
    )

    transport: Literal["torch", "mpi"] = Field(
        "torch", description='Who carries the messages: torch.distributed, or MPI by way of mpi4py ("mpi").'
    )

    def problem(self, plan: Plan) -> str | None:
        """Refuses MPI where mpi4py is missing, and sums that stay with one of several holders of an optimizer shard."""
        if self.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
            return 'sync.transport = "mpi": mpi4py is not installed; pip install mpi4py, or set "transport": "torch"'
        if not self.sharded or plan.optimizer == plan.world_size:
            return None
        return (
            "sync.sharded = true: sums would stay with one rank, but several hold the same optimizer shard; set "
            '"optimizer": "world", or "sharded": false'
        )


class RadiusSync(SparseSync):
    """The elements that the optimizer moved most at the last resampling; the others wait for the next one."""

    mode: Literal["radius"] = Field("radius", description="One mask for all ranks, chosen anew at intervals (Radius).")
    density: float = Field(0.4, gt=0, le=1, description="Share of each parameter that the mask holds.")
    value_dtype: Dtype = Field(
        "bf16", description="Type of the values on the wire; what rounding takes away is owed, with error feedback."
    )
    interval: int = Field(
        200, ge=1, description="Steps from one resampling to the next: then everything is reduced, and the mask chosen."
    )
    start: int = Field(
        0,
        ge=0,
        description="Optimizer steps at the beginning that reduce everything. The paper starts to sparsify after 15 to "
        "20% of the training; after 5% it found the loss hurt. At 0 the first mask means little: Adam's first update "
        "is the sign of the gradient, equally large everywhere.",
    )


class PerParameter(SparseSync):
    """What modes have in common that may choose of each parameter by itself."""

    per_parameter: bool = Field(
        False,
        strict=True,
        description="Choose the same share of each parameter by itself, instead of all parameters' together.",
    )


class ScapeSync(PerParameter):
    """The elements of largest momentum at the last step, by a mask that all ranks share; AdamS lives on them alone."""

    OPTIMIZER: ClassVar[str | None] = "AdamS"

    mode: Literal["scape"] = Field(
        "scape", description="The momentum's largest elements, chosen a step before (SCAPE, with the AdamS optimizer)."
    )
    density: float = Field(0.1, gt=0, le=1, description="Share of each rank's optimizer shard that the mask holds.")
    start_density: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Density of the first step, if there is a warm-up; the paper's takes a tenth of the training.",
    )

    def problem(self, plan: Plan) -> str | None:
        """Refuses gradient and optimizer shards that differ: the momentum could not be rebuilt."""
        if plan.optimizer == plan.gradients:
            return None
        return (
            f'sync.mode = "scape": every rank rebuilds the momentum of its gradient shard (degree {plan.gradients}), '
            f"but its optimizer shard (degree {plan.optimizer}) is another; set both to the same domain, such as "
            '"gradients": "node", "optimizer": "node": then no weights cross nodes either'
        )
