# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Events and the line of a breakdown, from what a step's meter holds."""

from __future__ import annotations

from zero_topo.observe.monitor import breakdown, step_events


def test_events_sum_phases_by_domain_and_name_each_phase_and_figure() -> None:
    sent = {("gather_forward", "gpu"): 10, ("publish", "gpu"): 5, ("sync", "world"): 7}
    events = step_events(sent, {"sync": 0.25}, {"density": 0.5}, 7, 64)
    assert events == [
        ("zero_topo/bytes_gpu", 15.0, 64),
        ("zero_topo/bytes_world", 7.0, 64),
        ("zero_topo/ms_sync", 250.0, 64),
        ("zero_topo/peak_bytes", 7.0, 64),
        ("zero_topo/sync_density", 0.5, 64),
    ]


def test_a_breakdown_is_one_line_in_a_steps_order() -> None:
    line = breakdown({"publish": 0.002, "gather_forward": 0.0015, "sync": 1.0})
    assert line == "zero_topo: gather_forward 1.50 ms, sync 1000.00 ms, publish 2.00 ms"
    assert breakdown({}) == "zero_topo: nothing metered"
