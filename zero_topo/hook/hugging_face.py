# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Keeps "auto" in the ``zero_topo`` block when Accelerate fills in a DeepSpeed config.

Accelerate's DeepSpeedPlugin, which the Trainer uses too, replaces every "auto" in the config or
rejects it. In the ``zero_topo`` block "auto" is a value ("scheme", "topology"), so the patched
plugin skips the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils.dataclasses import DeepSpeedPlugin

from zero_topo.hook.seam import wrapping

BLOCK = "zero_topo."


@wrapping
def fill_others(
    fill: Callable[..., None],
    plugin: Any,
    ds_key_long: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap Accelerate's ``fill``, which replaces one key's "auto", to skip the keys of the
    ``zero_topo`` block.
    """
    if not ds_key_long.startswith(BLOCK):
        fill(plugin, ds_key_long, *args, **kwargs)


# Importing this module applies the patch
DeepSpeedPlugin.fill_match = fill_others(DeepSpeedPlugin.fill_match)
