# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the package offers a training script to begin with: ``initialize``, ``Init``."""

from __future__ import annotations

from typing import Any

import deepspeed

from zero_topo.hook.install import install


def enable() -> None:
    """Install the hook into DeepSpeed; ``import zero_topo`` does it too, as soon as DeepSpeed is imported.

    Raises:
        ImportError: if the installed DeepSpeed is not one the hook fits, naming what differs.
    """
    install()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize`` with the hook in place; same arguments, same results.

    Raises:
        ValueError: for an invalid ``zero_topo`` block or machine, before any process group exists.
    """
    enable()
    return deepspeed.initialize(*args, **kwargs)


def init_context(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.zero.Init`` with the hook in place: parameters are partitioned as they are built."""
    enable()
    return deepspeed.zero.Init(*args, **kwargs)
