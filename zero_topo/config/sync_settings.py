# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the settings of every mode of ``sync`` have in common."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from zero_topo.plan import Plan
from zero_topo.strict import StrictModel

Dtype = Literal["fp32", "bf16", "fp16"]
BlockSize = Literal[64, 128, 256, 512, 1024, 2048]


class SyncSettings(StrictModel):
    """Settings of one mode; each subclass adds the key ``mode`` and its own.

    Attributes:
        MODE: the value of ``mode``, its default.
        WHOLE: whether one collective carries all parameters, rather than runs of them as they are ready.
        OPTIMIZER: the only ``optimizer.type`` it works with; None if any will do.
    """

    MODE: ClassVar[str]
    WHOLE: ClassVar[bool] = False
    OPTIMIZER: ClassVar[str | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "mode" in cls.model_fields:
            cls.MODE = cls.model_fields["mode"].default

    def problem(self, plan: Plan) -> str | None:
        """Why the mode cannot work with a plan, and the way out.

        Args:
            plan: the degrees.
        """
        return None
