# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Torch has every name that zero_topo uses: what makes releases possible that are not tested
wholly.
"""

from __future__ import annotations

from tests.torch_names import missing


def test_this_torch_has_every_name() -> None:
    """Run with any torch from 2.6 on."""
    assert missing() == []
