# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loads models by name, or from a file that describes one: a Hugging Face ``config.json`` or a GPT-NeoX YAML.

``models.json`` holds the configs of named models: their published ones, with the sequence of their training as
``max_position_embeddings``. ``gpt-neox-10b`` is the exception: no config of that size was published, so its shape is a
conventional one.

The families of :data:`PLAIN` are read here if the config gives every size. All others, and configs with keys missing,
whose defaults are those of the classes, are built by transformers; see ``module_tree.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_topo.cost.module_tree import build, read_modules
from zero_topo.cost.transformer import SEQUENCE, Model, Transformer
from zero_topo.strict import cut, did_you_mean, packaged, read_text, within_limits

GPT2_VOCABULARY = 50304  # 50257, padded by GPT-NeoX to a multiple of 128
TRAINED = 4096
"""Limit of the training sequence, in tokens, if a file gives only the model's maximal number of positions."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
MOST_BYTES = 256 << 10  # PyYAML is slow to import
ATTENTIONS = ("global", "local", "flash")
"""GPT-NeoX's kinds of attention with the parameters of a transformer layer; rwkv, mamba and gmlp have others."""
GATED = ("geglu", "reglu", "bilinear", "swiglu", "glu")
"""GPT-NeoX's activations whose feed-forward has three matrices."""

MODELS: Mapping[str, Mapping[str, Any]] = packaged(__package__, "models.json")
GPT2: Mapping[str, str] = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
"""GPT-2's names of keys -> those of all other families."""
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_GROUPED = (*_SIZES, "num_key_value_heads")
PLAIN: Mapping[str, tuple[str, ...]] = {
    "gpt2": (*_SIZES[:3], "vocab_size", "max_position_embeddings"),
    "gpt_neox": _SIZES,
    **dict.fromkeys(("llama", "mistral", "qwen2"), _GROUPED),
    "qwen3": (*_GROUPED, "head_dim"),
}
"""Families whose parameters follow from these keys and those that :func:`_read_hugging_face` reads."""
STRANGE = ("attention_bias", "mlp_bias", "add_cross_attention", *EXPERTS)
"""Keys that change the parameters of a plain family, or should."""


def load_model(name_or_path: str, sequence: int | None = None) -> Model:
    """Load a model by name, or from a Hugging Face ``config.json`` or a GPT-NeoX YAML.

    Args:
        name_or_path: one of :data:`MODELS`, a file, or a folder with a ``config.json``.
        sequence: tokens of a training sequence. None takes that of the named model or the YAML; for a Hugging Face
            config it takes the model's maximum, at most :data:`TRAINED`, and adds a note.

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
            f"model {name_or_path!r} is neither a file nor a known name{hint} (known: {', '.join(MODELS)})"
        )
    what = f"model file {path}"
    data = {str(key): value for key, value in _parse(read_text(path, what, MOST_BYTES), what).items()}
    name = path.parent.name if path.name == "config.json" else path.stem
    neox = _Keys(what, {key.replace("-", "_"): value for key, value in data.items()})
    hugging_face = isinstance(data.get("model_type"), str)
    if not hugging_face and "num_layers" not in neox.values:
        raise ValueError(
            f"{what}: has neither model_type nor num_layers; give a Hugging Face config.json or a GPT-NeoX YAML that "
            "has the model's shape, or use --params"
        )
    found = _read_config(name, data, what) if hugging_face else _read_neox(name, neox)
    if hugging_face and sequence is None and found.sequence > TRAINED:
        note = f"sequences of {TRAINED:,} tokens are taken, though the model takes up to {found.sequence:,}: give --seq"
        return replace(found, sequence=TRAINED, notes=(*found.notes, note))
    return replace(found, sequence=sequence or found.sequence)


def _read_config(name: str, data: Mapping[str, Any], what: str) -> Model:
    """Return the model of a Hugging Face config; see the module's docstring."""
    kind = data["model_type"]
    keys = _Keys(what, {GPT2.get(key, key) if kind == "gpt2" else key: value for key, value in data.items()})
    usual = {"attention_bias": kind == "gpt_neox"}
    plain = all(data.get(key) in (None, usual.get(key, False)) for key in STRANGE)
    if kind in PLAIN and plain and all(keys.values.get(key) is not None for key in PLAIN[kind]):
        return _read_hugging_face(name, keys, kind)
    module = build(data, what)
    found = read_modules(module, name)
    if (key := keys.experts()) and not any("expert" in path for path, _ in module.named_modules()):
        note = f"{key} is {data[key]!r}, but transformers builds no experts for {kind!r}"
        return replace(found, notes=(*found.notes, note))
    return found


