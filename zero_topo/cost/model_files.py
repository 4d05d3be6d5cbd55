# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loads models by name, from a file that describes one, or from the modules of a live one.

Files are a Hugging Face ``config.json`` or a GPT-NeoX YAML. ``models.json`` holds the configs of
named models: their published ones, with the sequence of their training as
``max_position_embeddings``. ``gpt-neox-10b`` is the exception: no config of that size was
published, so its shape is a conventional one.

The families of :data:`PLAIN` are read here if the config gives every size. All others, and configs
with keys missing, whose defaults are those of the classes, are built by transformers.

Note [What is read]
    The layers are the elements of the outermost ``nn.ModuleList``s. Parameters are exact, each
    counted once. Of FLOPs, three kinds are counted: two per token for each element of a matrix;
    those of the scores of each module whose class is called an attention; and of experts the share
    that a token is sent to. Everything else is not: convolutions, recurrences, other parameters of
    two dimensions or more; and towers and encoders, which see other tokens than the text's. Parts
    with any of these are marked, and the range of a prediction allows for them.

    A layer stores the inputs and outputs of its matrices for the backward pass. For the
    transformers in ``transformer.py`` this is within 9% of their own count.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from zero_topo.cost.transformer import MOST_LAYERS, SEQUENCE, Model, Part, Shape, Transformer
from zero_topo.strict import cut, did_you_mean, packaged, read_text

GPT2_VOCABULARY = 50304  # 50257, padded by GPT-NeoX to a multiple of 128
TRAINED = 4096
"""Limit of the training sequence, in tokens, if a file gives only the model's maximal number of
positions.
"""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ATTENTIONS = ("global", "local", "flash")
"""GPT-NeoX's kinds of attention with the parameters of a transformer layer; rwkv, mamba and gmlp
have others.
"""
GATED = ("geglu", "reglu", "bilinear", "swiglu", "glu")
"""GPT-NeoX's activations whose feed-forward has three matrices."""

Keys = Mapping[str, Any]
MODELS: Mapping[str, Keys] = packaged(__package__, "models.json")
GPT2: Mapping[str, str] = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
"""GPT-2's names of keys -> those of all other families."""
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
_GROUPED = (*_SIZES, "num_key_value_heads")
PLAIN: Mapping[str, tuple[str, ...]] = {
    "gpt2": (*_SIZES[:3], "vocab_size", "max_position_embeddings"),
    "gpt_neox": _SIZES,
    **dict.fromkeys(("llama", "mistral", "qwen2"), _GROUPED),
    "qwen3": (*_GROUPED, "head_dim"),
}
"""Families whose parameters follow from these keys and those that :func:`_read_hugging_face`
reads.
"""
STRANGE = ("attention_bias", "mlp_bias", "add_cross_attention", *EXPERTS)
"""Keys that change the parameters of a plain family, or should."""
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
MULTIPLIED = re.compile(r"Linear|Router|Gate$|Experts")
"""Names of classes, in addition to torch's and transformers' own, whose matrices multiply each
token.
"""
LISTED_EXPERT = re.compile(r"(.*experts)\.\d+\.")
HEAD = 128
"""Assumed elements of a head if nothing gives the number of heads."""


def load_model(name_or_path: str, sequence: int | None = None) -> Model:
    """Load a model by name, or from a Hugging Face ``config.json`` or a GPT-NeoX YAML.

    Args:
        name_or_path: one of :data:`MODELS`, a file, or a folder with a ``config.json``.
        sequence: tokens of a training sequence. None takes that of the named model or the YAML; for
            a Hugging Face config it takes the model's maximum, at most :data:`TRAINED`, and adds a
            note.

    Raises:
        ValueError: if there is no such name or file, or the file does not describe a model.
    """
    named = MODELS.get(name_or_path.lower())
    if named is not None:
        found = _read_config(name_or_path.lower(), named, f"model {name_or_path}")
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
    data = {str(key): value for key, value in _parse(read_text(path, what), what).items()}
    name = path.parent.name if path.name == "config.json" else path.stem
    neox = {key.replace("-", "_"): value for key, value in data.items()}
    hugging_face = isinstance(data.get("model_type"), str)
    if not hugging_face and "num_layers" not in neox:
        raise ValueError(
            f"{what}: has neither model_type nor num_layers; give a Hugging Face config.json or a "
            "GPT-NeoX YAML that has the model's shape, or use --params"
        )
    found = _read_config(name, data, what) if hugging_face else _read_neox(name, neox, what)
    if hugging_face and sequence is None and found.sequence > TRAINED:
        note = (
            f"sequences of {TRAINED:,} tokens are taken, though the model takes up to "
            f"{found.sequence:,}: give --seq"
        )
        return replace(found, sequence=TRAINED, notes=(*found.notes, note))
    return replace(found, sequence=sequence or found.sequence)


