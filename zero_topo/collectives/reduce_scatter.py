# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The reduce hop: one all-to-all, FP32 accumulation in tree order of the members.

Why not a library reduce-scatter: its sum order and precision depend on the backend (BF16 sums, ring order), it cannot
carry block-quantized values, and gloo's sends every byte twice. One all-to-all sends ``(d - 1) / d`` of the input, as
a ring does, and the same code serves INT4, INT8, 16-bit and FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.mesh import Hop
from zero_topo.quant.ops import Quantizer
from zero_topo.quant.spec import BlockSpec


@dataclass(frozen=True)
class Wire:
    """How values travel: quantized by ``spec``, or as ``dtype`` if there is none."""

    quantizer: Quantizer
    spec: BlockSpec | None
    dtype: torch.dtype


def reduce_scatter(hop: Hop, chunks: Tensor, wire: Wire, meter: Meter, phase: str) -> Tensor:
    """Sum over the members; each keeps its own chunk.

    1. turn ``chunks[c]`` into one message for member ``c`` (quantized values and scales in one buffer, or 16/32-bit);
    2. one all-to-all;
    3. sum the received messages in tree order into FP32.

    Args:
        hop: the group.
        chunks: ``[size, n]``, floating, row ``c`` for member ``c``.
        wire: the format.
        meter: counts the bytes sent.
        phase: one of ``meter.PHASES``.

    Returns:
        FP32 ``[n]``, the sum of every member's chunk for this rank. A group of one returns its chunk, unquantized.
    """
    count = chunks.shape[1]
    if hop.group is None:
        return chunks[0].float()
    send = _messages(hop, chunks, wire)
    meter.record(phase, hop.domain, (hop.size - 1) * (send.nbytes // hop.size))
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=hop.group)
    messages = [received[slot] for slot in hop.slots]
    if wire.spec is not None:
        total = torch.empty(count, dtype=torch.float32, device=chunks.device)
        return wire.quantizer.dequantize_reduce(messages, wire.spec, total)
    total = messages[0].to(torch.float32, copy=True)
    for message in messages[1:]:
        total.add_(message)
    return total


def _messages(hop: Hop, chunks: Tensor, wire: Wire) -> Tensor:
    if wire.spec is None:
        if hop.in_order:
            return chunks.to(wire.dtype).contiguous()
        send = torch.empty(chunks.shape, dtype=wire.dtype, device=chunks.device)
        for member, slot in enumerate(hop.slots):
            send[slot].copy_(chunks[member])
        return send
    size = wire.spec.nbytes(chunks.shape[1])
    send = torch.empty(hop.size, size, dtype=torch.uint8, device=chunks.device)
    for member, slot in enumerate(hop.slots):
        wire.quantizer.quantize(chunks[member], wire.spec, send[slot])
    return send
