# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loads models by name, or from a file that describes one: a Hugging Face ``config.json`` or a GPT-NeoX YAML.

Sizes of the named models are those of their published configs (EleutherAI/gpt-neox and Pythia, meta-llama, GPT-2);
``gpt-neox-10b`` is the exception: no config of that size was published, so its shape is a conventional one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zero_topo.cost.transformer import SEQUENCE, Transformer
from zero_topo.strict import cut, did_you_mean, read_text, within_limits

GPT2_VOCABULARY = 50304  # 50257, padded by GPT-NeoX to a multiple of 128
TRAINED = 4096
"""Limit of the training sequence, in tokens, if a file gives only the model's maximal number of positions."""

NEOX = "neox yaml"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
MOST_BYTES = 256 << 10  # PyYAML is slow to import
ATTENTIONS = ("global", "local", "flash")
"""GPT-NeoX's kinds of attention with the parameters of a transformer layer; rwkv, mamba and gmlp have others."""


def _neox(name: str, layers: int, hidden: int, heads: int, vocab: int) -> Transformer:
    return Transformer(name, layers, hidden, heads, heads, vocab, SEQUENCE, 4 * hidden)


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(name, layers, hidden, heads, heads, 50257, 1024, 4 * hidden, tied=True, positions=1024)


def _llama(name: str, shape: tuple[int, int, int, int], intermediate: int, vocab: int, sequence: int) -> Transformer:
    layers, hidden, heads, kv_heads = shape
    return Transformer(name, layers, hidden, heads, kv_heads, vocab, sequence, intermediate, gated=True, biases=False)


MODELS: Mapping[str, Transformer] = MappingProxyType(
    {
        model.name: model
        for model in (
            _gpt2("gpt2", 12, 768, 12),
            _gpt2("gpt2-xl", 48, 1600, 25),
            _neox("gpt-neox-125m", 12, 768, 12, 50304),
            _neox("gpt-neox-1.3b", 24, 2048, 16, 50304),
            _neox("gpt-neox-2.7b", 32, 2560, 32, 50304),
            _neox("gpt-neox-6.7b", 32, 4096, 32, 50432),
            _neox("gpt-neox-10b", 30, 5120, 40, 50432),
            _neox("gpt-neox-20b", 44, 6144, 64, 50432),
            _neox("pythia-12b", 36, 5120, 40, 50688),
            _llama("llama-2-7b", (32, 4096, 32, 32), 11008, 32000, 4096),
            _llama("llama-2-13b", (40, 5120, 40, 40), 13824, 32000, 4096),
            _llama("llama-2-70b", (80, 8192, 64, 8), 28672, 32000, 4096),
            _llama("llama-3-8b", (32, 4096, 32, 8), 14336, 128256, 8192),
            _llama("llama-3-70b", (80, 8192, 64, 8), 28672, 128256, 8192),
            _llama("llama-3-405b", (126, 16384, 128, 8), 53248, 128256, 8192),
        )
    }
)


