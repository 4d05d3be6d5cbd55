# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Data-parallel groups: each has a tree, one plan serves all, and others are refused."""

from __future__ import annotations

import pytest

from tests.steps import shape
from zero_topo.config import tensor_parallel_groups
from zero_topo.topology.groups import Groups, groups_from
from zero_topo.topology.model import Topology


def test_groups_are_found_from_the_lowest_rank_of_each() -> None:
    assert groups_from([0, 1, 0, 1, 4, 5, 4, 5]) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_each_group_has_its_own_order_on_the_machine() -> None:
    """Neighbours share a layer; the second half of the ranks is placed the other way round."""
    machine = Topology("turned", 2, 2, 2, order=(0, 1, 2, 3, 4, 7, 6, 5))
    groups = Groups(machine, ((0, 2, 4, 6), (1, 3, 5, 7)))
    assert [shape(tree) for tree in groups.trees] == [(2, 2, 1)] * 2
    assert [tree.order for tree in groups.trees] == [None, (0, 1, 3, 2)]
    assert groups.ranks(5) == (1, 3, 5, 7)
    assert groups.tree(5) is groups.trees[1]


def test_autotp_numbers_ranks_that_share_a_layer_consecutively() -> None:
    config = {"tensor_parallel": {"autotp_size": 2}}
    assert tensor_parallel_groups(config, 6) == ((0, 2, 4), (1, 3, 5))
    assert tensor_parallel_groups(config, None) == tensor_parallel_groups({}, 6) == ()
    with pytest.raises(ValueError, match="autotp_size = 2: it does not divide 5 ranks"):
        tensor_parallel_groups(config, 5)
