# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The device that tests use, from the environment, so that a GPU needs no edits.

``ZERO_TOPO_TEST_DEVICE`` is "cpu" (the default), "cuda", which AMD's GPUs are too, or "xpu"
(``tests/xpu``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE = torch.device(os.environ.get("ZERO_TOPO_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type != "cpu"
TESTS = str(Path(__file__).parent)


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
