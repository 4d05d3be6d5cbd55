# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint recut for other ranks, sub-groups and orders is the one that those ranks would have
saved.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero_topo.hook.resharding import Saved, file_name

Shapes = list[dict[str, torch.Size]]
NUMELS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def values(numel: int, salt: int) -> Tensor:
    """A parameter's master, state or weights, whole."""
    return torch.arange(numel, dtype=torch.float32) + 100 * salt


def shard(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """DeepSpeed's of a rank, its padding zero."""
    width = -(-len(whole) // ranks)
    padded = torch.zeros(ranks * width, dtype=whole.dtype)
    padded[: len(whole)] = whole
    return padded[rank * width :][:width]


def files_of(
    shapes: Shapes, groups: list[int], rank: int, ranks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank saves: its model states and its optimizer states."""

    def flat(names: dict[str, torch.Size], salt: int) -> Tensor:
        return torch.cat(
            [shard(values(of.numel(), salt + int(name)), rank, ranks) for name, of in names.items()]
        )

    model = {
        "module": {"buffer": torch.ones(2)},
        "dp_world_size": ranks,
        "param_shapes": shapes,
        "frozen_param_shapes": {"still": torch.Size([7, 3])},
        "frozen_param_fragments": {"still": shard(values(21, 9).bfloat16(), rank, ranks)},
    }
    state = {
        i: {"step": torch.tensor(3.0), "exp_avg": flat(names, 50)} for i, names in enumerate(shapes)
    }
    params = [
        [i for i, group in enumerate(groups) if group == index] for index in range(max(groups) + 1)
    ]
    inner = {
        "state": state,
        "param_groups": [{"lr": 0.1 + i, "params": own} for i, own in enumerate(params)],
    }
    flats = [flat(names, 0) for names in shapes]
    optimizer = {
        "partition_count": ranks,
        "optimizer_state_dict": inner,
        "fp32_flat_groups": flats,
        "loss_scaler": 8,
    }
    return model, {"optimizer_state_dict": optimizer}


def saved(folder: Path, shapes: Shapes, groups: list[int], ranks: int) -> None:
    """Write the files of all ranks."""
    for rank in range(ranks):
        for kind, content in zip(
            ("model", "optim"), files_of(shapes, groups, rank, ranks), strict=True
        ):
            torch.save(content, folder / file_name(rank, kind))


def sub_groups(numels: list[int], size: int) -> tuple[Shapes, list[int]]:
    """Parameters 0, 1, ... in two parameter groups, cut into sub-groups of ``size``; the group of
    each.
    """
    shapes: Shapes = []
    groups = []
    half = (len(numels) + 1) // 2
    for group, own in enumerate((range(half), range(half, len(numels)))):
        for first in range(own.start, own.stop, size):
            shapes.append(
                {str(i): torch.Size([numels[i]]) for i in range(first, min(first + size, own.stop))}
            )
            groups.append(group)
    return shapes, groups


@given(NUMELS, st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_every_rank_gets_what_it_would_have_saved(
    numels: list[int], old: int, new: int, cut: int, recut: int
) -> None:
    """To the bit: shards, padding, states, groups, counts, frozen weights."""
    shapes, groups = sub_groups(numels, recut)
    with TemporaryDirectory() as name:
        folder = Path(name)
        saved(folder, *sub_groups(numels, cut), old)
        for rank in range(new):
            mine = Saved(folder, "", rank, new)
            model, _ = files_of(*sub_groups(numels, cut), min(rank, old - 1), old)
            found = mine.model(model, shapes), mine.optimizer(shapes, groups)
            torch.testing.assert_close(found, files_of(shapes, groups, rank, new), rtol=0, atol=0)


def test_only_files_that_overlap_are_opened(tmp_path: Path) -> None:
    """Of eight ranks' files the last of four opens its two, and the first for what all have in
    common.
    """
    shapes, groups = sub_groups([16, 64], 1)
    saved(tmp_path, shapes, groups, 8)
    for rank in range(1, 6):
        for kind in ("model", "optim"):
            (tmp_path / file_name(rank, kind)).unlink()
    Saved(tmp_path, "", 3, 4).optimizer(shapes, groups)
    with pytest.raises(
        ValueError, match=r"zero_pp_rank_4_mp_rank_00_optim_states.pt cannot be read \(FileNotFound"
    ):
        Saved(tmp_path, "", 2, 4).optimizer(shapes, groups)


def test_other_parameters_and_groups_are_refused(tmp_path: Path) -> None:
    """With the parameter's name."""
    shapes, groups = sub_groups([4, 5], 1)
    saved(tmp_path, shapes, groups, 2)
    model, _ = files_of(shapes, groups, 0, 2)
    mine = Saved(tmp_path, "", 0, 3)
    for other, words in (
        ({"0": torch.Size([3])}, "has 4 elements of 0, which has 3"),
        ({"x": torch.Size([4])}, "no"),
    ):
        with pytest.raises(ValueError, match=words):
            mine.model(model, [other, shapes[1]])
    with pytest.raises(ValueError, match="0 was saved in another parameter group than 1"):
        mine.optimizer(shapes, [1, 1])


def test_a_residual_goes_along_where_the_columns_are_the_same(tmp_path: Path) -> None:
    """On other sub-groups of as many ranks; else it is dropped, and the loader gets a warning."""
    shapes, groups = sub_groups([16, 7, 5], 1)
    residual = {"sync": {"residual": torch.ones(2, 9)}}
    saved(tmp_path, shapes, groups, 2)
    for rank in range(2):
        path = tmp_path / file_name(rank, "optim")
        content = torch.load(path)
        content["optimizer_state_dict"]["zero_topo"] = residual
        torch.save(content, path)
    wider, wide_groups = sub_groups([16, 7, 5], 3)
    for ranks, kept in ((2, True), (1, False)):
        mine = Saved(tmp_path, "", 0, ranks)
        assert ("zero_topo" in mine.optimizer(wider, wide_groups)["optimizer_state_dict"]) == kept
        assert mine.drops_residual(wider) != kept