def _parse(text: str, what: str) -> dict[str, Any]:
    """Parse JSON, or YAML if PyYAML is installed; else use Hjson, which also reads GPT-NeoX's commented JSON."""
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
            return dict(within_limits(data, what))
    said = cut(" ".join(str(reason).split())) if reason else "it holds something else"
    raise ValueError(f"{what}: neither JSON nor YAML of an object: {said}")


@dataclass(frozen=True)
class _Keys:
    """Reads the keys of a file; errors name the file and the key."""

    what: str
    values: Mapping[str, Any]

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the first of these keys that is set, as a number; the default if none is."""
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is None:
                raise ValueError(f"{self.what}: {names[0]} is missing; add it")
            return default
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.what}: {name} is {value!r}; it must be a whole number")
        return value

    def experts(self) -> str | None:
        """Return the key that gives a number of experts above one, if there is one."""
        return next((name for name in EXPERTS if (self.values.get(name) or 0) not in (0, 1)), None)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean; the default if the key is not set."""
        value = self.values.get(name)
        return default if value is None else bool(value)


def _read_hugging_face(name: str, keys: _Keys, kind: str) -> Transformer:
    heads, gpt2, gated = keys.count("num_attention_heads"), kind == "gpt2", kind not in ("gpt2", "gpt_neox")
    hidden, positions = keys.count("hidden_size"), keys.count("max_position_embeddings", default=SEQUENCE)
    return Transformer(
        name,
        layers=keys.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", default=heads),
        vocab=keys.count("vocab_size"),
        sequence=positions,
        intermediate=keys.count("intermediate_size", default=4 * hidden),
        gated=gated,
        tied=keys.flag("tie_word_embeddings", gpt2),
        biases=not gated,
        positions=positions if gpt2 else 0,
        head_size=keys.count("head_dim", default=0),
        qkv_biases=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def _read_neox(name: str, keys: _Keys) -> Transformer:
    """Read GPT-NeoX's keys. The tokenizer defines the vocabulary; without one in the file, GPT-2's is assumed.

    Raises:
        ValueError: for layers that are no transformer's, or a mixture of experts, whose dense part alone is here.
    """
    if strange := [word for word in _words(keys.values.get("attention_config")) if word not in ATTENTIONS]:
        raise ValueError(f"{keys.what}: attention_config has {strange[0]!r}, whose layers are no transformer's")
    if key := keys.experts():
        raise ValueError(
            f"{keys.what}: {key} is {keys.values[key]!r}: GPT-NeoX's mixture of experts is not counted; plan for its "
            "parameters with --params, which takes all of them for active"
        )
    heads = keys.count("num_attention_heads")
    positions = keys.count("max_position_embeddings", "seq_length", default=SEQUENCE)
    known = any(keys.values.get(name) is not None for name in ("padded_vocab_size", "vocab_size"))
    biases, intermediate = keys.flag("use_bias_in_attn_linear", True), _neox_intermediate(keys)
    return Transformer(
        name,
        layers=keys.count("num_layers"),
        hidden=keys.count("hidden_size"),
        heads=heads,
        kv_heads=keys.count("num_kv_heads", default=heads),
        vocab=keys.count("padded_vocab_size", "vocab_size", default=GPT2_VOCABULARY),
        sequence=keys.count("seq_length", default=positions),
        intermediate=intermediate,
        gated=keys.values.get("mlp_type") == "llama" or keys.values.get("activation") in GATED,
        tied=not keys.flag("no_weight_tying", False),
        biases=biases,
        mlp_biases=keys.values.get("mlp_type") != "llama" and keys.flag("use_bias_in_mlp", True),
        norm_biases="rmsnorm" not in str(keys.values.get("norm")),
        positions=positions if keys.values.get("pos_emb", "learned") == "learned" else 0,
        notes=() if known else (f"the file names no vocabulary: GPT-2's, {GPT2_VOCABULARY:,} rows, is taken",),
    )


def _neox_intermediate(keys: _Keys) -> int:
    """Return the width of the feed-forward as GPT-NeoX builds it (ParallelMLP, and LLaMAParallelMLP before 2024-09).

    A gated one gives two thirds of the width that the file states to gate and up together.
    """
    hidden, stated = keys.count("hidden_size"), keys.count("intermediate_size", default=0)
    if keys.values.get("mlp_type") == "llama":
        return stated or _rounded_up(8 * hidden // 3, 256)
    step = keys.count("mlp_multiple_of", default=1)
    expansion = keys.values.get("expansion_factor") or 4
    width = stated or int(expansion * hidden)
    gated = keys.values.get("activation") in GATED
    return _rounded_up(2 * width // 3, 2 * step) // 2 if gated else _rounded_up(width, step)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _words(nested: Any) -> list[str]:
    """Return the strings in nested lists."""
    if isinstance(nested, str):
        return [nested]
    return [word for part in nested for word in _words(part)] if isinstance(nested, list) else []
