# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Keeps "auto" in the ``zero_topo`` block when Accelerate fills in a DeepSpeed config.

Accelerate's DeepSpeedPlugin, which the Trainer uses too, replaces every "auto" in the config or rejects it. In the
``zero_topo`` block "auto" is a value ("scheme", "topology"), so the patched plugin skips the block.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from accelerate.utils.dataclasses import DeepSpeedPlugin

BLOCK = "zero_topo."


def install() -> None:
    """Patch the plugin to skip the ``zero_topo`` block; later calls do nothing."""
    fill = DeepSpeedPlugin.fill_match
    if getattr(fill, "skips_zero_topo", False):
        return

    @wraps(fill)
    def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> None:
        if not ds_key_long.startswith(BLOCK):
            fill(self, ds_key_long, *args, **kwargs)

    fill_match.skips_zero_topo = True  # type: ignore[attr-defined]
    DeepSpeedPlugin.fill_match = fill_match


install()  # importing this module applies the patch
