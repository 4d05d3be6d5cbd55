# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What lies near the beginning of each kind of file that a command writes, by which it knows its own again."""

from __future__ import annotations

MEMORY, SCALING, TIMELINE, TRACE = (f"zero_topo {kind}" for kind in ("memory", "scaling", "timeline", "trace"))


def png_metadata(mark: str) -> dict[str, str]:
    """For matplotlib's ``savefig``, which puts it before the pixels."""
    return {"Creator": mark}
