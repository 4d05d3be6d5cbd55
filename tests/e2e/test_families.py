# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every family that the installed transformers builds has its true count."""

from __future__ import annotations

import pytest

from zero_topo.cost.model_files import build, read_modules

PARTS, LEAST = 8, 60
"""Families that could be built in each part with transformers 5.24; the others need packages, or
have no model.
"""


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_counts_of_all_families_are_true(part: int) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    built = 0
    for kind in list(CONFIG_MAPPING_NAMES)[part::PARTS]:
        try:
            module = build({"model_type": kind}, kind)
        except ValueError:
            continue
        found = read_modules(module, kind)
        assert found.params == sum(p.numel() for p in module.parameters()), kind
        assert sum(found.module_flops(1)) >= 0 and found.stored >= 0, kind
        built += 1
    assert built >= LEAST
