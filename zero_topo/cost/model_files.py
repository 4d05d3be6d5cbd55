# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loads models by name, from a file that describes one, or from the modules of a live one.

Files are a Hugging Face ``config.json`` or a GPT-NeoX YAML. ``models.json`` holds the configs of
named models: their published ones, with the sequence of their training as
``max_position_embeddings``. ``gpt-neox-10b`` is the exception: no config of that size was
published, so its shape is a conventional one. transformers builds the model of a Hugging Face
config without memory.

Note [What is read]
    The layers are the elements of the outermost ``nn.ModuleList``s. Parameters are exact, each
    counted once. FLOPs are two per token for each element of a matrix, of experts by the share that
    a token is sent to, and those of the scores of each module whose class is called an attention.
    Convolutions, recurrences, and towers that see other tokens than the text's are counted like
    matrices, which is a guess.

    A layer stores the inputs and outputs of its matrices for the backward pass. For the
    transformers in ``transformer.py`` this is within 9% of their own count.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from zero_topo.cost.transformer import SEQUENCE, Model, ModelPart, Shape, Transformer
from zero_topo.strict import cut, did_you_mean, packaged, read_text

GPT2_VOCABULARY = 50304  # 50257, padded by GPT-NeoX to a multiple of 128
TRAINED = 4096
"""Limit of the training sequence, in tokens, if a file gives only the model's maximal number of
positions.
"""
ATTENTIONS = {"global", "local", "flash", "all"}
"""GPT-NeoX's words for attentions with the parameters of a transformer layer; rwkv, mamba and gmlp
have others.
"""
GATED = ("geglu", "reglu", "bilinear", "swiglu", "glu")
"""GPT-NeoX's activations whose feed-forward has three matrices."""

Keys = Mapping[str, Any]
MODELS: Mapping[str, Keys] = packaged(__package__, "models.json")
AUTO_CLASSES = ("CausalLM", "Seq2SeqLM", "ImageTextToText", "SpeechSeq2Seq", "MaskedLM")
CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
)
"""Names of the number of experts to which a token is sent."""
LISTED_EXPERT = re.compile(r"(.*experts)\.\d+\.")
HEAD = 128
"""Assumed elements of a head if nothing gives the number of heads."""


def load_model(name_or_path: str, sequence: int | None = None) -> Model:
    """Load a model by name, or from a Hugging Face ``config.json`` or a GPT-NeoX YAML.

    Args:
        name_or_path: one of :data:`MODELS`, a file, or a folder with a ``config.json``.
        sequence: tokens of a training sequence. None takes that of the named model or the YAML; for
            a Hugging Face config it takes the model's maximum, at most :data:`TRAINED`.

    Raises:
        ValueError: if there is no such name or file, or the file does not describe a model.
    """
    named = MODELS.get(name_or_path.lower())
    if named is not None:
        found: Model = read_modules(build(named, f"model {name_or_path}"), name_or_path.lower())
        return replace(found, sequence=sequence or found.sequence)
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        hint = did_you_mean(name_or_path, MODELS, cutoff=0.4)
        raise ValueError(
            f"model {name_or_path!r} is neither a file nor a known name{hint}; give the path of a "
            f"Hugging Face config.json or GPT-NeoX YAML, or a name (known: {', '.join(MODELS)})"
        )
    what = f"model file {path}"
    data = _parse(read_text(path, what), what)
    neox = {key.replace("-", "_"): value for key, value in data.items()}
    name = path.parent.name if path.name == "config.json" else path.stem
    if isinstance(data.get("model_type"), str):
        found = read_modules(build(data, what), name)
        limit = min(found.sequence, TRAINED)
    elif "num_layers" in neox:
        found = _read_neox(name, neox, what)
        limit = found.sequence
    else:
        raise ValueError(
            f"{what}: has neither model_type nor num_layers; give a Hugging Face config.json or a "
            "GPT-NeoX YAML that has the model's shape, or use --params"
        )
    return replace(found, sequence=sequence or limit)


def _parse(text: str, what: str) -> dict[str, Any]:
    """Parse JSON, or YAML if PyYAML is installed; else use Hjson, which also reads GPT-NeoX's
    commented JSON.
    """
    reason = "it holds something else"
    for module, function in (("json", "loads"), ("yaml", "safe_load"), ("hjson", "loads")):
        try:
            data = getattr(importlib.import_module(module), function)(text)
        except ImportError:
            continue
        except Exception as error:  # each parser raises its own error types
            reason = cut(" ".join(str(error).split()))
            continue
        if isinstance(data, Mapping) and data:
            return {str(key): value for key, value in data.items()}
    raise ValueError(f"{what}: neither JSON nor YAML of an object: {reason}")


# -- GPT-NeoX --------------------------------------------------------------------------------------


def _read_neox(name: str, keys: Keys, what: str) -> Transformer:
    """Read GPT-NeoX's keys. The tokenizer defines the vocabulary; without one in the file, GPT-2's
    is assumed.

    Raises:
        ValueError: for layers that are no transformer's, or a mixture of experts, whose dense part
            alone is here.
    """
    if strange := _words(keys.get("attention_config")) - ATTENTIONS:
        raise ValueError(
            f"{what}: attention_config has {min(strange)!r}, whose layers are no transformer's"
        )
    if (keys.get("moe_num_experts") or 1) != 1:
        raise ValueError(
            f"{what}: moe_num_experts is {keys['moe_num_experts']!r}: GPT-NeoX's mixture of "
            "experts is not counted; plan for its parameters with --params, which takes all of "
            "them for active"
        )

    def size(key: str, default: int = 0) -> int:
        value = default if keys.get(key) is None else keys[key]
        if type(value) is not int:
            raise ValueError(f"{what}: {key} is {value!r}; it must be a whole number")
        return value

    def flag(key: str, default: bool) -> bool:
        return default if keys.get(key) is None else bool(keys[key])

    positions = size("max_position_embeddings", size("seq_length", SEQUENCE))
    vocabulary = size("padded_vocab_size", size("vocab_size"))
    note = f"the file names no vocabulary: GPT-2's, {GPT2_VOCABULARY:,} rows, is taken"
    llama = keys.get("mlp_type") == "llama"
    gated = keys.get("activation") in GATED
    hidden = size("hidden_size")
    stated = size("intermediate_size")
    return Transformer(
        name,
        layers=size("num_layers"),
        hidden=hidden,
        heads=size("num_attention_heads"),
        kv_heads=size("num_kv_heads"),
        vocab=vocabulary or GPT2_VOCABULARY,
        sequence=size("seq_length", positions),
        intermediate=_intermediate(keys, hidden, stated, size("mlp_multiple_of", 1)),
        gated=llama or gated,
        tied=not flag("no_weight_tying", False),
        biases=flag("use_bias_in_attn_linear", True),
        mlp_biases=not llama and flag("use_bias_in_mlp", True),
        norm_biases="rmsnorm" not in str(keys.get("norm")),
        positions=positions if (keys.get("pos_emb") or "learned") == "learned" else 0,
        notes=() if vocabulary else (note,),
    )


