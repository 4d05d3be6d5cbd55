# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes to train on: by default the sources of the running Python's own standard library, so
nothing is downloaded.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
EVAL_EVERY = 20  # one piece in twenty is kept for evaluation


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Every `*.py` of the standard library in sorted order, without its tests and without installed
    packages.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = (
        path
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )
    return sorted(files)


def _pieces(path: Path | None) -> list[bytes]:
    """The text as separate pieces: one per file, or 20 equal cuts when there is a single file."""
    if path is None:
        return [file.read_bytes() for file in standard_library_files()]
    if not path.exists():
        raise ValueError(
            f"--data {path} does not exist: give a text file or a folder of text files"
        )
    if path.is_dir():
        return [file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()]
    content = path.read_bytes()
    size = -(-len(content) // EVAL_EVERY) or 1
    return [content[start : start + size] for start in range(0, len(content), size)]


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation bytes, each one uint8 tensor `[bytes]` that no other part
    overlaps.
    """

    train: Tensor
    evaluation: Tensor

    @classmethod
    def load(cls, path: Path | None, context: int) -> Corpus:
        """Read the text and keep every 20th piece for evaluation.

        Raises:
            ValueError: the path is missing, or a part is shorter than one sample of `context` + 1
                bytes.
        """
        pieces = _pieces(path)
        parts = []
        for chosen in (False, True):
            joined = b"".join(
                piece
                for i, piece in enumerate(pieces)
                if (i % EVAL_EVERY == EVAL_EVERY - 1) == chosen
            )
            if len(joined) <= context:
                what = "evaluation" if chosen else "training"
                raise ValueError(
                    f"the {what} text of {path or 'the standard library'} has {len(joined)} bytes, "
                    f"one sample needs {context + 1}: give --data more text ({EVAL_EVERY} files, "
                    f"or one file {EVAL_EVERY} times longer)"
                )
            parts.append(torch.frombuffer(bytearray(joined), dtype=torch.uint8))
        return cls(*parts)


def batch(
    text: Tensor, shape: tuple[int, int], seed: int, step: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Draw one micro-batch; a pure function of (seed, step, rank), so a resumed run sees the
    batches it would have.

    Args:
        text: uint8 `[bytes]`.
        shape: (batch, context).
        seed: of the run.
        step: number of this micro-batch since the start of the run.
        rank: each rank draws its own.

    Returns:
        Tokens and targets, int64 `[batch, context]`; targets are the tokens one byte later.
    """
    size, context = shape
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 65_537 + rank)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
