# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Transfer of sync's residuals, and of AgedAdamW's ages, to a run with another number of nodes.

Note [Residuals of another run]
    A residual belongs to one peer, so it cannot be loaded if the peers change. But the sum over the
    peers is the part of the gradients that the optimizer has not received, whichever peer stores
    it: each of ``P`` new peers takes a ``P``-th. A change of the number of ranks needs DeepSpeed's
    conversion to a universal checkpoint, which ignores residuals and ages. :func:`carry` adds the
    sums and AgedAdamW's ages (steps since each element arrived) to its output.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_topo.engine.shards import Layout
from zero_topo.plan import Plan
from zero_topo.sync import Parameter, SyncMode

FILE = "zero_topo_residuals.pt"
STATE_KEY = "zero_topo"  # our entry in DeepSpeed's optimizer checkpoints
_SAVED = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
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


def restore(mode: SyncMode, state: Mapping[str, Any], plan: Plan) -> str | None:
    """Load a checkpoint's state into a mode of sync, if the run has the plan of the checkpoint.

    A residual depends on the set of peers and on the parameters that take part; a mode's other
    state also depends on which rank needs which sums. Peers and needs follow from the degrees of
    gradients and optimizer, and from the placement.

    Args:
        mode: newly built.
        state: this rank's :meth:`~zero_topo.engine.stage3.Stage3.state_dict`, or empty.
        plan: the current plan, for as many ranks.

    Returns:
        A message, if state of another plan was dropped: what the user can do about it. Else None.

    Raises:
        ValueError: for state of another mode or of other shapes.
    """
    sync = state.get("sync")
    if not sync:
        return None
    degrees = [state.get("degrees", {}), plan.degrees()]
    reduced = [(each.get("gradients"), each.get("optimizer")) for each in degrees]
    was = state.get("residual_owners")
    now = mode.residual_owners()
    if reduced[0] == reduced[1] and (was is None or now is None or was == now._asdict()):
        mode.load_state_dict(sync)
        return None
    plans = [f"gradients over {of[0]} and optimizer over {of[1]}" for of in reduced]
    return (
        f"the checkpoint was saved with {' ranks, this run has '.join(plans)}, or with ranks "
        "elsewhere, or other parameters take part in sync now: sync starts anew, without each "
        'rank\'s residual; a universal checkpoint and "zero-topo carry" keep the whole residual'
    )


def carry(saved: Path, universal: Path) -> Carried:
    """Write a saved run's residuals, summed over its ranks, and its ages into the run's universal
    checkpoint.

    No code from the files is executed.

    Args:
        saved: the folder of one tag, written by ``save_checkpoint``.
        universal: the folder that ``ds_to_universal`` wrote from it.

    Returns:
        The content of the written file, ``zero_topo_residuals.pt``.

    Raises:
        ValueError: if a folder or a rank's file is missing, a file is damaged, or the run kept no
            residuals.
    """
    matches = ((path, _SAVED.search(path.name)) for path in sorted(saved.glob("*.pt")))
    found = [(match, path) for path, match in matches if match]
    # The second number is the tensor-parallel rank.
    if any(int(match[2]) for match, _ in found):
        raise ValueError(
            f"{saved}: a run with tensor parallelism, whose residuals of parts cannot be carried; "
            "load its universal checkpoint without them"
        )
    files = [(int(match[1]), path) for match, path in found]
    if not files:
        raise ValueError(
            f"{saved}: no *_zero_pp_rank_*_optim_states.pt; name the folder of one tag, inside the "
            "one that save_checkpoint was given"
        )
    if not universal.is_dir():
        raise ValueError(
            f"{universal}: no such folder; make it first, with DeepSpeed's ds_to_universal"
        )
    residuals = Entries()
    ages = Entries()
    ranks = [rank for rank, _ in files]
    for rank, path in files:
        content = _read(path)
        try:
            state = content["optimizer_state_dict"]
            world_size = int(state["partition_count"])
            _check_ranks(saved, ranks, world_size)
            own = state.get(STATE_KEY, {})
            _add_residual(own, rank, world_size, residuals)
            _add_ages(state.get("optimizer_state_dict", {}), rank, own.get("columns", {}), ages)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"{path}: not as save_checkpoint wrote it ({first_line(error)}); copy it anew"
            ) from None
    if not residuals:
        raise ValueError(f"{saved}: no rank kept a residual; there is nothing to carry over")
    # Under another name first: a copy that is cut off is not taken for a whole one.
    other_state = universal / f"{FILE}.part"
    torch.save({"residuals": residuals, "ages": ages}, other_state)
    os.replace(other_state, universal / FILE)
    return residuals, ages


def carried(folder: str | Path | None, parameters: Sequence[Parameter] = ()) -> Carried:
    """Read the file that :func:`carry` wrote into a checkpoint's folder; empty if there is none.

    Raises:
        ValueError: if the file is damaged, or has another size of one of this run's parameters.
    """
    path = None if folder is None else Path(folder) / FILE
    if path is None or not path.is_file():
        return {}, {}
    content = _read(path)
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


def _read(path: Path) -> Any:
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


def _check_ranks(saved: Path, ranks: list[int], world_size: int) -> None:
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing:
        raise ValueError(
            f"{saved}: of the run's {world_size} ranks the *_optim_states.pt of rank {missing[0]} "
            f"is missing ({len(missing)} in all); bring the files of all nodes into this folder"
        )
    if len(ranks) > world_size:
        raise ValueError(
            f"{saved}: {len(ranks)} *_optim_states.pt of a run of {world_size} ranks: remove the "
            "others"
        )


def _add_residual(state: Mapping[str, Any], rank: int, ranks: int, sums: Entries) -> None:
    """Add one rank's saved residual to ``sums``, by parameter, and the momentum that SCAPE holds
    back in its row.
    """
    owners = state.get("residual_owners")
    residual = state.get("sync", {}).get("residual")
    if owners is None or residual is None or not residual.numel():
        return
    table = residual.float().view(len(owners["owners"]), -1)
    for name, (numel, first, past) in owners["parameters"].items():
        if not 0 <= first < past <= table.shape[1] or not 0 < numel <= ranks * (past - first):
            raise IndexError(
                f"{name}: {numel} elements in columns {first} to {past} of {table.shape[1]}"
            )
        if name not in sums:
            sums[name] = torch.zeros(numel, dtype=torch.float32, device="cpu")
        rows = torch.zeros(ranks, past - first, dtype=torch.float32, device="cpu")
        # A rank has residuals of other ranks' rows too, in the order of its owners.
        rows[owners["owners"]] = table[:, first:past]
        if "momentum" in state["sync"]:
            rows[rank] += state["sync"]["momentum"][first:past]
        sums[name] += rows.view(-1)[:numel]


def _add_ages(
    optimizer: Mapping[str, Any],
    rank: int,
    columns: Mapping[str, tuple[int, int, int]],
    ages: Entries,
) -> None:
    """Copy one rank's saved ages into ``ages``: those of its world shard, in DeepSpeed's flat
    order.
    """
    saved = [state for _, state in sorted(optimizer.get("state", {}).items())]
    if not any("age" in state for state in saved):
        return
    row = torch.cat([state["age"] for state in saved])
    for name, (numel, begin, width) in columns.items():
        if name not in ages:
            ages[name] = torch.zeros(numel, dtype=torch.uint8, device="cpu")
        own = ages[name][rank * width :][:width]
        own.copy_(row[begin:][: len(own)])
