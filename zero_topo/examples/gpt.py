# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A small byte-level GPT in plain PyTorch: nothing in this file depends on DeepSpeed, sharding or
zero_topo.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x));
    `[batch, time, width]` in and out.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        # All heads, or those of a tensor-parallel rank
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, -1, self.head_width)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, next-byte logits (or their mean cross entropy) out; the default sizes give 3.3
    million parameters.
    """

    def __init__(
        self, layers: int = 4, width: int = 256, heads: int = 4, context: int = 64
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width {width} does not divide into {heads} heads: choose a multiple of it"
            )
        self.context = context
        self.embed_bytes = nn.Embedding(BYTES, width)
        self.embed_positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, BYTES, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Normal weights, 1/sqrt(fan-in) inside the blocks; what joins the residual stream shrinks
        with the joins.
        """
        outside = {
            "embed_bytes.weight": 0.2,
            "embed_positions.weight": 0.02,
            "lm_head.weight": 0.02,
        }
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = outside.get(name, 1 / math.sqrt(parameter.shape[1]))
            if name.endswith(("out.weight", "down.weight")):
                std /= math.sqrt(2 * len(self.blocks))
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the next byte everywhere.

        Args:
            tokens: int64 `[batch, time]`, each in 0..255, time <= context.
            targets: int64 `[batch, time]`, or None.

        Returns:
            The mean loss in nats per byte (FP32 scalar) if targets are given, else logits
            `[batch, time, 256]`.
        """
        x = self.embed_bytes(tokens) + self.embed_positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
