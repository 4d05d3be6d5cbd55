# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints are saved whole or not at all: beside the old ones, and renamed once every rank has written.

Note [A save that fails]
    DeepSpeed's own writes over files of the same tag, and where one rank cannot write, that rank raises torch's
    ``unexpected pos 704 vs 598`` while the others wait in a barrier. Here a rank keeps what went wrong to itself until
    all meet in ``commit``, so that none is missed by a collective in between; then all raise the same error, and no
    file under its final name has changed. It is raised, not logged: who saves also deletes older checkpoints. State is
    as it was, so a caller who catches it trains on, bit for bit as if nothing had been saved.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from zero_topo.engine.agreement import all_can
from zero_topo.engine.stage3 import Stage3
from zero_topo.hook.inference import TopoInference
from zero_topo.units import format_bytes

PART = ".part"
LATEST = "latest"
OLD_S = 3600.0  # no save takes longer, so what is older was left by one that was killed
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def saving_beside(save: Callable[..., bool]) -> Callable[..., bool]:
    """DeepSpeed's ``save_checkpoint``, for engines of ours by way of :class:`Beside`."""

    @wraps(save)
    def wrapper(
        engine: Any,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        if isinstance(engine.optimizer, TopoInference):
            raise ValueError("this engine has no optimizer, so no state to resume: save_16bit_model writes its weights")
        stock = engine.checkpoint_engine
        ours = isinstance(getattr(engine.optimizer, "topo", None), Stage3) and type(stock) is TorchCheckpointEngine
        if not ours:  # the other writers have a way of their own to commit
            return save(engine, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        engine.checkpoint_engine = beside = Beside(stock, engine.device, save_latest and engine.global_rank == 0)
        try:
            return save(engine, save_dir, tag, client_state or {}, False, exclude_frozen_parameters)
        finally:
            engine.checkpoint_engine = stock
            beside.clear()

    return wrapper


def copying_beside(copy: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """DeepSpeed's copying of its scripts into a checkpoint, once the rest is in its place."""

    @wraps(copy)
    def wrapper(engine: Any, save_path: str) -> None:
        if isinstance(engine.checkpoint_engine, Beside):
            engine.checkpoint_engine.last.append(partial(copy, engine, save_path))
        else:
            copy(engine, save_path)

    return wrapper


class Beside(CheckpointEngine):
    """Writes the files of one checkpoint beside their places, see Note [A save that fails].

    Args:
        stock: writes them.
        device: where the world's collectives take tensors.
        points: whether this rank writes the file that names the latest checkpoint.
    """

    def __init__(self, stock: CheckpointEngine, device: torch.device, points: bool) -> None:
        super().__init__()
        self.name = stock.name
        self._stock, self._device, self._points = stock, device, points
        self.last: list[Callable[[], object]] = []  # of this rank, when all have their files in place
        self._written: list[Path] = []
        self._problem: str | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin."""
        self._stock.create(info)

    def load(self, path: str, map_location: Any = None) -> Any:
        """As stock does."""
        return self._stock.load(path, map_location)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        with self._keeping(path):
            self._stock.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file beside its place, down to the disk: some report only there that it is full."""
        with self._keeping(path, state_dict):
            self._write(Path(path), lambda file: self._stock.save(state_dict, file))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Put everything in its place, if every rank has written its part. Collective.

        Raises:
            OSError: on every rank, naming one that could not, its file and what it wants.
        """
        latest, files = Path(info.save_dir, LATEST), [*self._written]
        if self._points:
            self.last.append(lambda: os.replace(_beside(latest), latest))
            with self._keeping(latest):
                self._write(latest, lambda file: file.write(info.tag.encode()))
        self._agree("checkpoints saved before are as they were")
        for path in files:
            with self._keeping(path):
                os.replace(_beside(path), path)
        self._agree("save again, under another tag")
        with self._keeping(latest):
            for act in self.last:
                act()
        self._agree("its files are whole; name its tag to load it")
        if self._points:
            _remove_parts(latest.parent)
        return True

    def clear(self) -> None:
        """Remove what has not come to its place, with folders that are empty without it."""
        for path in self._written:
            with suppress(OSError):
                _beside(path).unlink(missing_ok=True)
                if path.name != LATEST:
                    path.parent.rmdir()

    @contextmanager
    def _keeping(self, path: str | Path, content: Any = None) -> Iterator[None]:
        """Keep what goes wrong with a path until all ranks meet, if it is the first that does."""
        try:
            yield
        except Exception as error:  # of a full disk torch raises RuntimeError, of what cannot be saved pickle its own
            self._problem = self._problem or _sentence(Path(path), error, content)

    def _write(self, path: Path, fill: Callable[[Any], object]) -> None:
        if self._problem is not None:
            return
        self._written.append(path)
        _beside(path).unlink(missing_ok=True)  # of a killed save; a link in its place is not followed
        with _beside(path).open("xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())

    def _agree(self, way_out: str) -> None:
        try:
            all_can(self._problem, {}, self._device, way_out)
        except ValueError as error:
            raise OSError(f"zero_topo: the checkpoint is not saved: {error}") from None


def _remove_parts(folder: Path) -> None:
    """Remove what killed saves left in a folder of checkpoints, with tags that hold nothing else."""
    for part in (*folder.glob(f"*/*.pt{PART}"), _beside(folder / LATEST)):
        with suppress(OSError):
            if time.time() - part.lstat().st_mtime > OLD_S:
                part.unlink()
                part.parent.rmdir()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}{PART}")


def _sentence(path: Path, error: Exception, content: Any) -> str:
    """What went wrong with a path, and what to do."""
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # torch's own words are about what it could not do after that
    if not isinstance(error, OSError):
        return f"{path} cannot be written: {type(error).__name__}: {error}"
    reason = f"{path} cannot be written ({error.strerror})"
    if error.errno not in FULL:
        return f"{reason}: make its folder writable, or save into another"
    size: Any = _Size()
    with suppress(Exception):
        torch.save(content, size)
    place = os.statvfs(next(folder for folder in path.parents if folder.exists()))
    free = format_bytes(place.f_bavail * place.f_frsize)
    return (
        f"{reason}: it takes {format_bytes(size.nbytes)}, other ranks' about as much, and {free} are free there; "
        "delete older checkpoints, raise the quota, or save into another folder"
    )


class _Size:
    """A file that only counts."""

    nbytes = 0

    def write(self, data: Any) -> int:
        self.nbytes += len(data)
        return len(data)

    def flush(self) -> None: ...
