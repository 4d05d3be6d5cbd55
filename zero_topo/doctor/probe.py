# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m zero_topo.doctor.probe``: prints the state of torch, DeepSpeed and the kernels as one JSON line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from typing import Any


def main() -> None:
    """Print the object, without compiling anything."""
    logging.disable(logging.WARNING)
    print(json.dumps({**_torch(), **_seam(), "kernels": _kernels()}))


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    return {
        "torch": torch.__version__,
        "platform": "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu",
        "devices": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
        "mpi4py": importlib.util.find_spec("mpi4py") is not None,
        "triton": _triton(),
    }


def _triton() -> str | None:
    """Return the version of Triton, or None."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None


def _seam() -> dict[str, Any]:
    """Check whether the seam fits the installed DeepSpeed: ``seam`` is None if it does, else one line."""
    try:
        import deepspeed  # noqa: F401  (first, for with it comes the hook, which imports the seam)

        from zero_topo.hook import seam

        seam.check_deepspeed()
    except ImportError as error:
        return {"seam": str(error).replace("\n", " ")}
    return {"seam": None}


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


if __name__ == "__main__":
    main()
