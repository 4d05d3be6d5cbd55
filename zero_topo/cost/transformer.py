# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes parameters and FLOPs from the shape of a transformer. ``model_files.py`` reads files that describe one.

Note [Modules]
    The engine gathers and releases one module at a time: the embedding, each layer, the head. With tied embeddings the
    head's matrix is the embedding's, so the head's parameters are those of the last norm, but its FLOPs are counted.

Note [A shape for a size]
    Published models of N parameters have similar shapes: GPT-3 and GPT-NeoX are about 128 times as wide as they are
    deep, with a feed-forward of four times the width. With ``L = h / 128`` layers, ``N = 12 L h^2`` gives the width,
    which is rounded to whole heads, and then the number of layers. The width of the feed-forward absorbs the
    difference, so that the shape has N parameters to within a few hundredths of a percent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

WIDTH_PER_LAYER = 128
VOCABULARY = 50432  # GPT-NeoX's, padded
MOST_LAYERS, MOST_WIDTH = 4096, 10**9  # each layer is simulated
SEQUENCE = 2048
LEAST_PARAMS = 1000
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transformer:
    """Describes a decoder-only transformer.

    Attributes:
        name: name for output.
        layers: ``L``.
        hidden: ``h``, the width.
        heads: attention heads.
        kv_heads: heads of keys and values; fewer than ``heads`` in grouped-query attention.
        vocab: rows of the embedding, padding included.
        sequence: ``s``, tokens of a training sequence.
        intermediate: width of the feed-forward.
        gated: whether the feed-forward has three matrices (SwiGLU) in place of two.
        tied: whether the head's matrix is the embedding.
        biases: whether linear layers and norms have biases.
        positions: learned positions, 0 for none (rotary).
        head_size: elements of a head; 0 means ``hidden / heads``.
        qkv_biases: whether queries, keys and values have biases while other layers have none (Qwen 2).
        qk_norm: whether heads' queries and keys are normalized (Qwen 3).
        notes: assumptions made when the model was read, for output.

    Raises:
        ValueError: if a size is not positive or heads do not divide.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    sequence: int
    intermediate: int
    gated: bool = False
    tied: bool = False
    biases: bool = True
    positions: int = 0
    head_size: int = 0
    qkv_biases: bool = False
    qk_norm: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "vocab", "sequence", "intermediate"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"model {self.name!r}: {key} is {value!r}; it must be a whole number of at least 1")
            most = MOST_LAYERS if key == "layers" else MOST_WIDTH
            if value > most:
                raise ValueError(f"model {self.name!r}: {key} is more than the {most:,} that are planned for")
        if self.head_size == 0:
            self._check_divides("hidden", self.hidden, "heads", self.heads)
            object.__setattr__(self, "head_size", self.hidden // self.heads)
        self._check_divides("heads", self.heads, "kv_heads", self.kv_heads)

    def _check_divides(self, whole: str, number: int, part: str, divisor: int) -> None:
        if number % divisor:
            raise ValueError(
                f"model {self.name!r}: {part} = {divisor} does not divide {whole} = {number}; choose a divisor"
            )

    @property
    def stored(self) -> int:
        """Return the 16-bit elements per token that a layer stores for its backward pass; see ``footprint.py``.

        They are the inputs of both norms and of the matrices, queries, keys and values, and the feed-forward's product;
        gated ones store gate, up, the gate's value and the product. Models with biases have dropout, with masks of one
        byte per element.
        """
        wide, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        masks = self.hidden if self.biases else 0
        return 4 * self.hidden + 2 * wide + 2 * keys + (4 if self.gated else 2) * self.intermediate + masks

    @property
    def groups(self) -> tuple[tuple[int, tuple[Shape, ...]], ...]:
        """Return (number of equal modules, shapes of their parameters): the embedding, the layers, the head."""
        embedding, head = self._ends
        return (1, embedding), (self.layers, self._layer), (1, head)

    def modules(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return name and parameters' numels of each gathered module, in forward order; see Note [Modules]."""
        layer = tuple(map(math.prod, self._layer))
        embedding, head = (tuple(map(math.prod, shapes)) for shapes in self._ends)
        layers = ((f"layer {index}", layer) for index in range(self.layers))
        return ("embedding", embedding), *layers, ("head", head)

    @cached_property
    def params(self) -> int:
        """Return the total number of parameters, each counted once."""
        embedding, *_, head = self.modules()
        return sum(embedding[1]) + self.layers * sum(map(math.prod, self._layer)) + sum(head[1])

    def numels(self) -> tuple[int, ...]:
        """Return the elements of each parameter, in the order of :meth:`modules`."""
        return tuple(numel for _, sizes in self.modules() for numel in sizes)

    def dims(self) -> tuple[int, ...]:
        """Return the number of dimensions of each parameter, in the order of :meth:`modules`."""
        embedding, head = self._ends
        return tuple(len(shape) for shapes in (embedding, *[self._layer] * self.layers, head) for shape in shapes)

    def module_flops(self, tokens: int) -> tuple[float, ...]:
        """Return the FLOPs of the forward pass of each module of :meth:`modules`; a backward pass takes twice as many.

        ``2 m n`` for each token and each ``m`` by ``n`` matrix, and ``4 s`` times the width of all heads for scores
        and values of the whole sequence, as Megatron counts (arXiv 2104.04473, section 3.5 and appendix): savings by a
        causal mask are not counted.

        Args:
            tokens: tokens of the pass; scores span ``sequence``.
        """
        attention = 4.0 * self.sequence * self.heads * self.head_size * tokens
        layer = 2.0 * tokens * sum(self._matrices.values()) + attention
        return (0.0, *(layer for _ in range(self.layers)), 2.0 * tokens * self.hidden * self.vocab)

    @cached_property
    def _matrices(self) -> Mapping[str, int]:
        """Return the elements of the matrices of a layer."""
        wide, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = {"query": wide, "key": keys, "value": keys} if self.gated else {"qkv": wide + 2 * keys}
        forward = ("gate", "up", "down") if self.gated else ("up", "down")
        return MappingProxyType(
            {
                **{name: width * self.hidden for name, width in attention.items()},
                "out": wide * self.hidden,
                **{name: self.hidden * self.intermediate for name in forward},
            }
        )

    @cached_property
    def _norm(self) -> tuple[Shape, ...]:
        return ((self.hidden,),) * (2 if self.biases else 1)

    @cached_property
    def _ends(self) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """Return the shapes of the parameters of the embedding and of the head."""
        matrix, positions = (self.vocab, self.hidden), (self.positions, self.hidden)
        return (matrix, positions) if self.positions else (matrix,), (*self._norm, *(() if self.tied else (matrix,)))

    @cached_property
    def _layer(self) -> tuple[Shape, ...]:
        """Return the shapes of the parameters of a layer: two norms, the matrices, their biases."""
        to_hidden = ("out", "down")
        biases = [self.hidden if name in to_hidden else n // self.hidden for name, n in self._matrices.items()]
        wide, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        vectors = biases if self.biases else [wide, keys, keys] if self.qkv_biases else []
        vectors += [self.head_size, self.head_size] if self.qk_norm else []
        matrices = ((numel // self.hidden, self.hidden) for numel in self._matrices.values())
        return (*self._norm, *self._norm, *matrices, *((numel,) for numel in vectors))


def scaled(params: int, layers: int | None = None, hidden: int | None = None, sequence: int = SEQUENCE) -> Transformer:
    """Return the conventional shape of a model with ``params`` parameters; see Note [A shape for a size].

    Args:
        params: ``N``.
        layers: layers, if known.
        hidden: width, if known.
        sequence: tokens of a sequence.

    Raises:
        ValueError: if there is no such shape: under 1000 parameters, or layers and width that do not match the size.
    """
    if params < LEAST_PARAMS:
        raise ValueError(f"{params} parameters are too few for a transformer; give at least {LEAST_PARAMS}")
    wide = hidden or _width(params, layers)
    vocab = min(VOCABULARY, max(2, params // (8 * wide)))
    bare = Transformer(f"about {params:,} parameters", 1, wide, _heads(wide), _heads(wide), vocab, sequence, 1)
    layer = sum(map(math.prod, bare._layer))
    outside = bare.params - layer
    deep = layers or max(1, round((params - outside) / (12 * wide**2 + 13 * wide)))
    fixed, each = outside + deep * (layer - 2 * wide - 1), deep * (2 * wide + 1)
    intermediate = round((params - fixed) / each)
    if intermediate < 1 or ((layers or hidden) and not wide <= intermediate <= 16 * wide):
        raise ValueError(
            f"{params:,} parameters do not go with {deep} layers of width {wide}: the feed-forward would have a width "
            f"of {intermediate}; leave out layers or hidden, or change the number of parameters"
        )
    return replace(bare, layers=deep, intermediate=intermediate)


def with_shape(layers: int, hidden: int, sequence: int = SEQUENCE) -> Transformer:
    """Return a model with the given layers and width; its other sizes follow GPT-NeoX.

    Args:
        layers: ``L``.
        hidden: ``h``.
        sequence: tokens of a sequence.
    """
    heads = _heads(hidden)
    name = f"{layers} layers of width {hidden}"
    return Transformer(name, layers, hidden, heads, heads, VOCABULARY, sequence, 4 * hidden)


def _width(params: int, layers: int | None) -> int:
    """Return the width from ``N = 12 L h^2``, rounded to whole heads."""
    usual = (params * WIDTH_PER_LAYER / 12) ** (1 / 3)
    width = (params / 12 / layers) ** 0.5 if layers else min(usual, (params / 24) ** 0.5)
    step = next(step for step, least in ((128, 1024), (64, 256), (8, 16), (1, 0)) if width >= least)
    return max(1, round(width / step)) * step


def _heads(hidden: int) -> int:
    """Return the number of heads: of 128 elements in wide models, of 64 in others; of 8, or one head, in toys."""
    return next(hidden // size for size in (128 if hidden >= 4096 else 64, 64, 8, hidden) if hidden % size == 0)
