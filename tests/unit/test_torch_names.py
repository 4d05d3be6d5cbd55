# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Torch has every name that zero_topo uses: what makes releases possible that are not tested wholly."""

from __future__ import annotations

from pathlib import Path

from tests.torch_names import missing

SOURCE = """
import torch
import torch.distributed as dist
from torch.utils import cpp_extension, gone
def f(x):
    y = torch.cat([x], dim=0).numel() + dist.no_such + torch.float32.itemsize + x.torch.not_ours
    dist.all_reduce(y, groups=None)
    return cpp_extension.load(name="a", sources=[], color=1), torch.accelerator.current_stream(**{"a": 1})
"""


def test_this_torch_has_every_name() -> None:
    """Run with any torch from 2.6 on."""
    assert missing() == []


def test_names_and_keywords_that_torch_has_not_are_found(tmp_path: Path) -> None:
    """Through aliases; of what has no signature to read, and of values that are not torch's, nothing is said."""
    (tmp_path / "source.py").write_text(SOURCE)
    found = ["torch.distributed.all_reduce(groups=)", "torch.distributed.no_such"]
    assert missing(tmp_path) == [*found, "torch.utils.cpp_extension.load(color=)", "torch.utils.gone"]