def _read_config(name: str, data: Keys, what: str) -> Model:
    """Return the model of a Hugging Face config; see the module's docstring."""
    kind = data["model_type"]
    keys = {GPT2.get(key, key) if kind == "gpt2" else key: value for key, value in data.items()}
    usual = {"attention_bias": kind == "gpt_neox"}
    plain = all(data.get(key) in (None, usual.get(key, False)) for key in STRANGE)
    if kind in PLAIN and plain and all(keys.get(key) is not None for key in PLAIN[kind]):
        return _read_hugging_face(name, keys, what)
    module = build(data, what)
    found = read_modules(module, name)
    if (key := _experts(keys)) and not any("expert" in path for path, _ in module.named_modules()):
        note = f"{key} is {data[key]!r}, but transformers builds no experts for {kind!r}"
        return replace(found, notes=(*found.notes, note))
    return found


def _parse(text: str, what: str) -> dict[str, Any]:
    """Parse JSON, or YAML if PyYAML is installed; else use Hjson, which also reads GPT-NeoX's
    commented JSON.
    """
    reason: Exception | None = None
    for module, function in (("json", "loads"), ("yaml", "safe_load"), ("hjson", "loads")):
        try:
            data = getattr(importlib.import_module(module), function)(text)
        except ImportError:
            continue
        except Exception as error:  # each parser raises its own error types
            reason = reason or error
            continue
        if isinstance(data, Mapping) and data:
            return dict(data)
    said = cut(" ".join(str(reason).split())) if reason else "it holds something else"
    raise ValueError(f"{what}: neither JSON nor YAML of an object: {said}")


def _count(what: str, keys: Keys, *names: str, default: int | None = None) -> int:
    """Return the first of these keys that is set, as a number; the default if none is. Errors name
    ``what`` and key.
    """
    name = next((name for name in names if keys.get(name) is not None), None)
    if name is None:
        if default is None:
            raise ValueError(f"{what}: {names[0]} is missing; add it")
        return default
    value = keys[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what}: {name} is {value!r}; it must be a whole number")
    return value


def _flag(keys: Keys, name: str, default: bool) -> bool:
    return default if keys.get(name) is None else bool(keys[name])


def _experts(keys: Keys) -> str | None:
    """Return the key that gives a number of experts above one, if there is one."""
    return next((name for name in EXPERTS if (keys.get(name) or 0) not in (0, 1)), None)


