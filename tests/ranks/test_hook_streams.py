# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the hook does on a GPU's streams around DeepSpeed's step, on a symbolic device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from tests.marks import often
from tests.ranks.test_streams import DeepSpeed, job
from tests.ranks.worlds import BLOCKS
from tests.streams import Stream
from zero_topo.engine.residual_transfer import STATE_KEY
from zero_topo.engine.stage3 import Stage3
from zero_topo.hook import optimizer
from zero_topo.hook import optimizer as module
from zero_topo.hook.parts import EnginePart, Parts
from zero_topo.hook.passes import BackwardPasses
from zero_topo.hook.seam import Stock


def attach(own: Any, engine: Stage3, columns: list[tuple[int, int]]) -> None:
    """What the hook's optimizer has of an engine, and of sub-groups with these columns."""
    param_indices = {index: index for index in range(len(engine.layout.numels))}
    gathers: Any = SimpleNamespace(trained=[], param_indices=param_indices)
    part = EnginePart(engine, gathers, tuple(range(len(columns))), STATE_KEY)
    widths = [end - begin for begin, end in columns]
    height = len(engine.gradients.optimizer_rows())
    masters = [torch.zeros(height * width) for width in widths]
    for master in masters:
        master.grad = torch.zeros_like(master)
    own.__dict__ |= {
        "_parts": Parts([part], columns),
        "topo": engine,
        "param_indices": param_indices,
        "offload_optimizer": False,
        "fp16_partitioned_groups_flat_numel": widths,
        "fp32_partitioned_groups_flat": masters,
    }


ARRIVES = "reduce_independent_p_g_buckets_and_remove_grads"
"""What DeepSpeed calls when a gradient arrives."""


@contextmanager
def hooked(deepspeed: DeepSpeed, offload: bool) -> Iterator[Any]:
    """The hook's optimizer around an engine, with what it asks of DeepSpeed's constructor, which
    builds nothing.
    """
    device = deepspeed.device
    accelerator = SimpleNamespace(
        is_synchronized_device=lambda: False, current_stream=device.current_stream
    )

    def asked(own: Any, contiguous_gradients: bool = True, **_: Any) -> None:
        own.contiguous_gradients = contiguous_gradients
        own.torch_autocast_gradscaler = None

    with (
        patch.object(Stock, "__init__", asked),
        patch.object(optimizer, "meeting_place", lambda: None),
    ):
        own = optimizer.TopoStage3(configs=[deepspeed.engine.config])
    attach(own, deepspeed.engine, deepspeed.columns)
    own.__dict__ |= {
        "ipg_buckets": {},
        "_passes": BackwardPasses(),
        "offloaded_states": set(),
        "reduce_and_partition_stream": deepspeed.scatters,
        "offload_optimizer": offload,
        "overflow": False,
        "inf_or_nan_tracker": torch.tensor(False),
        "grad_partitions_flat_buffer": deepspeed.engine.gradients.buffer[0],
    }
    with patch.object(optimizer, "get_accelerator", lambda: accelerator):
        yield own


def test_a_gradient_that_arrives_twice_is_whole_when_it_is_scattered() -> None:
    """Autograd adds the second part in place, on the computation's stream, while the bucket waits
    to be scattered.
    """
    with (
        job(BLOCKS["topo"], overlap_comm=True) as deepspeed,
        hooked(deepspeed, offload=False) as optimizer,
    ):
        device = deepspeed.device
        bucket = SimpleNamespace(params=[])
        optimizer.ipg_buckets[torch.bfloat16] = bucket

        def add(_: Any, param: Any) -> None:
            """As DeepSpeed does, which copies gradients if its optimizer was built so."""
            deepspeed.scatters.wait_stream(device.current_stream())
            if optimizer.contiguous_gradients:
                with deepspeed.scatters:
                    device.record(param.grad, deepspeed.scatters)
                    param.grad = param.grad.clone()
            bucket.params.append(param)

        with patch.object(Stock, ARRIVES, add):
            for param_index, numel in ((1, 64), (0, 512)):
                param = SimpleNamespace(ds_id=param_index, grad=torch.ones(numel).bfloat16())
                getattr(optimizer, ARRIVES)(param)
            param.grad += torch.ones(512).bfloat16()
            getattr(optimizer, ARRIVES)(param)
        with deepspeed.scatters:
            grads = [param.grad for param in bucket.params]
            optimizer.topo.gradients.scatter([1, 0], grads, last=True)
            optimizer.partition_grads(bucket.params, None)


def test_overflow_is_looked_for_after_sync() -> None:
    """DeepSpeed looks on the stream on which it scatters."""

    def step(self: Any, closure: Any = None) -> None:
        with deepspeed.scatters:
            assert self.topo.gradients.optimizer_rows().isfinite().all()
        deepspeed.main.wait_stream(deepspeed.scatters)

    with (
        job({"scheme": "topo"}, overlap_comm=True) as deepspeed,
        hooked(deepspeed, offload=False) as optimizer,
    ):
        deepspeed.micro_batch(last=True)
        with patch.object(Stock, "step", step):
            optimizer.step()


def test_masters_on_the_host_are_page_locked() -> None:
    """Where DeepSpeed's gradients are; those on the device stay, and the optimizer keeps its
    tensors.
    """
    with (
        job(BLOCKS["topo"], overlap_comm=True) as deepspeed,
        hooked(deepspeed, offload=True) as optimizer,
    ):
        masters = [torch.ones(8, requires_grad=True), torch.ones(8, device="meta")]
        locked = torch.ones(8)
        optimizer.__dict__ |= {"fp32_partitioned_groups_flat": list(masters)}
        pin = MagicMock(return_value=locked)
        with patch.object(module, "get_accelerator", lambda: SimpleNamespace(pin_memory=pin)):
            optimizer._pin_masters()
    assert all(map(is_, optimizer.fp32_partitioned_groups_flat, masters))
    assert (
        pin.call_count == 1
        and masters[0].data_ptr() == locked.data_ptr()
        and masters[0].requires_grad
    )


