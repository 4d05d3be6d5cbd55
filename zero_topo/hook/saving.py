# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Atomic checkpoints: every rank writes to temporary files, which are renamed once all ranks have
written.

Note [A save that fails]
    DeepSpeed overwrites files of the same tag. If one rank cannot write, it raises torch's
    ``unexpected pos 704 vs 598`` while the others wait in a barrier. Here a rank stores its error
    until all ranks reach ``commit``, so it takes part in every collective before that. Then all
    ranks raise the same error, and no file under its final name has changed. The error is raised,
    not only logged, because scripts delete older checkpoints after a save. Training state is
    unchanged, so a caller who catches the error can train on, bit for bit as if nothing had been
    saved.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from zero_topo.engine.agreement import all_can
from zero_topo.engine.stage3 import Stage3
from zero_topo.hook.inference import TopoInference
from zero_topo.hook.seam import RECOVERY_SCRIPT, replaced, wrapping

logger = logging.getLogger(__name__)

PART = ".part"
LATEST = "latest"
OLD_S = 3600.0  # no save takes longer, so older temporary files were left by a killed save
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@wrapping
def saving_atomically(save: Callable[..., bool], engine: Any, *args: Any, **kwargs: Any) -> bool:
    """Wrap DeepSpeed's ``save_checkpoint``: our engines save through :class:`AtomicSaves`.

    An engine without an optimizer is skipped: Accelerate's ``save_state`` saves every prepared
    model, also frozen ones.
    """
    if isinstance(engine.optimizer, TopoInference):
        if engine.global_rank == 0:
            logger.warning(
                "zero_topo: save_checkpoint skips this engine: without an optimizer it has no "
                "state to resume; save_16bit_model writes its weights"
            )
        return False
    stock = engine.checkpoint_engine
    ours = (
        isinstance(getattr(engine.optimizer, "topo", None), Stage3)
        and type(stock) is TorchCheckpointEngine
    )
    if not ours:  # other checkpoint engines have their own commit
        return save(engine, *args, **kwargs)
    call = inspect.signature(save).bind(engine, *args, **kwargs)
    call.apply_defaults()
    saves = AtomicSaves(
        stock, engine.device, call.arguments["save_latest"] and engine.global_rank == 0
    )
    call.arguments["save_latest"] = False  # `commit` names the latest checkpoint
    # It is to run once all other files have their final names
    copy = getattr(DeepSpeedEngine, RECOVERY_SCRIPT)

    def copy_last(engine: Any, save_path: str) -> None:
        saves.last.append(partial(copy, engine, save_path))

    with (
        closing(saves),
        replaced(engine, "checkpoint_engine", saves),
        replaced(DeepSpeedEngine, RECOVERY_SCRIPT, copy_last),
    ):
        return save(*call.args, **call.kwargs)


class AtomicSaves:
    """A checkpoint engine that writes temporary files and renames them in ``commit`` (Note [A save
    that fails]).

    All else that DeepSpeed calls is its own engine's.

    Args:
        stock: DeepSpeed's checkpoint engine, which serializes the files.
        device: the device of the world group's tensors.
        points: whether this rank writes the file that names the latest checkpoint.
    """

    def __init__(self, stock: CheckpointEngine, device: torch.device, points: bool) -> None:
        self._stock = stock
        self._device = device
        self._points = points
        # This rank's actions once all ranks have renamed their files.
        self.last: list[Callable[[], object]] = []
        self._written: list[Path] = []
        self._problem: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        with self._keeping(path):
            self._stock.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a temporary file and fsync it: some file systems report only then that they are
        full.
        """
        with self._keeping(path):
            self._write(Path(path), lambda file: self._stock.save(state_dict, file))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Rename all files to their final names, if every rank has written its part. Collective.

        Raises:
            OSError: on every rank, naming a rank that failed, its file and the remedy.
        """
        latest = Path(info.save_dir, LATEST)
        # Three checks: all files are written, all have their names, all is done. Between them no
        # rank fails alone.
        files = [*self._written]
        if self._points:
            self.last.append(lambda: os.replace(_temporary(latest), latest))
            with self._keeping(latest):
                self._write(latest, lambda file: file.write(info.tag.encode()))
        self._agree("checkpoints saved before are as they were")
        # A rename replaces a file at once: a reader sees the old one or the new one.
        for path in files:
            with self._keeping(path):
                os.replace(_temporary(path), path)
        self._agree("save again, under another tag")
        with self._keeping(latest):
            for act in self.last:
                act()
        self._agree("its files are whole; name its tag to load it")
        if self._points:
            _remove_parts(latest.parent)
        return True

    def close(self) -> None:
        """Remove temporary files that were not renamed, and folders that are then empty."""
        for path in self._written:
            with suppress(OSError):
                _temporary(path).unlink(missing_ok=True)
                if path.name != LATEST:
                    path.parent.rmdir()

    @contextmanager
    def _keeping(self, path: str | Path) -> Iterator[None]:
        """Store the first error with a path until all ranks reach a check in ``commit``."""
        try:
            yield
        except Exception as error:
            # Torch raises RuntimeError for a full disk, pickle its own errors.
            self._problem = self._problem or _sentence(Path(path), error)

    def _write(self, path: Path, fill: Callable[[Any], object]) -> None:
        if self._problem is not None:
            return
        self._written.append(path)
        # Left by a killed save; a symbolic link is not followed
        _temporary(path).unlink(missing_ok=True)
        with _temporary(path).open("xb") as file:
            fill(file)
            file.flush()
            # Before the name: after a power cut a file with its name has its content.
            os.fsync(file.fileno())

    def _agree(self, way_out: str) -> None:
        if refused := all_can(self._problem, {}, self._device, way_out):
            raise OSError(f"zero_topo: the checkpoint is not saved: {refused}")


def _remove_parts(folder: Path) -> None:
    """Remove files that killed saves left in a folder of checkpoints, and tags that are then
    empty.
    """
    for part in (*folder.glob(f"*/*.pt{PART}"), _temporary(folder / LATEST)):
        with suppress(OSError):
            if time.time() - part.lstat().st_mtime > OLD_S:
                part.unlink()
                part.parent.rmdir()


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}{PART}")


def _sentence(path: Path, error: Exception) -> str:
    """Return a message about an error with a path: the path, the reason and the remedy."""
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # torch's own error describes only a consequence
    if not isinstance(error, OSError):
        return f"{path} cannot be written: {type(error).__name__}: {error}"
    reason = f"{path} cannot be written ({error.strerror})"
    if error.errno not in FULL:
        return f"{reason}: make its folder writable, or save into another"
    return f"{reason}: delete older checkpoints, raise the quota, or save into another folder"
