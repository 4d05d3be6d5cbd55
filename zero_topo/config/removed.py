# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Keys and values that a block of an earlier version could have, and what to do instead.

This is the one list: the parser rejects what stands in it, and its error says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zero_topo.strict import as_json


class Removed(NamedTuple):
    """A key of the block that is gone, or one of its values.

    Attributes:
        key: dotted, below ``zero_topo``.
        value: the value that is gone; None is the whole key.
        instead: what to do, to follow "was removed; ".
    """

    key: str
    value: Any
    instead: str


REMOVED: tuple[Removed, ...] = (
    Removed(
        "lossy",
        None,
        'nothing is quantized unasked; name a scheme that quantizes, such as "topo", or set '
        '"quantize", "sync" or "publish"',
    ),
    Removed(
        "topology",
        "measured",
        "name a preset, or a .json file that describes the machine",
    ),
    Removed("sync.mode", "topk_a", 'set it to "oktopk"'),
    Removed("sync.mode", "gaussian_k", 'set it to "oktopk"'),
    Removed("sync.mode", "topk_dsa", 'set it to "oktopk"'),
    Removed("sync.mode", "gtopk", 'set it to "oktopk"'),
    Removed("secondary_on", None, "the secondary copy is always on the device; leave it out"),
    Removed(
        "publish",
        None,
        "leave it out: INT8 weights (scheme topo) send only what changed; with FSDP2 set "
        '"quantize": {"publish": "int4"}',
    ),
    Removed(
        "scheme",
        "mics",
        'set it to "hsdp"; for groups of N ranks set "weights", "gradients" and "optimizer" to N',
    ),
    Removed("two_hop", None, "what spans nodes always goes through the node; leave it out"),
    Removed("quantize.weights", "int4", 'set it to "int8"'),
    Removed("quantize.secondary", "int4", 'set it to "int8"'),
    Removed("quantize.block_size", None, "blocks have 256 values, in NF4 64; leave it out"),
    Removed("sync.block_size", None, "blocks have 256 values, in NF4 64; leave it out"),
    Removed("sync.offload_residual", None, "the residual is on the device; leave it out"),
    Removed("sync.dense_vectors", None, "vectors are always reduced densely; leave it out"),
    Removed("sync.include", None, "a sparse mode reduces all matrices; leave it out"),
    Removed(
        "sync.exclude",
        None,
        'a sparse mode reduces all matrices, "tagc" those that its paper names; leave it out',
    ),
    Removed("sync.bits", 4, 'set it to "nf4": as many bytes, a fifth of the loss'),
    Removed("seed", None, "call torch.manual_seed in the script"),
    Removed("meter", None, "bytes are always counted; leave it out"),
    Removed("registered_buffers", None, "it gained nothing that was measured; leave it out"),
    Removed("frozen", None, 'frozen weights have the plan of the others; set "secondary"'),
)


def reject_removed(block: Mapping[str, Any], root: str) -> None:
    """Check that a block has nothing that was removed.

    Args:
        block: the block as a user wrote it.
        root: the block's key in the DeepSpeed config, for the error.

    Raises:
        ValueError: in one line, with what to do instead.
    """
    for removed in REMOVED:
        *parents, key = removed.key.split(".")
        part: Any = block
        for parent in parents:
            part = part.get(parent) if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or key not in part:
            continue
        if removed.value is None:
            raise ValueError(f"{root}.{removed.key} was removed; {removed.instead}")
        same = type(part[key]) is type(removed.value) and part[key] == removed.value
        if same:
            shown = as_json(removed.value)
            raise ValueError(f"{root}.{removed.key} = {shown} was removed; {removed.instead}")
