# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reports the state of torch, DeepSpeed and the kernels; runs in the process of ``judge.py``."""

from __future__ import annotations

import importlib.util
from typing import Any


def state() -> dict[str, Any]:
    """Return the state, without compiling anything."""
    import torch

    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    platform = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    if accelerator is not None and accelerator.type != "cuda":
        platform = accelerator.type
    return {
        "platform": platform,
        "devices": torch.accelerator.device_count() if accelerator is not None else 0,
        "seam": _seam(),
        "kernels": _kernels(),
    }


def _seam() -> str | None:
    """Return in one line why the seam does not fit the installed DeepSpeed; None if it does."""
    from zero_topo.hook import seam

    try:
        seam.check_deepspeed()
    except ImportError as error:
        return str(error).replace("\n", " ")
    return None


def _kernels() -> dict[str, str]:
    """Return builder -> "built", "not compiled", or why it cannot be compiled."""
    from zero_topo.op_builder.builder import BUILDERS

    found = {}
    for kind in BUILDERS:
        builder = kind()
        found[builder.name] = _state(builder)
    return found


def _state(builder: Any) -> str:
    from zero_topo.op_builder import jit

    ahead = importlib.util.find_spec(builder.absolute_name()) is not None
    try:
        if not ahead and jit.refusal(builder.chosen().library()):
            return builder.reason() or "not compiled"
        builder.load()
    except jit.BuildError as error:
        return str(error)
    return "built"
