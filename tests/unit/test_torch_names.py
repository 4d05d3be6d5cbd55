# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Torch has every name that zero_topo uses: what makes releases possible that are not tested
wholly.
"""

from __future__ import annotations

from tests.torch_names import missing, private

PRIVATE = {
    "torch._C._current_graph_task_id": (
        "tells passes apart, of which one may run inside another: ModuleTracker.is_bw, which is "
        "public, says only that one runs"
    ),
    "torch._C._current_autograd_node": (
        "tells the end of a reentrant checkpoint's pass from that of the pass around it"
    ),
    "torch.autograd.Variable._execution_engine.queue_callback": (
        "reports the end of a backward pass. No hook of a tensor or module is last: at the end, in "
        "a callback queued so, FSDP2 reduces modules whose inputs need no gradient, and a pass of "
        "DeepSpeed may fail before any. FSDP2, DDP and ModuleTracker have no other way either"
    ),
    "torch._C._profiler._RecordFunctionFast": (
        "marks phases for a profiler: without one, record_function takes 30 times as long"
    ),
    "torch.distributed.distributed_c10d._get_default_store": (
        "the store of the default group, in which ranks compare their settings before the first "
        "collective"
    ),
    "torch.distributed.distributed_c10d._world.pg_names": (
        "how many groups a rank is in: split_group names groups by that number (mesh.py)"
    ),
    **dict.fromkeys(
        (
            "torch.utils._pytree.tree_leaves",
            "torch.utils._pytree.tree_map",
            "torch.utils._pytree.tree_map_only",
        ),
        "a tensor subclass gets arguments in lists and dictionaries; torch's own use these",
    ),
    **dict.fromkeys(
        (
            "torch._foreach_add_",
            "torch._foreach_addcdiv_",
            "torch._foreach_addcmul_",
            "torch._foreach_mul",
            "torch._foreach_mul_",
            "torch._foreach_sqrt_",
        ),
        "one launch for many tensors; torch's own optimizers use them",
    ),
}
"""Private names of torch that zero_topo uses, and why no public one takes their place."""


def test_this_torch_has_every_name() -> None:
    """Run with any torch from 2.6 on."""
    assert missing() == []


def test_private_names_are_listed() -> None:
    """Each with the reason why it is needed; torch may change them in any release."""
    assert private() == set(PRIVATE)
