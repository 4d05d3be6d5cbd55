# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint that one rank cannot write is saved by none, and says so on every rank; what was
saved before stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine

from tests.harness import run_threads
from zero_topo.hook.saving import LATEST, PART, AtomicSaves

RANKS, BROKEN = 4, 2


def save(folder: Path, tag: str, rank: int, value: Any) -> str:
    """What DeepSpeed does to save a file of each rank; what went wrong, or nothing."""
    alongside = AtomicSaves(TorchCheckpointEngine(), torch.device("cpu"), rank == 0)
    info = CheckpointCommitInfo(tag=tag, save_dir=str(folder), save_latest=False)
    try:
        alongside.create(info)
        alongside.makedirs(f"{folder}/{tag}", exist_ok=True)
        alongside.save(value, f"{folder}/{tag}/{rank}.pt")
        alongside.commit(info)
        return ""
    except OSError as error:
        return str(error)
    finally:
        alongside.close()


def whole(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def blocked(path: Path) -> None:
    """A folder with something in it has the name of a file that is to be written."""
    (path / "x").mkdir(parents=True)


@pytest.mark.parametrize(
    ("tag", "harm", "value", "message"),
    [
        (
            "new",
            lambda folder: blocked(folder / "new/2.pt.part"),
            1,
            r"rank 2 of .*/new/2\.pt cannot be written",
        ),
        (
            "old",
            lambda folder: blocked(folder / "old/2.pt.part"),
            1,
            r"rank 2 of .*/old/2\.pt cannot be",
        ),
        (
            "new",
            lambda folder: (folder / "new").write_text("x"),
            1,
            r"/new cannot be written \(File exists\): make its folder writable",
        ),
        (
            "new",
            lambda _: None,
            lambda: 0,
            r"rank 2 of .*/new/2\.pt cannot be written: \w+Error: ",
        ),
    ],
    ids=["its file", "the same tag", "the folder", "its state"],
)
def test_where_one_rank_cannot_write_none_does(
    tag: str, harm: Callable[[Path], object], value: Any, message: str, tmp_path: Path
) -> None:
    """All raise the same, and what was saved before stays as it was, even under the same tag."""
    assert run_threads(RANKS, lambda rank: save(tmp_path, "old", rank, 0)) == [""] * RANKS
    assert sorted(whole(tmp_path)) == [LATEST, *(f"old/{rank}.pt" for rank in range(RANKS))]
    harm(tmp_path)
    before = whole(tmp_path)
    (said,) = set(
        run_threads(RANKS, lambda rank: save(tmp_path, tag, rank, value if rank == BROKEN else 1))
    )
    assert re.search(message, said) and said.endswith("; checkpoints saved before are as they were")
    assert whole(tmp_path) == before
    assert (tmp_path / "new").exists() == (tag == "new" and not callable(value))


def test_the_latest_is_named_when_all_files_are_in_their_places(tmp_path: Path) -> None:
    """Neither a rename nor the last word that fails leaves a name that leads to half a
    checkpoint.
    """
    run_threads(RANKS, lambda rank: save(tmp_path, "old", rank, 0))
    blocked(tmp_path / "half/2.pt")
    (said,) = set(run_threads(RANKS, lambda rank: save(tmp_path, "half", rank, 1)))
    assert (
        said.endswith("; save again, under another tag")
        and (tmp_path / LATEST).read_text() == "old"
    )
    (tmp_path / LATEST).unlink()
    blocked(tmp_path / LATEST)
    (said,) = set(run_threads(RANKS, lambda rank: save(tmp_path, "new", rank, 1)))
    assert f"{LATEST} cannot be written" in said and said.endswith(
        "; its files are whole; name its tag to load it"
    )
    assert all(torch.load(tmp_path / f"new/{rank}.pt") == 1 for rank in range(RANKS))
    assert not list(tmp_path.rglob(f"*{PART}"))


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    """Its files and its tag, once they are old: younger ones may be another job's. A link is never
    written through.
    """
    mine, left = (
        tmp_path / "mine",
        [tmp_path / f"checkpoints/{name}{PART}" for name in ("old/0.pt", "now/0.pt")],
    )
    mine.write_text("mine")
    for part in left:
        part.parent.mkdir(parents=True)
        part.touch()
    os.utime(left[0], (0, 0))
    for name in (LATEST, "new/0.pt"):
        link = tmp_path / f"checkpoints/{name}{PART}"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(mine)
    assert run_threads(1, lambda rank: save(tmp_path / "checkpoints", "new", rank, 0)) == [""]
    assert mine.read_text() == "mine" and not left[0].parent.exists() and left[1].exists()
