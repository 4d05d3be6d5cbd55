# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors that live at once, as torch's operators make them: peak memory without a GPU.

Counted are the storages of what operators make while the mode is entered, in its own thread, until nobody holds them;
what they are given was there before. What an operator allocates inside and gives back, a library's work space, is not
seen.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Follows the storages that are made while it is entered.

    Args:
        known: tensors that live already and shall count.

    Attributes:
        live: bytes that live now.
        peak: the most that lived at once since the start, or since :meth:`reset`.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        for tensor in known:
            self._follow(tensor)

    def reset(self) -> None:
        """Forget the peak, not what lives."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and follow what it returns."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._seen.setdefault(leaf.untyped_storage())
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return made

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen[storage], nbytes = None, storage.nbytes()
        weakref.finalize(storage, self._freed, nbytes)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes
