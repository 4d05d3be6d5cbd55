# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the package and its pages say of DeepSpeed's defaults is what the installed DeepSpeed
has.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from zero_topo.cost.job import COUNTS, Job


def default_of(module: str, kind: str, field: str) -> Any:
    """The default of a field of a config of DeepSpeed's."""
    return getattr(pytest.importorskip(f"deepspeed.{module}"), kind).model_fields[field].default


def test_sizes_that_predictions_assume() -> None:
    """Where a config names none."""
    zero = ("runtime.zero.config", "DeepSpeedZeroConfig")
    for name, keys in COUNTS.items():
        assert inspect.signature(Job).parameters[name].default == default_of(
            *zero, keys[-1].removeprefix("stage3_")
        )
    memory = " ".join(str(import_module("zero_topo.cost.memory").__doc__).split())
    assert "10^9 elements by default" in memory and "5 * 10^8 by default" in memory
