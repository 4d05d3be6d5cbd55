# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Shapes of transformers: published parameter counts, FLOPs, the files that describe them, and sizes made up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.cost.model_files import MODELS, load_model
from zero_topo.cost.transformer import Transformer, scaled, with_shape

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-125m": 162_322_944,  # Pythia 160M
    "gpt-neox-1.3b": 1_414_647_808,  # Pythia 1.4B
    "gpt-neox-2.7b": 2_775_208_960,  # Pythia 2.8B
    "gpt-neox-6.7b": 6_857_302_016,  # Pythia 6.9B
    "gpt-neox-10b": 10_000_000_000,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-12b": 11_846_072_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
}
HUGGING_FACE = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "intermediate_size": "intermediate",
    "vocab_size": "vocab",
    "max_position_embeddings": "sequence",
}
LLAMA = {**HUGGING_FACE, "num_key_value_heads": "kv_heads"}
GPT2 = {"n_layer": "layers", "n_embd": "hidden", "n_head": "heads", "n_positions": "sequence", "vocab_size": "vocab"}
LLAMA_YAML = """{
  "num_layers": 32, "hidden-size": 4096, "intermediate_size": 32768,  # of all three matrices
  "num_attention_heads": 32, "seq_length": 4096, "pos_emb": "rotary", "no_weight_tying": true,
  "use_bias_in_attn_linear": false, "activation": "swiglu", "mlp_multiple_of": 256, "vocab_size": 32000,
}"""


def test_every_named_model_has_its_published_size() -> None:
    assert set(PUBLISHED) == set(MODELS)
    for name, params in PUBLISHED.items():
        assert load_model(name).params == pytest.approx(params, rel=0.01 if name == "gpt-neox-10b" else 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_modules_hold_all_parameters_once(name: str) -> None:
    model = MODELS[name]
    modules = model.modules()
    assert [module for module, _ in modules] == [
        "embedding",
        *(f"layer {i}" for i in range(model.layers)),
        "head",
    ]
    assert sum(model.numels()) == sum(sum(numels) for _, numels in modules) == model.params
    matrices = sum(numel for numel, dims in zip(model.numels(), model.dims(), strict=True) if dims == 2)
    assert model.params * 0.99 < matrices < model.params and set(model.dims()) == {1, 2}
    assert len(model.module_flops(1)) == len(modules)


def test_flops_of_a_forward_pass_are_two_per_parameter_and_token_and_those_of_the_scores() -> None:
    model = load_model("gpt-neox-20b")
    tokens = 4096
    matrices = model.layers * 12 * model.hidden**2 + model.hidden * model.vocab
    scores = model.layers * 4 * model.sequence * model.hidden
    assert sum(model.module_flops(tokens)) == tokens * (2 * matrices + scores)
    assert model.module_flops(tokens)[0] == 0


@pytest.mark.parametrize(
    ("kind", "keys", "name"),
    [("llama", LLAMA, "llama-2-70b"), ("gpt_neox", HUGGING_FACE, "gpt-neox-20b"), ("gpt2", GPT2, "gpt2")],
)
def test_a_hugging_face_config_is_read(kind: str, keys: dict[str, str], name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **{key: getattr(MODELS[name], of) for key, of in keys.items()}}))
    assert load_model(str(path)) == load_model(str(tmp_path)) == replace(MODELS[name], name=tmp_path.name)


def test_gpt_neox_yaml_is_read_in_both_spellings(tmp_path: Path) -> None:
    path = tmp_path / "llama.yml"
    path.write_text(LLAMA_YAML)
    assert load_model(str(path)).params == PUBLISHED["llama-2-7b"]


