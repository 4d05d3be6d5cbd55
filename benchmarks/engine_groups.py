# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's process groups of engines that follow each other in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.utils import groups


@contextmanager
def clean_groups() -> Iterator[None]:
    """Restore DeepSpeed's groups afterwards, so that later engines of this process have none of
    these.
    """
    saved = {
        name: value for name, value in vars(groups).items() if name == "mpu" or name.startswith("_")
    }
    saved = {
        name: dict(value) if isinstance(value, dict) else value for name, value in saved.items()
    }
    try:
        yield
    finally:
        for name, value in saved.items():
            current = getattr(groups, name)
            if isinstance(value, dict) and not name.startswith("__"):
                current.clear()
                current.update(value)
            elif not callable(value) and not name.startswith("__"):
                setattr(groups, name, value)
