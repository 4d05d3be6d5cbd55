# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Describes models by the parts that are gathered one at a time; computes parameters and FLOPs of
transformers.

``model_files.py`` reads files that describe a model, and the modules of one.

Note [Parts]
    The engine gathers and releases one module at a time: the embedding, each layer, the head. With
    tied embeddings the head's matrix is the embedding's, so the head's parameters are those of the
    last norm, but its FLOPs are counted.

Note [A shape for a size]
    Published models of N parameters have similar shapes: GPT-3 and GPT-NeoX are about 128 times as
    wide as they are deep, with a feed-forward of four times the width. With ``L = h / 128`` layers,
    ``N = 12 L h^2`` gives the width, which is rounded to whole heads, and then the number of
    layers. The width of the feed-forward absorbs the difference, so that the shape has N parameters
    to within a few hundredths of a percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

WIDTH_PER_LAYER = 128
VOCABULARY = 50432  # GPT-NeoX's, padded
MOST_LAYERS = 4096
MOST_WIDTH = 10**9
SEQUENCE = 2048
LEAST_PARAMS = 1000
ROUNDED_TO = ((1024, 128), (256, 64), (8, 16), (0, 1))
"""Widths from the first number on are multiples of the second."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelPart:
    """Describes equal modules, each of which is gathered as a whole.

    Attributes:
        count: number of modules.
        shapes: shapes of the parameters of one.
        multiplied: matrix elements by which a token is multiplied.
        attention: width of all heads that compare each token with the whole sequence; 0 for none.
        stored: 16-bit elements per token that one stores for its backward pass; see ``memory.py``.
    """

    count: int
    shapes: tuple[Shape, ...]
    multiplied: float = 0.0
    attention: int = 0
    stored: int = 0

    def flops(self, tokens: int, sequence: int) -> float:
        """Return the FLOPs of the forward pass of one module; scores span ``sequence`` tokens."""
        return tokens * (2.0 * self.multiplied + 4.0 * sequence * self.attention)


@dataclass(frozen=True)
class Model:
    """Describes a model by its parts; a subclass has them.

    Attributes:
        name: name for output.
        layers: ``L``, number of layers.
        hidden: ``h``, the width.
        heads: attention heads.
        vocab: rows of the embedding, padding included.
        sequence: ``s``, tokens of a training sequence.
        parts: the embedding, the layers of each kind, and the head; see Note [Parts].
        notes: assumptions made when the model was read, for output.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    parts: ClassVar[tuple[ModelPart, ...]]
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def stored(self) -> int:
        """Return the elements per token that the largest layer stores for its backward pass."""
        return max((part.stored for part in self.parts[1:-1]), default=0)

    def modules(self) -> tuple[tuple[int, ...], ...]:
        """Return the elements of each parameter of each gathered module, in forward order."""
        found: list[tuple[int, ...]] = []
        for part in self.parts:
            found += [tuple(map(math.prod, part.shapes))] * part.count
        return tuple(found)

    @cached_property
    def module_sizes(self) -> tuple[int, ...]:
        """Return the elements of each gathered module, in forward order."""
        return tuple(map(sum, self.modules()))

    @cached_property
    def params(self) -> int:
        """Return the total number of parameters, each counted once."""
        return sum(self.module_sizes)

    def shapes(self) -> list[Shape]:
        """Return the shape of each parameter, in the order of :meth:`modules`."""
        return [shape for part in self.parts for shape in part.shapes * part.count]

    def matrices(self) -> tuple[bool, ...]:
        """Return for each parameter whether Muon updates it: the matrices of layers, not of the
        embedding or the head.

        DeepSpeed selects by name instead: matrices without "embed" and "lm_head" in their names.
        """
        found: list[bool] = []
        for index, part in enumerate(self.parts):
            in_layer = 0 < index < len(self.parts) - 1
            found += [in_layer and len(shape) > 1 for shape in part.shapes] * part.count
        return tuple(found)

    def module_flops(self, tokens: int) -> tuple[float, ...]:
        """Return the FLOPs of the forward pass of each module of :meth:`modules`; a backward pass
        takes twice as many.

        ``2 m n`` for each token and each ``m`` by ``n`` matrix, and ``4 s`` times the width of all
        heads for scores and values of the whole sequence, as Megatron counts (arXiv 2104.04473,
        section 3.5 and appendix): savings by a causal mask are not counted.

        Args:
            tokens: tokens of the pass; scores span ``sequence``.
        """
        found: list[float] = []
        for part in self.parts:
            found += [part.flops(tokens, self.sequence)] * part.count
        return tuple(found)


