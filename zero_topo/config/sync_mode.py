# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the settings of every mode of ``sync`` have in common."""

from __future__ import annotations

from typing import ClassVar, Literal

from zero_topo.config.errors import StrictModel

Dtype = Literal["fp32", "bf16", "fp16"]


class SyncMode(StrictModel):
    """The name of the mode.

    Attributes:
        MODE: the value of ``mode``.
        WHOLE: whether one collective carries all parameters, rather than runs of them as they are ready.
    """

    MODE: ClassVar[str]
    WHOLE: ClassVar[bool] = False

    def problem(self, optimizer_sharded: bool) -> str | None:
        """Why the mode cannot work with a plan, and the way out.

        Args:
            optimizer_sharded: whether the optimizer is sharded over the whole world.
        """
        return None
