# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Renders one node's devices as plain text: the order in which to bind ranks, and the source of each field."""

from __future__ import annotations

from collections.abc import Mapping

from zero_topo.topology.devices import DeviceTree

VISIBLE: Mapping[str, str] = {"amd-smi": "ROCR_VISIBLE_DEVICES", "rocm-smi": "ROCR_VISIBLE_DEVICES"}
"""Tool -> the variable that makes devices visible; CUDA's for all others."""


def render_devices(tree: DeviceTree) -> str:
    """Render the order of the ranks as options and variables of launchers, the sources of the tree, and warnings."""
    order = ",".join(map(str, recommended_order(tree)))
    lines = [
        f"node: {tree.count} devices in {len(tree.groups())} GPUs ({tree.tool})",
        f"recommended order of ranks: devices {order}",
        f"  srun --gpu-bind=map_gpu:{order}",
        f"  export {VISIBLE.get(tree.tool, 'CUDA_VISIBLE_DEVICES')}={order}  (deepspeed, torchrun)",
        *(f"  {key} <- {source}" for key, source in tree.sources.items()),
        *(f"warning: {warning}" for warning in tree.warnings()),
    ]
    return "\n".join(lines)


def recommended_order(tree: DeviceTree) -> tuple[int, ...]:
    """Return the device of each local rank such that consecutive ranks share a GPU, then a NUMA node."""
    nodes = [node or 0 for node in tree.numa or (None,) * tree.count]
    return tuple(device for group in sorted(tree.groups(), key=lambda group: nodes[group[0]]) for device in group)