@dataclass(frozen=True)
class Transformer(Model):
    """Describes a decoder-only transformer by its shape.

    Attributes:
        intermediate: width of the feed-forward.
        kv_heads: heads of keys and values, fewer in grouped-query attention; 0 is ``heads``.
        gated: whether the feed-forward has three matrices (SwiGLU) in place of two.
        tied: whether the head's matrix is the embedding.
        biases: whether linear layers and norms have biases.
        mlp_biases, norm_biases: for the feed-forward and for norms alone; None is as ``biases``.
        positions: learned positions, 0 for none (rotary).

    Raises:
        ValueError: if a size is not positive or heads do not divide.
    """

    intermediate: int
    kv_heads: int = 0
    gated: bool = False
    tied: bool = False
    biases: bool = True
    mlp_biases: bool | None = None
    norm_biases: bool | None = None
    positions: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        for key in ("layers", "hidden", "heads", "kv_heads", "vocab", "sequence", "intermediate"):
            value = getattr(self, key)
            most = MOST_LAYERS if key == "layers" else MOST_WIDTH
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(
                    f"model {self.name!r}: {key} is {value!r}; it must be a whole number from 1 to "
                    f"{most:,}"
                )
        for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"model {self.name!r}: {part} = {getattr(self, part)} does not divide {whole} "
                    f"= {getattr(self, whole)}; choose a divisor"
                )

    @cached_property
    def parts(self) -> tuple[ModelPart, ...]:  # type: ignore[override]  # a field of the other subclass
        """Return the embedding, the layers and the head.

        The parameters of a layer are two norms, the matrices, their biases. A layer stores the
        inputs of both norms and of the matrices, queries, keys and values, and the feed-forward's
        product; gated ones store gate, up, the gate's value and the product. Models with biases
        have dropout, with masks of one byte per element.
        """
        hidden = self.hidden
        keys = self.kv_heads * (hidden // self.heads)
        mlp_biases = self.biases if self.mlp_biases is None else self.mlp_biases
        norm_biases = self.biases if self.norm_biases is None else self.norm_biases
        norm = ((hidden,),) * (2 if norm_biases else 1)
        attention = (hidden, keys, keys) if self.gated else (hidden + 2 * keys,)
        # The matrices before the activation
        forward = (self.intermediate,) * (2 if self.gated else 1)
        rows = (*attention, hidden, *forward, self.intermediate)
        vectors: list[int] = []
        if self.biases:
            vectors += [*attention, hidden]
        if mlp_biases:
            vectors += [*forward, hidden]
        layer = (*norm, *norm, *((n, hidden) for n in rows), *((n,) for n in vectors))
        masks = hidden if self.biases else 0
        stored = 6 * hidden + 2 * keys + (4 if self.gated else 2) * self.intermediate + masks
        matrix = (self.vocab, hidden)
        positions = (self.positions, hidden)
        first = (matrix, positions) if self.positions else (matrix,)
        last = norm if self.tied else (*norm, matrix)
        return (
            ModelPart(1, first),
            ModelPart(self.layers, layer, hidden * sum(rows), hidden, stored),
            ModelPart(1, last, hidden * self.vocab),
        )


def scaled(params: int, sequence: int = SEQUENCE) -> Transformer:
    """Return the conventional shape of a model with ``params`` parameters; see Note [A shape for a
    size].

    Args:
        params: ``N``.
        sequence: tokens of a sequence.

    Raises:
        ValueError: if there is no such shape: under 1000 parameters.
    """
    if params < LEAST_PARAMS:
        raise ValueError(
            f"{params} parameters are too few for a transformer; give at least {LEAST_PARAMS}"
        )
    width = min((params * WIDTH_PER_LAYER / 12) ** (1 / 3), (params / 24) ** 0.5)
    step = next(step for least, step in ROUNDED_TO if width >= least)
    wide = max(1, round(width / step)) * step
    # Heads have 128 elements in wide models, 64 in others; 8, or there is one head, in toys.
    sizes = (128 if wide >= 4096 else 64, 64, 8, wide)
    heads = next(wide // size for size in sizes if wide % size == 0)
    vocab = min(VOCABULARY, max(2, params // (8 * wide)))
    bare = Transformer(f"about {params:,} parameters", 1, wide, heads, vocab, sequence, 1)
    layer = sum(map(math.prod, bare.parts[1].shapes))
    outside = bare.params - layer
    deep = max(1, round((params - outside) / (12 * wide**2 + 13 * wide)))
    fixed = outside + deep * (layer - 2 * wide - 1)
    each = deep * (2 * wide + 1)
    return replace(bare, layers=deep, intermediate=round((params - fixed) / each))
