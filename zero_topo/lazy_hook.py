# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Installs the DeepSpeed hook when DeepSpeed is imported, so that ``import zero_topo`` itself imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _HookingLoader(Loader):
    """Runs DeepSpeed's own loader, then installs the hook."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _install()


class _DeepSpeedFinder(MetaPathFinder):
    """Finds ``deepspeed`` once, through the finders after it, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader)
        return spec


def arm() -> None:
    """Install the hook now if DeepSpeed is there already, else as soon as it is imported."""
    if "deepspeed" in sys.modules:
        _install()
    elif not any(isinstance(finder, _DeepSpeedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeepSpeedFinder())


def _install() -> None:
    """Import the hook, which installs itself; if DeepSpeed is imported by the hook's own import, that goes on to it."""
    importlib.import_module("zero_topo.engine.hook")
