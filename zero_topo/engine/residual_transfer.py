# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Transfer of sync's residuals, and of AgedAdamW's ages, to a run with another number of nodes.

Note [Residuals of another run]
    A residual belongs to one peer, so it cannot be loaded if the peers change. But the sum over the
    peers is the part of the gradients that the optimizer has not received, whichever peer stores
    it: each of ``P`` new peers takes a ``P``-th. A change of the number of ranks needs DeepSpeed's
    conversion to a universal checkpoint, which ignores residuals and ages. ``zero-topo carry`` adds
    the sums and AgedAdamW's ages (steps since each element arrived) to its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_topo.engine.shards import Layout
from zero_topo.sync import Parameter

FILE = "zero_topo_residuals.pt"
STATE_KEY = "zero_topo"  # our entry in DeepSpeed's optimizer checkpoints
Entries = dict[str, Tensor]  # by the name of a parameter


Carried = tuple[Entries, Entries]
"""State of sparse sync in a universal checkpoint, by parameter, ``[numel]`` each: the residuals
summed over all ranks, FP32; and the steps since each element arrived, uint8, empty for a run
without AgedAdamW.
"""


def age_rows(ages: Entries, layout: Layout, names: Sequence[str]) -> Tensor:
    """Return the ages of a rank's optimizer shard, uint8 ``[N / O, F]``."""
    plan = layout.plan
    positions = [plan.position(owner) for owner in plan.rows(layout.rank, plan.optimizer)]
    rows = torch.zeros(layout.shape(plan.optimizer), dtype=torch.uint8, device="cpu")
    for index, name in enumerate(names):
        if name in ages:
            layout.parameter(rows, index).copy_(layout.rows(ages[name])[positions])
    return rows


def carried(folder: str | Path | None, parameters: Sequence[Parameter] = ()) -> Carried:
    """Read what ``zero-topo carry`` wrote into a checkpoint's folder; empty if there is no file.

    Raises:
        ValueError: if the file is damaged, or has another size of one of this run's parameters.
    """
    path = None if folder is None else Path(folder) / FILE
    if path is None or not path.is_file():
        return {}, {}
    content = read_saved(path)
    try:
        # The file may be of any program: nothing else may be in it.
        entries = content.pop("residuals"), content.pop("ages")
        whole = not content and all(
            isinstance(x, Tensor) for values in entries for x in values.values()
        )
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: not as 'zero-topo carry' wrote it; run that again")
    for values, param in product(entries, parameters):
        if param.name in values and (stored := values[param.name].numel()) != param.numel:
            raise ValueError(
                f"{path} carries {stored} elements for {param.name}, which has {param.numel}: run "
                "it again"
            )
    return entries


class _Unread:
    """Placeholder for an object of an unknown class: its parts are dropped, and none of its code
    runs.
    """

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


def read_saved(path: Path) -> Any:
    """Load a file of ``torch.save``; tensors are memory-mapped.

    Raises:
        ValueError: if the file is damaged.
    """
    try:
        unknown: list[Any] = [
            (_Unread, name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)
        ]
        with torch.serialization.safe_globals(unknown):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the parser of a damaged file raises anything
        raise ValueError(
            f"{path}: cannot be read ({first_line(error)}); copy or save it anew"
        ) from None


def first_line(error: Exception) -> str:
    """Return the first line of an error, at most 200 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
