# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Entry points for a training script: ``initialize`` and ``Init``."""

from __future__ import annotations

from typing import Any

import deepspeed

from zero_topo.hook.install import install


def enable() -> None:
    """Install the hook into DeepSpeed; after ``import zero_topo`` an import of DeepSpeed installs it too.

    Raises:
        ImportError: if the hook does not fit the installed DeepSpeed, naming the differences.
    """
    install()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Install the hook and call ``deepspeed.initialize`` with these arguments.

    Raises:
        ValueError: for an invalid ``zero_topo`` block or machine, before any process group exists.
    """
    enable()
    return deepspeed.initialize(*args, **kwargs)


def init_context(*args: Any, **kwargs: Any) -> Any:
    """Install the hook and return ``deepspeed.zero.Init``, which partitions parameters as they are built."""
    enable()
    return deepspeed.zero.Init(*args, **kwargs)