def load_model(name_or_path: str, sequence: int | None = None) -> Transformer:
    """Load a model by name, or from a Hugging Face ``config.json`` or a GPT-NeoX YAML.

    Args:
        name_or_path: one of :data:`MODELS`, a file, or a folder with a ``config.json``.
        sequence: tokens of a training sequence. None takes that of the named model or the YAML; for a Hugging Face
            config it takes the model's maximum, at most :data:`TRAINED`, and adds a note.

    Raises:
        ValueError: if there is no such name or file, or the file does not describe a known kind of model.
    """
    if name_or_path.lower() in MODELS:
        found = MODELS[name_or_path.lower()]
        return found if sequence is None else replace(found, sequence=sequence)
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        hint = did_you_mean(name_or_path, MODELS, cutoff=0.4)
        raise ValueError(
            f"model {name_or_path!r} is neither a file nor a known name{hint} (known: {', '.join(MODELS)})"
        )
    what = f"model file {path}"
    data = _parse(read_text(path, what, MOST_BYTES), what)
    keys = _Keys(what, {str(key).replace("-", "_"): value for key, value in data.items()})
    kind = keys.values.get("model_type", NEOX if "num_layers" in keys.values else None)
    if not isinstance(kind, str) or kind not in READERS:
        raise ValueError(
            f"{what}: {f'models of type {kind!r} are not known' if kind else 'has neither model_type nor num_layers'}; "
            f"give a Hugging Face config.json of type {', '.join(list(READERS)[:-1])} or a GPT-NeoX YAML that has the "
            "model's shape, or use --params"
        )
    keys.refuse_experts()
    found = READERS[kind](path.parent.name if path.name == "config.json" else path.stem, keys)
    if sequence is not None:
        return replace(found, sequence=sequence)
    if kind == NEOX or found.sequence <= TRAINED:
        return found
    note = f"sequences of {TRAINED:,} tokens are taken, though the model takes up to {found.sequence:,}: give --seq"
    return replace(found, sequence=TRAINED, notes=(*found.notes, note))


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

    def refuse_experts(self) -> None:
        """Refuse a mixture of experts, which would be counted as its dense part.

        Raises:
            ValueError: if the file has one.
        """
        name = next((name for name in EXPERTS if (self.values.get(name) or 0) not in (0, 1)), None)
        if name is not None:
            raise ValueError(
                f"{self.what}: {name} is {self.values[name]!r}: a mixture of experts is not counted; plan for its "
                "parameters with --params, which takes all of them for active"
            )

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean; the default if the key is not set."""
        value = self.values.get(name)
        return default if value is None else bool(value)


def _read_gpt2(name: str, keys: _Keys) -> Transformer:
    hidden, heads = keys.count("n_embd"), keys.count("n_head")
    positions = keys.count("n_positions", "n_ctx", default=1024)
    return Transformer(
        name,
        layers=keys.count("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        vocab=keys.count("vocab_size", default=50257),
        sequence=positions,
        intermediate=keys.count("n_inner", default=4 * hidden),
        tied=keys.flag("tie_word_embeddings", True),
        positions=positions,
    )


def _read_hugging_face(name: str, keys: _Keys) -> Transformer:
    kind = keys.values["model_type"]
    gated = kind != "gpt_neox"
    if gated and (biased := [bias for bias in ("attention_bias", "mlp_bias") if keys.flag(bias, False)]):
        raise ValueError(f"{keys.what}: {biased[0]} is true, whose parameters are not counted; use --params instead")
    heads = keys.count("num_attention_heads")
    hidden = keys.count("hidden_size")
    return Transformer(
        name,
        layers=keys.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", default=heads),
        vocab=keys.count("vocab_size"),
        sequence=keys.count("max_position_embeddings", default=SEQUENCE),
        intermediate=keys.count("intermediate_size", default=4 * hidden),
        gated=gated,
        tied=keys.flag("tie_word_embeddings", False),
        biases=not gated,
        head_size=keys.count("head_dim", default=0),
        qkv_biases=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def _read_neox(name: str, keys: _Keys) -> Transformer:
    """Read GPT-NeoX's keys. The tokenizer defines the vocabulary; without one in the file, GPT-2's is assumed."""
    if strange := [word for word in _words(keys.values.get("attention_config")) if word not in ATTENTIONS]:
        raise ValueError(f"{keys.what}: attention_config has {strange[0]!r}, whose layers are no transformer's")
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    positions = keys.count("max_position_embeddings", "seq_length", default=SEQUENCE)
    known = any(keys.values.get(name) is not None for name in ("padded_vocab_size", "vocab_size"))
    llama = keys.values.get("mlp_type") == "llama"
    gated = llama or keys.values.get("activation") == "swiglu"
    intermediate = keys.count("intermediate_size", default=(8 if gated else 4) * hidden)
    if gated:  # GPT-NeoX gives a third of this to each matrix
        step = keys.count("mlp_multiple_of", default=256 if llama else 1)
        intermediate = -(-(intermediate // 3) // step) * step
    return Transformer(
        name,
        layers=keys.count("num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.count("num_kv_heads", default=heads),
        vocab=keys.count("padded_vocab_size", "vocab_size", default=GPT2_VOCABULARY),
        sequence=keys.count("seq_length", default=positions),
        intermediate=intermediate,
        gated=gated,
        tied=not keys.flag("no_weight_tying", False),
        biases=keys.flag("use_bias_in_attn_linear", True),
        positions=positions if keys.values.get("pos_emb", "learned") == "learned" else 0,
        notes=() if known else (f"the file names no vocabulary: GPT-2's, {GPT2_VOCABULARY:,} rows, is taken",),
    )


def _words(nested: Any) -> list[str]:
    """Return the strings in nested lists."""
    if isinstance(nested, str):
        return [nested]
    return [word for part in nested for word in _words(part)] if isinstance(nested, list) else []


READERS: Mapping[str, Callable[[str, _Keys], Transformer]] = MappingProxyType(
    {
        "gpt2": _read_gpt2,
        **dict.fromkeys(("gpt_neox", "llama", "mistral", "qwen2", "qwen3"), _read_hugging_face),
        NEOX: _read_neox,
    }
)