PUBLISHED_CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28}
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
        },
        7_615_616_512,
    ),
    "Qwen2.5-0.5B": (
        {"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14}
        | {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
        494_032_768,
    ),
    "Qwen3-8B": (
        {
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "head_dim": 128,
        }
        | {"num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936, "attention_bias": False},
        8_190_735_360,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_biases_of_queries_and_norms_of_heads_are_counted(name: str, tmp_path: Path) -> None:
    """Qwen 2 has biases in queries, keys and values alone, Qwen 3 norms of each head: published sizes, exactly."""
    data, params = PUBLISHED_CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert load_model(str(tmp_path)).params == params


DMOE_YAML = """{
   "num_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048, "pos_emb": "rotary",
   "max_position_embeddings": 2048, "norm": "layernorm", "no_weight_tying": true,
   # moe settings
   "moe_num_experts": 8,
}"""  # of GPT-NeoX's configs/125M-dmoe.yml
SHAPE = '"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4'
NOT_DENSE = {
    DMOE_YAML: "moe_num_experts is 8: a mixture of experts is not counted",
    '{"model_type": "mixtral", "num_local_experts": 8}': "models of type 'mixtral' are not known",
    '{"model_type": "qwen3_moe", "num_experts": 128}': "models of type 'qwen3_moe' are not known",
    '{"model_type": ["llama"]}': "models of type ['llama'] are not known",
    '{"model_type": [], "num_layers": 2}': "has neither model_type nor num_layers",
    '{"model_type": "gemma", "hidden_size": 2048}': "models of type 'gemma' are not known",
    '{"model_type": "llama", "num_local_experts": 4}': "num_local_experts is 4: a mixture of experts",
    '{"model_type": "llama", "num_attention_heads": 4, "attention_bias": true}': "attention_bias is true",
    f'{{{SHAPE}, "attention_config": [[["rwkv"], 2]]}}': "attention_config has 'rwkv'",
    f'{{{SHAPE}, "attention_config": [[["global", "mamba"], "all"]]}}': "attention_config has 'mamba'",
    f'{{{SHAPE}, "attention_config": [[["gmlp"], 2]]}}': "attention_config has 'gmlp'",
}


@pytest.mark.parametrize(("text", "message"), NOT_DENSE.items())
def test_what_is_no_dense_transformer_is_never_read_as_one(text: str, message: str, tmp_path: Path) -> None:
    """Experts, other layers and biases that are not counted are refused, with the way out."""
    path = tmp_path / "model.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        load_model(str(path))
    assert "\n" not in str(raised.value)


def test_what_is_guessed_of_a_file_is_said(tmp_path: Path) -> None:
    """A vocabulary that the file does not name, and a sequence that only bounds its positions."""
    path = tmp_path / "neox.yml"
    path.write_text(f'{{{SHAPE}, "seq_length": 8192}}')
    found = load_model(str(path))
    assert found.sequence == 8192 and found.notes == ("the file names no vocabulary: GPT-2's, 50,304 rows, is taken",)
    path.write_text(f'{{{SHAPE}, "vocab_size": 50257, "attention_config": [[["flash"], 2]]}}')
    assert not load_model(str(path)).notes
    path.write_text(json.dumps({**PUBLISHED_CONFIGS["Qwen2.5-7B"][0]}))
    assert load_model(str(path)).sequence == 4096 and "up to 32,768: give --seq" in load_model(str(path)).notes[0]
    assert load_model(str(path), 8192).sequence == 8192 and not load_model(str(path), 8192).notes


WRONG = {
    "{": "neither JSON nor YAML",
    "[1]": "neither JSON nor YAML",
    '{"model_type": "bert"}': "'bert' are not known",
    '{"hidden": 4}': "neither model_type nor num_layers",
    '{"model_type": "gpt2", "n_layer": 2, "n_head": 2}': "n_embd is missing",
    '{"model_type": "gpt2", "n_layer": "two", "n_embd": 8, "n_head": 2}': "n_layer is 'two'",
    '{"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 3}': "does not divide hidden = 8",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_a_broken_model_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        load_model(str(path))
    assert "\n" not in str(raised.value)


@given(params=st.integers(10**8, 10**13))
def test_a_made_up_model_has_the_size_asked_for(params: int) -> None:
    model = scaled(params)
    assert model.params == pytest.approx(params, rel=1e-3)
    assert 2 * model.hidden <= model.intermediate <= 7 * model.hidden


@given(params=st.integers(1000, 10**8))
def test_a_made_up_toy_has_about_the_size_asked_for(params: int) -> None:
    assert scaled(params).params == pytest.approx(params, rel=0.02)


def test_a_made_up_model_keeps_given_layers_and_width() -> None:
    model = scaled(20 * 10**9, layers=44, hidden=6144, sequence=4096)
    assert (model.layers, model.hidden, model.sequence) == (44, 6144, 4096)
    assert with_shape(44, 6144).params == pytest.approx(20.55e9, rel=1e-3)


@pytest.mark.parametrize(
    ("params", "shape", "message"),
    [
        (10, {}, "too few"),
        (10**9, {"layers": 2, "hidden": 128}, "do not go with"),
        (10**9, {"layers": 100, "hidden": 8192}, "do not go with"),
    ],
)
def test_impossible_shapes_are_refused(params: int, shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaled(params, **shape)


def test_a_shape_of_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="layers is 0"):
        Transformer("m", 0, 8, 1, 1, 8, 8, 8)
