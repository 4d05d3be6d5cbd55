# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the hook does on a GPU's streams around DeepSpeed's step, on a symbolic device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks.test_streams import DeepSpeed, job
from tests.streams import Stream
from zero_topo.engine import hook
from zero_topo.engine.seam import Stock


class Copies(TorchDispatchMode):
    """Copies into some tensors: the types on either side, and whether the host goes on meanwhile."""

    def __init__(self, targets: list[Tensor]) -> None:
        super().__init__()
        self.targets = {target.data_ptr() for target in targets}
        self.seen: list[tuple[torch.dtype, torch.dtype, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() in self.targets:
            self.seen.append((args[1].dtype, args[0].dtype, args[2] if len(args) > 2 else False))
        return func(*args, **(kwargs or {}))


@contextmanager
def hooked(deepspeed: DeepSpeed, offload: bool) -> Iterator[Any]:
    """The hook's optimizer around an engine, without what DeepSpeed's constructor makes."""
    device, own = deepspeed.device, object.__new__(hook.TopoStage3)
    accelerator = SimpleNamespace(is_synchronized_device=lambda: False, current_stream=device.current_stream)
    rows = deepspeed.engine.gradients.optimizer_rows()
    widths = [end - begin for begin, end in deepspeed.columns]
    own.__dict__ |= {
        "topo": deepspeed.engine,
        "_in_backward": False,
        "offloaded_states": set(),
        "reduce_and_partition_stream": deepspeed.scatters,
        "offload_optimizer": offload,
        "overflow": False,
        "fp16_groups": [[]],
        "fp16_partitioned_groups_flat_numel": widths,
        "fp32_partitioned_groups_flat": [SimpleNamespace(grad=torch.zeros(len(rows) * width)) for width in widths],
        "grad_partitions_flat_buffer": deepspeed.engine.gradients.buffer[0],
    }
    with patch.object(hook, "get_accelerator", lambda: accelerator):
        yield own


def test_overflow_is_looked_for_after_sync() -> None:
    """DeepSpeed looks on the stream on which it scatters."""

    def step(self: Any, closure: Any = None) -> None:
        with deepspeed.scatters:
            assert self.topo.gradients.optimizer_rows().isfinite().all()
        deepspeed.main.wait_stream(deepspeed.scatters)

    with job({"scheme": "topo"}, overlap_comm=True) as deepspeed, hooked(deepspeed, offload=False) as optimizer:
        deepspeed.micro_batch(last=True)
        with patch.object(Stock, "step", step):
            optimizer.step()


def test_gradients_for_the_host_are_converted_on_the_device() -> None:
    """What crosses is of the host's type, the host does not wait for each copy, and once for all before it reads."""
    with job({"scheme": "topo"}, overlap_comm=True) as deepspeed, hooked(deepspeed, offload=True) as optimizer:
        deepspeed.micro_batch(last=True)
        deepspeed.engine.gradients.sync()
        grads = [master.grad for master in optimizer.fp32_partitioned_groups_flat]
        with patch.object(Stream, "synchronize") as waited, Copies(grads) as copies:
            optimizer._copy_gradients_to_host()
        rows = deepspeed.engine.gradients.optimizer_rows()
        assert copies.seen == [(torch.float32, torch.float32, True)] * len(grads)
        assert waited.call_count == 1
        assert torch.equal(torch.cat(grads), torch.cat([rows[:, a:b].float().view(-1) for a, b in deepspeed.columns]))
