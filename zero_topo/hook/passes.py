# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Hooks on the module; tracks backward passes: which of them failed, and which run inside a forward
pass.

Failed passes
    A backward pass that failed half-way has added some of its gradients, so all gradients since the
    last step are useless. Gradients without DeepSpeed's epilogue are no sign of it: a loss may run
    backward inside its forward pass (DeepSpeed's TiledFusedLogitsLoss), and the epilogue follows in
    the outer pass. The sign is autograd's own: it calls back at the end of a graph task only if the
    task succeeded. A reentrant checkpoint is a task in a task; the outer one is recorded when
    DeepSpeed's hook on the engine's output runs, before any gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch


class BackwardPasses:
    """The backward passes since the last step.

    Attributes:
        outer: whether a pass of the engine has begun and its epilogue has not ended. DeepSpeed's
            boundary flag is then that of this pass; in a pass inside a forward pass it is that of
            an earlier one.
        unreduced: whether gradients were added since the last epilogue.
    """

    def __init__(self) -> None:
        self.outer = False
        self.unreduced = False
        # Graph tasks that have begun and not ended; -1 is DeepSpeed's work outside of any.
        self._open: set[int] = set()

    def begin(self, outer: bool = False) -> None:
        """Record the graph task that runs now.

        Args:
            outer: whether DeepSpeed has begun it, as a pass of the engine.
        """
        self.outer |= outer
        task = graph_task()
        if task in self._open:
            return
        self._open.add(task)
        if task != -1:
            # A pass that fails never calls back: its task stays open, which is the sign.
            ended = partial(self._open.discard, task)
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    def add(self) -> None:
        """Record that the running pass adds a gradient."""
        self.begin()
        self.unreduced = True

    @contextmanager
    def epilogue(self) -> Iterator[None]:
        """Record DeepSpeed's epilogue, which ends a pass unless it raises."""
        task = graph_task()
        self._open.add(task)
        yield
        self._open.discard(task)
        self.outer = False
        self.unreduced = False

    def failed(self) -> bool:
        """Return whether a pass has failed after gradients were added; asked between passes."""
        return bool(self._open) and self.unreduced

    def forget(self) -> None:
        """Start anew, as after a step."""
        self._open.clear()
        self.outer = False
        self.unreduced = False


def graph_task() -> int:
    """Return the number of autograd's running graph task; -1 outside of backward passes."""
    return torch._C._current_graph_task_id()


def module_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook for ``method.__self__.module`` that calls a bound method as long as its object
    lives.

    The module stays the user's: ``copy.deepcopy`` copies hooks with a module, and would copy the
    engine behind a bound method. A function is not copied, and the copy of a module calls nothing.

    Args:
        method: takes what the hook gets behind the module.
    """
    owner = WeakMethod(method)

    # As DeepSpeed's own hooks: what it does is not part of a compiled graph
    @torch.compiler.disable
    def hook(module: torch.nn.Module, *args: Any) -> None:
        bound = owner()
        if bound is not None and bound.__self__.module is module:  # type: ignore[attr-defined]
            bound(*args)

    return hook
