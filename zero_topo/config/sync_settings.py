# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the settings of every mode of ``sync`` have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from zero_topo.strict import StrictModel

if TYPE_CHECKING:
    from zero_topo.plan import Plan

Dtype = Literal["fp32", "bf16", "fp16"]


class SyncSettings(StrictModel):
    """The name of the mode.

    Attributes:
        MODE: the value of ``mode``.
        WHOLE: whether one collective carries all parameters, rather than runs of them as they are ready.
        OPTIMIZER: the only ``optimizer.type`` it works with; None if any will do.
    """

    MODE: ClassVar[str]
    WHOLE: ClassVar[bool] = False
    OPTIMIZER: ClassVar[str | None] = None

    def problem(self, plan: Plan) -> str | None:
        """Why the mode cannot work with a plan, and the way out.

        Args:
            plan: the degrees.
        """
        return None
