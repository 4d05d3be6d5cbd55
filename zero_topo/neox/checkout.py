# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Finds NeoX and makes its modules importable."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from zero_topo.neox import adapt, cpu
from zero_topo.neox.config import Options


def reach(options: Options) -> None:
    """Make ``megatron`` importable, install zero_topo's hook and apply the adaptations to NeoX.

    Raises:
        ValueError: if there is no NeoX, or something it imports is not installed.
    """
    if options.neox_path is not None:
        path = Path(options.neox_path).resolve()
        if not (path / "megatron").is_dir():
            raise ValueError(f"NEOX_PATH = {options.neox_path}: holds no folder megatron; give a checkout of gpt-neox")
        sys.path.insert(0, str(path))
    elif importlib.util.find_spec("megatron") is None:
        raise ValueError("GPT-NeoX is not found; set NEOX_PATH or --neox-path to a checkout of EleutherAI/gpt-neox")
    if options.cpu:
        cpu.choose_cpu()
        cpu.stand_in(int(os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE") or options.ranks or 1))
    from zero_topo.hook.install import enable

    enable()
    try:
        adapt.install()
        if options.cpu:
            cpu.adapt_neox()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"GPT-NeoX imports {error.name}, which is not installed; install its requirements "
            "(with setuptools<81, which still has pkg_resources)"
        ) from error
