# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Several engines in one call of DeepSpeed for a list of parameters."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

from zero_topo.hook.parameters import by_server


class Server:
    """Something whose method is a parameter's call."""

    def partition(self, param: Any) -> None:
        """Do nothing."""


def test_gathers_of_several_engines_begin_in_one_order() -> None:
    """DeepSpeed gives a set, whose order is another on each rank: ranks would wait for each
    other.
    """
    dense, experts = Server(), Server()
    servers = [experts, None, dense, experts, dense]
    params = []
    for ds_id, server in enumerate(servers):
        call = partial(server.partition, None) if server else print
        params.append(SimpleNamespace(ds_id=ds_id, partition=call))
    orders = set()
    for given in permutations(params):
        found = by_server([*given, given[0]])
        orders.add(tuple((of, *(param.ds_id for param in part)) for of, part in found.items()))
    assert orders == {((experts, 0, 3), (None, 1), (dense, 2, 4))}