def test_the_host_reads_gradients_that_have_arrived() -> None:
    """Its optimizer reads page-locked memory, which the next step's copies write again. What
    crosses is of the host's type, and the host waits once for all copies.
    """
    copies: list[tuple[bool, bool]] = []
    copy = Tensor.copy_
    synchronize = Stream.synchronize

    def noted(own: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.append((source.dtype == own.dtype, non_blocking))
        return copy(own, source, non_blocking)

    with (
        job({"scheme": "topo"}, overlap_comm=True) as deepspeed,
        hooked(deepspeed, offload=True) as optimizer,
    ):
        grads = [master.grad for master in optimizer.fp32_partitioned_groups_flat]
        deepspeed.device.host(*grads)
        for _ in range(2):
            deepspeed.micro_batch(last=True)
            deepspeed.engine.gradients.sync()
            wait = patch.object(Stream, "synchronize", autospec=True, side_effect=synchronize)
            with patch.object(Tensor, "copy_", noted), wait as waited:
                optimizer._copy_gradients_to_host()
            assert waited.call_count == 1
            rows = deepspeed.engine.gradients.optimizer_rows()
            expected = [rows[:, a:b].float().reshape(-1) for a, b in deepspeed.columns]
            assert torch.equal(torch.cat(grads), torch.cat(expected))
            deepspeed.engine.end_step(skipped=True)
    assert copies == [(True, True)] * 4


def save(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """``save_checkpoint``: masters, and what is saved next to them."""
    optimizer.checkpoint_event_prologue()
    deepspeed.engine.state_dict()
    get(deepspeed, optimizer)


def load(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """``load_checkpoint``: DeepSpeed fills masters and the flat parameter buffer first."""
    engine = deepspeed.engine
    stored = torch.zeros(engine.layout.columns, dtype=torch.bfloat16)
    saved = {"zero_topo": {"degrees": engine.config.plan.degrees(), "sync": {}, "stored": stored}}
    optimizer.checkpoint_event_prologue()
    for master in deepspeed.masters:
        master.mul_(0.5)
    engine.weights.own_row.mul_(0.5)
    engine.load_state_dict(saved)
    engine.restart()


def edit_masters(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """``safe_set_full_fp32_param`` and ``safe_set_local_fp32_param``."""
    param = SimpleNamespace(requires_grad=False)  # nothing is shared in this world
    optimizer.set_full_hp_param(deepspeed.masters[0], param)
    deepspeed.step()
    optimizer.set_local_hp_param(deepspeed.masters[0], param)


def get(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """``safe_get_full_fp32_param`` and optimizer states."""
    assert all(table.clone().isfinite().all() for table in deepspeed.masters)


def edit_weights(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """``GatheredParameters``."""
    for param_index in (2, 5):
        whole = deepspeed.fetch([param_index], "gather_exact")[0]
        deepspeed.engine.weights.write_back(param_index, whole + 1)


def offload(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """``offload_states``, and back."""
    optimizer.offload_states(pin_memory=False)
    optimizer.reload_states()


def check(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """``debug_checks``: all copies are read."""
    deepspeed.engine.weights.wait_for_publish()
    assert all(copy.clone().numel() for copy in deepspeed.engine.weights.replicas())


def nothing(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """A step follows, whose forward pass needs not all parameters."""
    deepspeed.fetch([0], "gather_forward")
    deepspeed.step()


def settle(deepspeed: DeepSpeed, optimizer: Any) -> None:
    """``destroy``, after which memory is used again."""
    deepspeed.engine.settle()
    for table in (*deepspeed.masters, *deepspeed.engine.weights.tensors()):
        table.zero_()


OPERATIONS: tuple[Callable[[DeepSpeed, Any], None], ...] = (
    save,
    load,
    edit_masters,
    get,
    edit_weights,
    offload,
    lambda deepspeed, _: deepspeed.forward(),  # an evaluation
    lambda deepspeed, _: deepspeed.engine.gradients.zero(),  # ``zero_grad``
    check,
    nothing,
    settle,
)


FOLLOWED = ("codes", "q4", "topo", "scape, by parameter")


@pytest.mark.parametrize("name", often(FOLLOWED, (*FOLLOWED, "zero++ quantized", "hsdp")))
def test_whatever_follows_a_step(name: str) -> None:
    """Each public operation at once after a step, while publish is under way."""
    quiet = ("offload_states", "reload_states", "checkpoint_event_prologue")
    stock = dict.fromkeys((*quiet, "empty_partition_cache"), MagicMock())
    add = MagicMock(side_effect=lambda table, *_: table.add_(1.0))
    stock |= dict.fromkeys(("set_full_hp_param", "set_local_hp_param"), add)
    with (
        job(BLOCKS[name], overlap_comm=True) as deepspeed,
        hooked(deepspeed, offload=False) as optimizer,
    ):
        optimizer.__dict__ |= {
            "fp32_partitioned_groups_flat": deepspeed.masters,
            "lp_param_buffer": deepspeed.engine.weights.own_row,
            "fp16_partitioned_groups_flat": [],
            "module": torch.nn.Module(),
            "optimizer": SimpleNamespace(state={}),
            "_reloads": [],
        }
        with patch.multiple(Stock, **stock):
            for operation in OPERATIONS:
                deepspeed.micro_batch(last=True)
                deepspeed.step()
                operation(deepspeed, optimizer)
