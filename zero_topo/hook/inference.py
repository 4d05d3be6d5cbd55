# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Engines without an optimizer: the reference model of a policy, a reward model, an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from zero_topo.config import ResolvedConfig
from zero_topo.engine.stage3 import Stage3
from zero_topo.hook.parameters import ParameterGathers, by_plan, can_freeze
from zero_topo.hook.passes import module_hook
from zero_topo.quant.operands import FLOATS


def follows_plan(engine: Any) -> bool:
    """Return whether an engine without an optimizer has parameters on the device that zero_topo can
    shard.

    Args:
        engine: DeepSpeed's engine.
    """
    offload = engine.zero_offload_param()
    on_device = offload is None or offload.device == "none"
    return on_device and any(
        p.dtype in FLOATS and can_freeze(p, engine.module) for p in engine.module.parameters()
    )


class TopoInference(DeepSpeedZeRoOffload):
    """DeepSpeed's parameter gathers for a model without an optimizer, on nested shards: every
    parameter is frozen.

    Attributes:
        topo: the shards; parameters with the dtype of the largest one follow the plan.
    """

    topo: Stage3

    def __init__(
        self,
        module: torch.nn.Module,
        *args: Any,
        configs: Sequence[ResolvedConfig],
        names: dict[Any, str],
        **kwargs: Any,
    ) -> None:
        super().__init__(module, *args, **kwargs)
        params: list[Any] = [*module.parameters()]
        ours = [p for p in params if p.dtype in FLOATS and can_freeze(p, module)]
        largest = max(ours, key=lambda p: p.ds_numel)
        dtype = largest.ds_tensor.dtype
        self._parts: list[tuple[Stage3, ParameterGathers]] = []
        for config, own in by_plan(module, names, configs):
            # No parameter is trained, so no gradients are collected.
            gathers = ParameterGathers(module, [], names, dtype, own)
            described = gathers.described()
            if self._parts:
                topo = self.topo.alongside(config, *described, list)
            else:
                topo = self.topo = Stage3(
                    config,
                    *described,
                    like=torch.empty(
                        0, dtype=dtype, device=get_accelerator().current_device_name()
                    ),
                    scatter_dtype=dtype,
                    accumulation_dtype=dtype,
                    bucket_numel=max(p.ds_numel for p in params),
                )
            gathers.serve(topo)
            self._parts.append((topo, gathers))
        self._ending = module.register_forward_hook(module_hook(self._forward_ends))

    def _forward_ends(self, *_: Any) -> None:
        """End a step of the meter: one forward pass of the whole model."""
        self.topo.meter.end_step()

    def engines(self) -> list[Stage3]:
        """Return the engines: with expert parallelism also that of the experts."""
        return [topo for topo, _ in self._parts]

    def notes(self) -> list[str | None]:
        """Return lines for the log: how the weights are sharded, and which do not follow the
        plan.
        """
        plan = self.topo.config.plan
        spec = self.topo.config.weights_spec
        where = "on every rank"
        if plan.weights > 1:
            bits = "in their own type" if spec is None else f"as INT{spec.bits}"
            domain = self.topo.config.topology.domain(plan.weights)
            where = f"sharded over {domain} ({plan.weights} ranks), gathered {bits}"
        notes = [gathers.note() for _, gathers in self._parts]
        return [f"this engine has no optimizer; its weights are {where}", *notes]

    def _restore_from_bit16_weights(self) -> None:
        """Do nothing: DeepSpeed calls this after loading weights to refill masters, and there are
        none.
        """

    def destroy(self) -> None:
        """Finish pending gathers and free the shards. Collective."""
        self._ending.remove()
        for _, gathers in self._parts:
            gathers.release()
        super().destroy()
        for topo, _ in self._parts:
            topo.destroy()
        del self._parts, self.topo
