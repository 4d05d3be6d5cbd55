# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""FSDP2's settings of a sharded module: which we follow, and which we refuse. FSDP2 does the rest
itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch.distributed.fsdp import FSDPModule

COLLECTIVES = "the model's collectives are those of the block; leave the call out"
REFUSED = {
    "set_all_reduce_hook": (
        "its tensor would be the sum of the ranks that share weights, not of all; leave it out, "
        'or set "sync" in the block'
    ),
    "set_custom_all_gather": COLLECTIVES,
    "set_custom_reduce_scatter": COLLECTIVES,
    "set_separate_reduce_scatter_group": COLLECTIVES,
    "set_allocate_memory_from_process_group_for_comm": COLLECTIVES,
    "set_symm_mem_for_comm": COLLECTIVES,
}
"""Methods of an FSDP module that have no effect, or a wrong one, and what to do."""


def before_attach(module: Any, name: str) -> Any:
    """Return FSDP2's own setting of a module: no public call returns it."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    return next((getattr(group, name) for group in groups), None)


def refuse(module: FSDPModule) -> None:
    """Let the refused methods of a module raise ValueError; raise it for a hook that is set."""
    if before_attach(module, "_all_reduce_hook") is not None:
        raise ValueError(f"set_all_reduce_hook: {REFUSED['set_all_reduce_hook']}")
    for name, reason in REFUSED.items():
        follow(module, name, partial(_refused, f"{name}: {reason}"))


def _refused(reason: str, *given: Any) -> None:
    raise ValueError(reason)


def follow(module: Any, name: str, react: Callable[..., None], call: bool = True) -> None:
    """Call a function with the arguments of FSDP2's method of a module, but for keyword-only ones.

    Args:
        module: the module.
        name: the method.
        react: the function, called first.
        call: whether FSDP2's own method is called too.
    """
    own = getattr(module, name)
    signature = inspect.signature(own)

    @wraps(own)
    def followed(*args: Any, **kwargs: Any) -> Any:
        react(*signature.bind(*args, **kwargs).args)
        return own(*args, **kwargs) if call else None

    setattr(module, name, followed)


class PassFlags:
    """Whether the next backward pass is the last one of a step, by FSDP2's own calls.

    Args:
        model: the root module.
    """

    def __init__(self, model: Any) -> None:
        self._is_last = True
        self._all_reduces = True
        for module in model.modules():
            if isinstance(module, FSDPModule):
                follow(module, "set_is_last_backward", self._set_last)
        follow(model, "set_requires_all_reduce", self._set_all_reduce)
        follow(model, "set_requires_gradient_sync", self._set_all_reduce)  # FSDP2 sets both by it

    @property
    def last(self) -> bool:
        """Whether it is the last."""
        return self._is_last and self._all_reduces

    def _set_last(self, is_last_backward: bool) -> None:
        self._is_last = is_last_backward

    def _set_all_reduce(self, requires_all_reduce: bool) -> None:
        self._all_reduces = requires_all_reduce
