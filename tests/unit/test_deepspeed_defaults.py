# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the package and its pages say of DeepSpeed's defaults is what the installed DeepSpeed
has.
"""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from zero_topo.cost.job import COUNTS, Job


def test_sizes_that_predictions_assume() -> None:
    """Where a config names none."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    for name, keys in COUNTS.items():
        field = zero.model_fields[keys[-1].removeprefix("stage3_")]
        assert inspect.signature(Job).parameters[name].default == field.default
    memory = " ".join(str(import_module("zero_topo.cost.memory").__doc__).split())
    assert "10^9 elements by default" in memory and "5 * 10^8 by default" in memory
