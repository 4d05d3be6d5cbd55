# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads a model's parts from its modules: of a live torch module, or of one that transformers builds without memory.

Note [What is read]
    The layers are the elements of the outermost ``nn.ModuleList``s. Parameters are exact, each counted once. Of FLOPs,
    three kinds are counted: two per token for each element of a matrix; those of the scores of each module whose class
    is called an attention; and of experts the share that a token is sent to. Everything else is not: convolutions,
    recurrences, other parameters of two dimensions or more; and towers and encoders, which see other tokens than the
    text's. Parts with any of these are marked, and the range of a prediction allows for them.

    A layer stores the inputs and outputs of its matrices for the backward pass. For the transformers in
    ``transformer.py`` this is within 9% of their own count.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero_topo.cost.transformer import MOST_LAYERS, SEQUENCE, Model, Part, Shape
from zero_topo.strict import cut

AUTO_CLASSES = ("CausalLM", "Seq2SeqLM", "ImageTextToText", "SpeechSeq2Seq", "MaskedLM")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
"""Names of the number of experts to which a token is sent."""
MULTIPLIED = re.compile(r"Linear|Router|Gate$|Experts")
"""Names of classes, in addition to torch's and transformers' own, whose matrices multiply each token."""
EXPERTS = re.compile(r"(.*experts)\.\d+\.")
HEAD = 128
"""Assumed elements of a head if nothing gives the number of heads."""


@dataclass(frozen=True)
class ModuleTree(Model):
    """Describes a model read from its modules."""

    parts: tuple[Part, ...]  # type: ignore[misc]  # the base only declares it


