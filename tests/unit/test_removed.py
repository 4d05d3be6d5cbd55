# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A block of an earlier version works as it did, or is refused with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data import table
from tests.plans import TREE
from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.rule import before_a_model

OLD = table("old_configs")
"""Blocks of ``configs`` and ``neox_configs`` before options went, each with the key that went."""


@pytest.mark.parametrize("old", OLD, ids=lambda old: old["file"])
def test_every_shipped_config_works_or_is_refused_by_its_removed_key(old: dict[str, Any]) -> None:
    block = {**old["block"], "topology": {"nodes": 2, "gpus_per_node": 2, "ranks_per_gpu": 2}}
    if old["removed"] is None:
        parsed = ZeroTopoConfig.parse(block)
        scheme = before_a_model(parsed, TREE).scheme
        assert scheme == old["block"].get("scheme", scheme)
        return
    with pytest.raises(ValueError, match=rf"^zero_topo\.{old['removed']} .*was removed; \S"):
        ZeroTopoConfig.parse(block)
