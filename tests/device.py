# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The device that tests use, and delays that let races show: both from the environment, so that a
GPU needs no edits.


``ZERO_TOPO_TEST_DEVICE`` is "cpu" (the default), "cuda", which AMD's GPUs are too, or "xpu"
(``tests/xpu``). ``ZERO_TOPO_TEST_NAPS`` is a seed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device(os.environ.get("ZERO_TOPO_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type != "cpu"
CYCLES = 2_000_000  # a millisecond, about
ONE_IN = 20
TESTS = str(Path(__file__).parent)


class Naps(TorchDispatchMode):
    """Before one operation in twenty, at random, its stream sleeps up to a millisecond; on a CPU
    the thread does.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self.taken = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._chance.randrange(ONE_IN) == 0:
            self.taken += 1
            share = self._chance.random()
            torch.cuda._sleep(int(share * CYCLES)) if DEVICE.type == "cuda" else time.sleep(
                share / 1000
            )
        return func(*args, **(kwargs or {}))


class OnDevice(TorchFunctionMode):
    """Tensors that tests create without a device are on `DEVICE`; those drawn by a generator of the
    host move there.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        by_a_test = sys._getframe(1).f_code.co_filename.startswith(TESTS)
        if not by_a_test or func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if kwargs.get("generator") is None:
            return func(*args, **kwargs, device=DEVICE)
        return func(*args, **kwargs).to(DEVICE)


def on_device() -> AbstractContextManager[Any]:
    """Tests of this thread create tensors on their device."""
    return OnDevice() if ON_GPU else nullcontext()


def naps() -> AbstractContextManager[Any]:
    """Delays in this thread if the environment asks for them."""
    seed = os.environ.get("ZERO_TOPO_TEST_NAPS")
    return Naps(int(seed)) if seed else nullcontext()


def device_name() -> str:
    """The device in a record: the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name() if ON_GPU else str(DEVICE)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The default dtype of the process, within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def synchronize() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.accelerator.synchronize()
