# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Installs the hooks when DeepSpeed and Accelerate are imported, so that ``import zero_topo``
imports nothing heavy.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

from zero_topo.versions import check_loaded

# Module that is waited for -> ours that installs its hook by being imported.
HOOKS: Mapping[str, str] = MappingProxyType(
    {
        "deepspeed": "zero_topo.hook.install",
        "accelerate.utils.dataclasses": "zero_topo.hook.hugging_face",
    }
)


class _HookingFinder(MetaPathFinder, Loader):
    """Finds a module through the finders after it, loads it by its own loader, and then installs
    the hook.

    It stays installed, because a search for the module does not import it; transformers and
    accelerate search early.
    """

    _loader: Loader

    def __init__(self, awaited: str) -> None:
        self.awaited = awaited

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.awaited:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(
            (found for finder in later if (found := finder.find_spec(fullname, path, target))), None
        )
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # If the module is imported by the hook's own import, that goes on to install it.
        install(HOOKS[self.awaited])


def install(hook: str) -> None:
    """Import what installs a hook, which names privates of releases that are supported.

    Raises:
        ImportError: for a release of torch or DeepSpeed that is not, before anything is patched.
    """
    check_loaded(sys.modules)
    # Without it FSDP2 alone is of use, and Accelerate needs no hook
    if find_spec("deepspeed") is not None:
        importlib.import_module(hook)


def arm() -> None:
    """Install each hook now if its module is there already, else as soon as it is imported."""
    waiting = {finder.awaited for finder in sys.meta_path if isinstance(finder, _HookingFinder)}
    for awaited, hook in HOOKS.items():
        if awaited in sys.modules:
            install(hook)
        elif awaited not in waiting:
            sys.meta_path.insert(0, _HookingFinder(awaited))
