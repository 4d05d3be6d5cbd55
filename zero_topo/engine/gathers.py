# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From what a gather brings to whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from zero_topo.collectives.all_gather import all_gather
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted
from zero_topo.engine.shards import Layout
from zero_topo.engine.sources import Source


def gathered(
    layout: Layout,
    source: Source,
    slots: Sequence[int],
    like: Tensor,
    counted: Counted,
    capture: Callable[[int, Tensor], None] | None = None,
) -> Handle[list[Tensor]]:
    """Gather whole parameters by one collective.

    Args:
        layout: the slots.
        source: what is sent.
        slots: in the same order on every rank.
        like: a tensor of the type and device that the parameters shall have.
        counted: meter and phase.
        capture: called with each slot and its rows ``[N, width]``.

    Returns:
        On ``wait``: one flat tensor ``[numel]`` per slot.
    """

    def whole(index: int, messages: Tensor) -> Tensor:
        rows = like.new_empty(layout.plan.world_size, layout.widths[index])
        source.decode(index, messages, rows)
        if capture is not None:
            capture(index, rows)
        return layout.flat_of(rows, index)

    if source.route.size == 1:  # nothing travels, so nothing is put together
        return Handle(None, (), lambda: [whole(i, source.message([i])[0][None, None]) for i in slots])
    message, ends = source.message(slots)
    handle = all_gather(source.route, message, counted)

    def finish() -> list[Tensor]:
        came = handle.wait()
        return [whole(i, came[..., begin:end]) for i, (begin, end) in zip(slots, pairwise(ends), strict=True)]

    return Handle(None, (), finish)


def together(slots: Sequence[int], parts: Sequence[tuple[Sequence[int], Handle[list[Tensor]]]]) -> Handle[list[Tensor]]:
    """Gathers of some slots each, as one of all of them, in the order of ``slots``."""
    if len(parts) == 1:
        return parts[0][1]

    def finish() -> list[Tensor]:
        found = {i: full for part, handle in parts for i, full in zip(part, handle.wait(), strict=True)}
        return [found[i] for i in slots]

    return Handle(None, (), finish)
