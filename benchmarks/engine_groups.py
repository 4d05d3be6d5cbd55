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
    saved = {}
    for name, value in vars(groups).items():
        private = name.startswith("_") and not name.startswith("__")
        if name == "mpu" or (private and not callable(value)):
            saved[name] = dict(value) if isinstance(value, dict) else value
    try:
        yield
    finally:
        for name, value in saved.items():
            if isinstance(value, dict):
                # Other modules hold the dictionary itself.
                kept = getattr(groups, name)
                kept.clear()
                kept.update(value)
            else:
                setattr(groups, name, value)
