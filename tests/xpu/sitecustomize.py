# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Gives each Python that has this folder in ``PYTHONPATH`` an XPU: the library first, which torch
asks once.
"""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

if library := os.environ.get("STAND_IN_XPU"):
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)

    import torch

    xpu: Any = torch.xpu

    class Stream(torch.Stream):
        """``torch.xpu.Stream``, whose device need not be named."""

        def __new__(cls, device: Any = None, priority: int = 0) -> "Stream":
            return super().__new__(cls, device=device or "xpu", priority=priority)

    class Event(torch.Event):
        """``torch.xpu.Event``."""

        def __new__(cls, enable_timing: bool = False) -> "Event":
            return super().__new__(cls, "xpu", enable_timing=enable_timing)

    def nothing(*_: object) -> int:
        """Stands for what frees memory or counts it."""
        return 0

    def properties(device: object = None) -> SimpleNamespace:
        """Those that DeepSpeed reads."""
        return SimpleNamespace(name="stand-in", total_memory=1 << 34, has_fp64=True)

    count = int(os.environ.get("STAND_IN_XPUS", "1"))
    xpu._lazy_init = xpu._lazy_call = lambda *_, **__: None
    xpu.is_available = xpu.is_initialized = lambda: True
    xpu.device_count = lambda: count
    xpu.current_device = torch.accelerator.current_device_index
    xpu.set_device = torch.accelerator.set_device_index
    xpu.current_stream = torch.accelerator.current_stream
    xpu.set_stream = torch.accelerator.set_stream
    xpu.stream = lambda stream: stream
    xpu.synchronize = torch.accelerator.synchronize
    xpu.Stream, xpu.Event = Stream, Event
    xpu.get_device_properties = properties
    xpu.empty_cache = xpu.manual_seed = xpu.manual_seed_all = xpu.reset_peak_memory_stats = nothing
    for name in ("allocated", "reserved"):
        for what in (f"memory_{name}", f"max_memory_{name}", f"reset_max_memory_{name}"):
            setattr(xpu, what, nothing)
