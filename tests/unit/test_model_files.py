# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Models by name and from files: published parameter counts, class defaults, GPT-NeoX's
feed-forward, what is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data import table
from tests.launching import ROOT
from zero_topo.cost.model_files import MODELS, load_model

PUBLISHED: dict[str, int] = table("published_params")
"""Model -> its parameters as published; gpt-neox-10b is of no published config."""
SHAPE = '"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4'


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "model.yml"
    path.write_text(text)
    return str(path)


@pytest.mark.long  # twenty models; test_module_tree.py has three
def test_every_named_model_has_its_published_size() -> None:
    assert {name: load_model(name).params for name in MODELS} == PUBLISHED


def test_gpt_neox_yaml_is_read_in_both_spellings(tmp_path: Path) -> None:
    text = """{
      "num_layers": 32, "hidden-size": 4096, "intermediate_size": 32768,  # gate, up, and half more
      "num_attention_heads": 32, "seq_length": 4096, "pos_emb": "rotary",
      "no_weight_tying": true, "norm": "rmsnorm",
      "use_bias_in_attn_linear": false, "use_bias_in_mlp": false,
      "activation": "swiglu", "mlp_multiple_of": 256,
      "vocab_size": 32000,
    }"""
    assert load_model(write(tmp_path, text)).params == PUBLISHED["llama-2-7b"]


def test_what_is_guessed_of_a_file_is_said(tmp_path: Path) -> None:
    """A vocabulary that the file does not name, a sequence that bounds positions."""
    found = load_model(write(tmp_path, f'{{{SHAPE}, "seq_length": 8192}}'))
    assert found.sequence == 8192 and found.notes == (
        "the file names no vocabulary: GPT-2's, 50,304 rows, is taken",
    )
    plain = f'{{{SHAPE}, "vocab_size": 50257, "attention_config": [[["flash"], 2]]}}'
    assert not load_model(write(tmp_path, plain)).notes
    path = write(
        tmp_path, json.dumps({**MODELS["qwen-2.5-0.5b"], "max_position_embeddings": 32768})
    )
    assert load_model(path).sequence == 4096 and load_model(path, 8192).sequence == 8192


def test_without_transformers_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-NeoX's YAML needs none."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert load_model(str(ROOT / "neox_configs/frontier-20b.yml")).layers == 44
    with pytest.raises(
        ValueError,
        match=r"^model olmo-2-7b: [^\n]*'olmo2'[^\n]*pip install transformers torch, or plan",
    ):
        load_model("olmo-2-7b")
