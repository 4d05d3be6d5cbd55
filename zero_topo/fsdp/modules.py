# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Chooses and orders the modules that FSDP2 gathers one by one.

FSDP2 gathers a module's weights when the module is called. It wants inner modules before outer
ones, each once, and no container without a forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

Unit = nn.Module | tuple[nn.Module, ...]
"""What FSDP2 gathers at once: a module, or several."""


def inner_first(model: nn.Module, modules: Iterable[nn.Module | Sequence[nn.Module]]) -> list[Unit]:
    """Return modules of a model, inner ones first, each once; elements in place of containers.

    Raises:
        ValueError: for a module that is not the model's.
    """
    units: dict[Unit, None] = {}
    for module in modules:
        called = _called(module) if isinstance(module, nn.Module) else [tuple(module)]
        units.update(dict.fromkeys(called))
    units.pop(model, None)
    place = {module: index for index, module in enumerate(post_order(model, set()))}

    def last_place(unit: Unit) -> int:
        members = [unit] if isinstance(unit, nn.Module) else unit
        for module in members:
            if module not in place:
                raise ValueError(
                    f"modules: {type(module).__name__} is not in the model; choose modules of "
                    "model.modules()"
                )
        return max(place[module] for module in members)

    return sorted(units, key=last_place)


def elements_of_lists(model: nn.Module) -> list[Unit]:
    """Return the elements of every ModuleList, as :func:`inner_first` orders them.

    Two kinds stay with the module around them:
        Experts: ranks call different ones, and a gather needs all ranks.
        Elements with a parameter that is also used outside of them: FSDP2 would untie it.
    """
    elements: set[nn.Module] = set()
    experts: set[nn.Module] = set()
    for name, module in model.named_modules():
        own_name = name.rpartition(".")[2]
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and "expert" in own_name:
            experts.update(module.modules())
        if isinstance(module, nn.ModuleList) and module not in experts:
            elements.update(module.children())
    paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    uses = Counter(param for _, param in model.named_parameters(remove_duplicate=False))
    chosen: list[Unit] = []
    gathered: set[nn.Parameter] = set()
    for module in inner_first(model, elements):
        assert isinstance(module, nn.Module)
        inside = Counter(param for _, param in module.named_parameters(remove_duplicate=False))
        own = inside.keys() - gathered
        if all(uses[param] == paths[module] * inside[param] for param in own):
            chosen.append(module)
            gathered |= own
    return chosen


def post_order(module: nn.Module, met: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module after those in it, each once; not those in ``met``, to which it adds."""
    met.add(module)
    for child in module.children():
        if child not in met:
            yield from post_order(child, met)
    yield module


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: a container of modules cannot."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or of a container without a forward the modules in it."""
    if has_forward(module):
        yield module
        return
    for child in module.children():
        yield from _called(child)