def _intermediate(keys: Keys, hidden: int, stated: int, step: int) -> int:
    """Return the width of a feed-forward of ParallelMLP, or of LLaMAParallelMLP before 2024-09."""
    if keys.get("mlp_type") == "llama":
        return stated or _rounded_up(8 * hidden // 3, 256)
    width = stated or int((keys.get("expansion_factor") or 4) * hidden)
    if keys.get("activation") in GATED:  # two thirds of it are gate and up together
        return _rounded_up(2 * width // 3, 2 * step) // 2
    return _rounded_up(width, step)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _words(nested: Any) -> set[str]:
    """Return the strings in nested lists."""
    if isinstance(nested, str):
        return {nested}
    parts = nested if isinstance(nested, list) else []
    return set().union(*map(_words, parts))


# -- modules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleTree(Model):
    """Describes a model read from its modules."""

    parts: tuple[ModelPart, ...]  # type: ignore[misc]  # the base only declares it


def build(data: Keys, what: str) -> Any:
    """Return the module of a Hugging Face config, without memory for its parameters.

    Raises:
        ValueError: if transformers is not installed, does not know the model's type, or cannot
            build it.
    """
    kind = data["model_type"]
    way_out = "or plan for its size with --params"
    try:
        transformers, torch = map(importlib.import_module, ("transformers", "torch"))
    except ImportError as error:
        raise ValueError(
            f"{what}: transformers builds models of type {kind!r}, and is not installed here "
            f"({error}); pip install transformers torch, {way_out}"
        ) from None
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.for_model(**data)
        names = [name for name in data.get("architectures") or () if hasattr(transformers, name)]
        autos = (getattr(transformers, f"AutoModelFor{task}") for task in AUTO_CLASSES)
        fitting = (auto for auto in autos if type(config) in auto._model_mapping)
        if names:
            make = getattr(transformers, names[0])
        else:
            make = next(fitting, transformers.AutoModel).from_config
        with torch.device("meta"):
            return make(config)
    except Exception as error:  # each model's code raises its own
        reason = cut(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ValueError(
            f"{what}: transformers {transformers.__version__} cannot build this model of type "
            f"{kind!r} ({reason}); install another release, {way_out}"
        ) from None


def read_modules(module: Any, name: str) -> ModuleTree:
    """Return the parts of a ``torch.nn.Module``, on any device; see Note [What is read].

    Args:
        module: the model; a ``config`` with Hugging Face's names, if it has one, gives heads and
            experts.
        name: name for output.
    """
    config: Any = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    lists = _outermost_lists(module)
    # A list may have parameters of its own, as those of a parametrized weight are.
    inside = {id(child) for layer in chain(*lists) for child in layer.modules()}
    outside = [pair for pair in module.named_modules() if id(pair[1]) not in inside]
    embeddings = [pair for pair in outside if _is_a(pair[1], "Embedding")]
    others = [pair for pair in outside if pair not in embeddings]
    chosen = max(_number(config, key) for key in CHOSEN)
    seen: set[int] = set()
    first = _read_part(module, embeddings, chosen, seen)
    kinds = Counter[ModelPart]()
    for layers in lists:
        kinds.update(_read_part(layer, layer.named_modules(), chosen, seen) for layer in layers)
    last = _read_part(module, others, chosen, seen)
    parts = (first, *(replace(part, count=count) for part, count in kinds.items()), last)
    tables = [shape_of(p) for _, child in embeddings for p in child.parameters(recurse=False)]
    vocab, width = max((shape for shape in tables if len(shape) == 2), default=(1, 0))
    matrices = [shape for part in parts for shape in part.shapes if len(shape) == 2]
    hidden = _number(config, "hidden_size") or width or max(map(min, matrices), default=1)
    found = ModuleTree(
        name,
        layers=sum(map(len, lists)),
        hidden=hidden,
        heads=_number(config, "num_attention_heads") or max(1, hidden // HEAD),
        vocab=vocab,
        sequence=_number(config, "max_position_embeddings") or SEQUENCE,
        parts=parts,
    )
    if not chosen:
        return found
    active = sum(part.count * part.multiplied for part in parts)
    note = f"each token goes to {chosen} experts: {active:,.0f} of {found.params:,} parameters"
    return replace(found, notes=(f"{note} multiply it",))


def shape_of(parameter: Any) -> Shape:
    """Return the shape of a parameter, also of one that DeepSpeed has partitioned, whose own is
    empty.
    """
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _outermost_lists(module: Any) -> Iterable[Any]:
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        nested = any(path.startswith(f"{outer}.") for outer in found)
        if _is_a(child, "ModuleList") and len(child) and not nested:
            found[path] = child
    return found.values()


def _read_part(
    root: Any, modules: Iterable[tuple[str, Any]], chosen: int, seen: set[int]
) -> ModelPart:
    """Return what modules are together, each given with its path below ``root``.

    Args:
        chosen: experts to which a token is sent; 0 if it is not known.
        seen: identities of the parameters of earlier parts; a parameter that several modules share
            is the first's.
    """
    shapes: list[Shape] = []
    multiplied = stored = 0.0
    attention = 0
    for path, child in modules:
        own = list(child.parameters(recurse=False))
        shapes += [shape_of(p) for p in own if id(p) not in seen]
        seen.update(map(id, own))
        kind = type(child).__name__
        listed = LISTED_EXPERT.match(path)
        attention += _width(child) if "Attention" in kind else 0
        for shape in _matrices(child):
            experts = 0
            if "Experts" in kind:
                experts = shape[0]
            elif listed:
                experts = len(root.get_submodule(listed[1]))
            share = chosen / experts if experts and chosen else 1.0
            multiplied += share * math.prod(shape)
            stored += share * math.prod(shape[:-2]) * sum(shape[-2:])
    return ModelPart(1, tuple(shapes), multiplied, attention, round(stored))


def _matrices(module: Any) -> list[Shape]:
    """Return the shapes of a module's own matrices: no embedding's rows, nor the biases of a list
    of experts.
    """
    if _is_a(module, "Embedding"):
        return []
    least = 3 if "Experts" in type(module).__name__ else 2
    shapes = map(shape_of, module.parameters(recurse=False))
    return [shape for shape in shapes if len(shape) >= least]


def _width(attention: Any) -> int:
    """Return the width of an attention's heads: what goes into the last of its matrices, the
    output's.
    """
    linear = [child for child in attention.children() if _is_a(child, "Linear", "Conv1D")]
    matrices = [child for child in linear if _matrices(child)]
    if len(matrices) < 2:
        return 0  # it only combines others
    return _matrices(matrices[-1])[0][0 if _is_a(matrices[-1], "Conv1D") else 1]


def _is_a(module: Any, *kinds: str) -> bool:
    return any(base.__name__ in kinds for base in type(module).__mro__)


def _number(config: Any, key: str) -> int:
    """Return a positive number of a config; 0 if it has none, or refuses one that differs between
    layers.
    """
    try:
        value = getattr(config, key, None)
    except Exception:  # transformers has its own for keys of single layers
        return 0
    return value if type(value) is int and value > 0 else 0
