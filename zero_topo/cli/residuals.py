# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Adds the residuals and ages of a saved run to its universal checkpoint; see Note [Residuals of
another run] in ``engine/residual_transfer.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zero_topo.engine.residual_transfer import (
    FILE,
    STATE_KEY,
    Carried,
    Entries,
    first_line,
    read_saved,
)

_SAVED = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")


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
    matches = [_SAVED.search(str(path)) for path in sorted(saved.glob("*.pt"))]
    found = [match for match in matches if match]
    # The second number is the tensor-parallel rank.
    if any(int(match[2]) for match in found):
        raise ValueError(
            f"{saved}: a run with tensor parallelism, whose residuals of parts cannot be carried; "
            "load its universal checkpoint without them"
        )
    files = [(int(match[1]), Path(match.string)) for match in found]
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
        try:
            state = read_saved(path)["optimizer_state_dict"]
            world_size = int(state["partition_count"])
            _check_ranks(saved, ranks, world_size)
            own = state.get(STATE_KEY, {})
            _add_residual(own, rank, world_size, residuals)
            _add_ages(state.get("optimizer_state_dict", {}), rank, own.get("columns", {}), ages)
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
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