def build(data: Mapping[str, Any], what: str) -> Any:
    """Return the module of a Hugging Face config, without memory for its parameters.

    Raises:
        ValueError: if transformers is not installed, does not know the model's type, or cannot build it.
    """
    kind, way_out = data["model_type"], "or plan for its size with --params"
    keys = {**data, **(data.get("text_config") or {})}
    if deep := [key for key, value in keys.items() if "layers" in key and type(value) is int and value > MOST_LAYERS]:
        raise ValueError(f"{what}: {deep[0]} is more than the {MOST_LAYERS:,} that are planned for")
    try:
        transformers, torch = map(importlib.import_module, ("transformers", "torch"))
    except ImportError as error:
        raise ValueError(
            f"{what}: transformers builds models of type {kind!r}, and is not installed here ({error}); "
            f"pip install transformers torch, {way_out}"
        ) from None
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.for_model(**data)
        names = [name for name in data.get("architectures") or () if hasattr(transformers, name)]
        autos = (getattr(transformers, f"AutoModelFor{task}") for task in AUTO_CLASSES)
        fitting = (auto for auto in autos if type(config) in auto._model_mapping)
        make = getattr(transformers, names[0]) if names else next(fitting, transformers.AutoModel).from_config
        with torch.device("meta"):
            return make(config)
    except Exception as error:  # each model's code raises its own
        reason = cut(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ValueError(
            f"{what}: transformers {transformers.__version__} cannot build this model of type {kind!r} ({reason}); "
            f"install another release, {way_out}"
        ) from None


def read_modules(module: Any, name: str) -> ModuleTree:
    """Return the parts of a ``torch.nn.Module``, on any device; see Note [What is read].

    Args:
        module: the model; a ``config`` with Hugging Face's names, if it has one, gives heads and experts.
        name: name for output.
    """
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    lists = _outermost_lists(module)
    inside = {id(child) for layers in lists for layer in layers for child in layer.modules()}
    outside = [(path, child) for path, child in module.named_modules() if id(child) not in inside]
    embeddings = [pair for pair in outside if _is_a(pair[1], "Embedding")]
    others = [pair for pair in outside if _matrices(pair[1]) and not _multiplies(pair[1])]
    reader = _Reader(max((_number(text, key) for key in CHOSEN), default=0))
    first, towers = reader.part(module, embeddings), reader.part(module, others)
    main = max(lists, key=lambda layers: sum(math.prod(shape_of(p)) for p in layers.parameters()), default=None)
    kinds: Counter[Part] = Counter([towers] if others else [])
    for of in lists:
        for layer in of:
            part = reader.part(layer, layer.named_modules())
            kinds[
                part if of is main else replace(part, unknown=(f"{type(layer).__name__} apart from the text's",))
            ] += 1
    last = reader.part(module, [pair for pair in outside if pair not in embeddings + others])
    parts = (first, *(replace(part, count=count) for part, count in kinds.items()), last)
    tables = [shape_of(p) for _, child in embeddings for p in child.parameters(recurse=False)]
    vocab, width = max((shape for shape in tables if len(shape) == 2), default=(1, 0))
    widest = max((min(shape) for part in parts for shape in part.shapes if len(shape) == 2), default=1)
    hidden = _number(text, "hidden_size") or width or widest
    heads = _number(text, "num_attention_heads") or max(1, hidden // HEAD)
    found = ModuleTree(
        name,
        layers=sum(map(len, lists)),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads") or heads,
        vocab=vocab,
        sequence=_number(text, "max_position_embeddings") or SEQUENCE,
        parts=parts,
    )
    return replace(found, notes=tuple(_notes(found, reader.chosen)))


def shape_of(parameter: Any) -> Shape:
    """Return the shape of a parameter, also of one that DeepSpeed has partitioned, whose own is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _outermost_lists(module: Any) -> list[Any]:
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        if _is_a(child, "ModuleList") and len(child) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = child
    return list(found.values())


class _Reader:
    """Reads parts one after the other; a parameter that several modules share belongs to the first.

    Attributes:
        chosen: experts to which a token is sent; 0 if it is not known.
        seen: identities of the parameters of earlier parts.
    """

    def __init__(self, chosen: int) -> None:
        self.chosen = chosen
        self.seen: set[int] = set()

    def part(self, root: Any, modules: Iterable[tuple[str, Any]]) -> Part:
        """Return what modules are together, each given with its path below ``root``."""
        shapes: list[Shape] = []
        multiplied = stored = 0.0
        attention, unknown = 0, dict[str, None]()
        for path, child in modules:
            shapes += [shape_of(p) for p in child.parameters(recurse=False) if id(p) not in self.seen]
            self.seen.update(map(id, child.parameters(recurse=False)))
            kind, listed = type(child).__name__, EXPERTS.match(path)
            attention += _width(child) if "Attention" in kind else 0
            for shape in _matrices(child):
                of = shape[0] if "Experts" in kind else len(root.get_submodule(listed[1])) if listed else 0
                if not _multiplies(child) or (of and not self.chosen):
                    unknown[kind] = None
                share = self.chosen / of if of and self.chosen else 1.0
                multiplied += share * math.prod(shape)
                stored += share * math.prod(shape[:-2]) * sum(shape[-2:])
        return Part(1, tuple(shapes), multiplied, attention, round(stored), tuple(unknown))


def _matrices(module: Any) -> list[Shape]:
    """Return the shapes of a module's own matrices: no embedding's rows, nor the biases of a list of experts."""
    least = 3 if "Experts" in type(module).__name__ else 2
    shapes = map(shape_of, module.parameters(recurse=False))
    return [] if _is_a(module, "Embedding") else [shape for shape in shapes if len(shape) >= least]


def _multiplies(module: Any) -> bool:
    """Return whether each token is multiplied by a module's matrices, of experts by some of them."""
    return _is_a(module, "Linear", "Conv1D") or MULTIPLIED.search(type(module).__name__) is not None


def _width(attention: Any) -> int:
    """Return the width of an attention's heads: what goes into the last of its matrices, the output's."""
    matrices = [child for child in attention.children() if _is_a(child, "Linear", "Conv1D") and _matrices(child)]
    if len(matrices) < 2:
        return 0  # it only combines others
    return _matrices(matrices[-1])[0][0 if _is_a(matrices[-1], "Conv1D") else 1]


def _is_a(module: Any, *kinds: str) -> bool:
    return any(base.__name__ in kinds for base in type(module).__mro__)


def _number(config: Any, key: str) -> int:
    """Return a positive number of a config; 0 if it has none, or refuses one that differs between layers."""
    try:
        value = getattr(config, key, None)
    except Exception:  # transformers has its own for keys of single layers
        return 0
    return value if type(value) is int and value > 0 else 0


def _notes(model: ModuleTree, chosen: int) -> Iterator[str]:
    active = sum(part.count * part.multiplied for part in model.parts)
    if chosen:
        yield f"each token goes to {chosen} experts: {active:,.0f} of {model.params:,} parameters multiply it"
    if model.unknown:
        kinds = dict.fromkeys(kind for part in model.parts for kind in part.unknown)
        yield (
            f"the FLOPs of {', '.join(kinds)} are not known: two per parameter and token are counted, and the range of "
            "a step allows for half of their parts' more or less"
        )