def _read_hugging_face(name: str, keys: Keys, what: str) -> Transformer:
    count = partial(_count, what, keys)
    kind = keys["model_type"]
    heads = count("num_attention_heads")
    gpt2 = kind == "gpt2"
    gated = kind not in ("gpt2", "gpt_neox")
    hidden = count("hidden_size")
    positions = count("max_position_embeddings", default=SEQUENCE)
    return Transformer(
        name,
        layers=count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("num_key_value_heads", default=heads),
        vocab=count("vocab_size"),
        sequence=positions,
        intermediate=count("intermediate_size", default=4 * hidden),
        gated=gated,
        tied=_flag(keys, "tie_word_embeddings", gpt2),
        biases=not gated,
        positions=positions if gpt2 else 0,
        head_size=count("head_dim", default=0),
        qkv_biases=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def _read_neox(name: str, keys: Keys, what: str) -> Transformer:
    """Read GPT-NeoX's keys. The tokenizer defines the vocabulary; without one in the file, GPT-2's
    is assumed.

    Raises:
        ValueError: for layers that are no transformer's, or a mixture of experts, whose dense part
            alone is here.
    """
    count = partial(_count, what, keys)
    if strange := [word for word in _words(keys.get("attention_config")) if word not in ATTENTIONS]:
        raise ValueError(
            f"{what}: attention_config has {strange[0]!r}, whose layers are no transformer's"
        )
    if key := _experts(keys):
        raise ValueError(
            f"{what}: {key} is {keys[key]!r}: GPT-NeoX's mixture of experts is not counted; plan "
            "for its parameters with --params, which takes all of them for active"
        )
    heads = count("num_attention_heads")
    positions = count("max_position_embeddings", "seq_length", default=SEQUENCE)
    known = any(keys.get(name) is not None for name in ("padded_vocab_size", "vocab_size"))
    biases = _flag(keys, "use_bias_in_attn_linear", True)
    intermediate = _neox_intermediate(keys, what)
    return Transformer(
        name,
        layers=count("num_layers"),
        hidden=count("hidden_size"),
        heads=heads,
        kv_heads=count("num_kv_heads", default=heads),
        vocab=count("padded_vocab_size", "vocab_size", default=GPT2_VOCABULARY),
        sequence=count("seq_length", default=positions),
        intermediate=intermediate,
        gated=keys.get("mlp_type") == "llama" or keys.get("activation") in GATED,
        tied=not _flag(keys, "no_weight_tying", False),
        biases=biases,
        mlp_biases=keys.get("mlp_type") != "llama" and _flag(keys, "use_bias_in_mlp", True),
        norm_biases="rmsnorm" not in str(keys.get("norm")),
        positions=positions if keys.get("pos_emb", "learned") == "learned" else 0,
        notes=()
        if known
        else (f"the file names no vocabulary: GPT-2's, {GPT2_VOCABULARY:,} rows, is taken",),
    )


def _neox_intermediate(keys: Keys, what: str) -> int:
    """Return the width of the feed-forward as GPT-NeoX builds it (ParallelMLP, and LLaMAParallelMLP
    before 2024-09).

    A gated one gives two thirds of the width that the file states to gate and up together.
    """
    count = partial(_count, what, keys)
    hidden = count("hidden_size")
    stated = count("intermediate_size", default=0)
    if keys.get("mlp_type") == "llama":
        return stated or _rounded_up(8 * hidden // 3, 256)
    step = count("mlp_multiple_of", default=1)
    expansion = keys.get("expansion_factor") or 4
    width = stated or int(expansion * hidden)
    gated = keys.get("activation") in GATED
    return _rounded_up(2 * width // 3, 2 * step) // 2 if gated else _rounded_up(width, step)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _words(nested: Any) -> list[str]:
    """Return the strings in nested lists."""
    if isinstance(nested, str):
        return [nested]
    return [word for part in nested for word in _words(part)] if isinstance(nested, list) else []


# -- modules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleTree(Model):
    """Describes a model read from its modules."""

    parts: tuple[Part, ...]  # type: ignore[misc]  # the base only declares it

    @classmethod
    def of(cls, model: Model, parts: Iterable[Part], **changed: Any) -> ModuleTree:
        """Return a model like another with other parts, and other values of some fields."""
        same = {field.name: getattr(model, field.name) for field in fields(Model)}
        return cls(**same | changed, parts=tuple(parts))


def build(data: Keys, what: str) -> Any:
    """Return the module of a Hugging Face config, without memory for its parameters.

    Raises:
        ValueError: if transformers is not installed, does not know the model's type, or cannot
            build it.
    """
    kind = data["model_type"]
    way_out = "or plan for its size with --params"
    keys = {**data, **(data.get("text_config") or {})}
    if deep := [
        key
        for key, value in keys.items()
        if "layers" in key and type(value) is int and value > MOST_LAYERS
    ]:
        raise ValueError(f"{what}: {deep[0]} is more than the {MOST_LAYERS:,} that are planned for")
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
        make = (
            getattr(transformers, names[0])
            if names
            else next(fitting, transformers.AutoModel).from_config
        )
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
    config = getattr(module, "config", None)
    text = (
        config.get_text_config()
        if config is not None and hasattr(config, "get_text_config")
        else config
    )
    lists = _outermost_lists(module)
    inside = {id(child) for layers in lists for layer in layers for child in layer.modules()}
    outside = [(path, child) for path, child in module.named_modules() if id(child) not in inside]
    embeddings = [pair for pair in outside if _is_a(pair[1], "Embedding")]
    others = [pair for pair in outside if _matrices(pair[1]) and not _multiplies(pair[1])]
    chosen = max(_number(text, key) for key in CHOSEN)
    read = partial(_read_part, chosen=chosen, seen=set())
    first = read(module, embeddings)
    towers = read(module, others)
    main = max(
        lists,
        key=lambda layers: sum(math.prod(shape_of(p)) for p in layers.parameters()),
        default=None,
    )
    kinds: Counter[Part] = Counter([towers] if others else [])
    for of in lists:
        for layer in of:
            part = read(layer, layer.named_modules())
            apart = f"{type(layer).__name__} apart from the text's"
            kinds[part if of is main else replace(part, unknown=(apart,))] += 1
    last = read(module, [pair for pair in outside if pair not in embeddings + others])
    parts = (first, *(replace(part, count=count) for part, count in kinds.items()), last)
    tables = [shape_of(p) for _, child in embeddings for p in child.parameters(recurse=False)]
    vocab, width = max((shape for shape in tables if len(shape) == 2), default=(1, 0))
    widest = max(
        (min(shape) for part in parts for shape in part.shapes if len(shape) == 2), default=1
    )
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
    return replace(found, notes=tuple(_notes(found, chosen)))


def shape_of(parameter: Any) -> Shape:
    """Return the shape of a parameter, also of one that DeepSpeed has partitioned, whose own is
    empty.
    """
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _outermost_lists(module: Any) -> list[Any]:
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        if (
            _is_a(child, "ModuleList")
            and len(child)
            and not any(path.startswith(f"{outer}.") for outer in found)
        ):
            found[path] = child
    return list(found.values())


def _read_part(root: Any, modules: Iterable[tuple[str, Any]], chosen: int, seen: set[int]) -> Part:
    """Return what modules are together, each given with its path below ``root``.

    Args:
        chosen: experts to which a token is sent; 0 if it is not known.
        seen: identities of the parameters of earlier parts; a parameter that several modules share
            is the first's.
    """
    shapes: list[Shape] = []
    multiplied = stored = 0.0
    attention = 0
    unknown = dict[str, None]()
    for path, child in modules:
        shapes += [shape_of(p) for p in child.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, child.parameters(recurse=False)))
        kind = type(child).__name__
        listed = LISTED_EXPERT.match(path)
        attention += _width(child) if "Attention" in kind else 0
        for shape in _matrices(child):
            of = (
                shape[0]
                if "Experts" in kind
                else len(root.get_submodule(listed[1]))
                if listed
                else 0
            )
            if not _multiplies(child) or (of and not chosen):
                unknown[kind] = None
            share = chosen / of if of and chosen else 1.0
            multiplied += share * math.prod(shape)
            stored += share * math.prod(shape[:-2]) * sum(shape[-2:])
    return Part(1, tuple(shapes), multiplied, attention, round(stored), tuple(unknown))


def _matrices(module: Any) -> list[Shape]:
    """Return the shapes of a module's own matrices: no embedding's rows, nor the biases of a list
    of experts.
    """
    least = 3 if "Experts" in type(module).__name__ else 2
    shapes = map(shape_of, module.parameters(recurse=False))
    return [] if _is_a(module, "Embedding") else [shape for shape in shapes if len(shape) >= least]


def _multiplies(module: Any) -> bool:
    """Return whether each token is multiplied by a module's matrices, of experts by some of
    them.
    """
    return _is_a(module, "Linear", "Conv1D") or MULTIPLIED.search(type(module).__name__) is not None


def _width(attention: Any) -> int:
    """Return the width of an attention's heads: what goes into the last of its matrices, the
    output's.
    """
    matrices = [
        child
        for child in attention.children()
        if _is_a(child, "Linear", "Conv1D") and _matrices(child)
    ]
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


def _notes(model: ModuleTree, chosen: int) -> Iterator[str]:
    active = sum(part.count * part.multiplied for part in model.parts)
    if chosen:
        yield (
            f"each token goes to {chosen} experts: {active:,.0f} of {model.params:,} parameters "
            "multiply it"
        )
    if model.unknown:
        kinds = dict.fromkeys(kind for part in model.parts for kind in part.unknown)
        yield (
            f"the FLOPs of {', '.join(kinds)} are not known: two per parameter and token are "
            "counted, and the range of a step allows for half of their parts' more or less"
        )
