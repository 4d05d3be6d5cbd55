# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m zero_topo.neox check`: what it finds in YAML files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT
from zero_topo.doctor import refusals
from zero_topo.neox.__main__ import main
from zero_topo.neox.check import problems
from zero_topo.neox.config import deepspeed_config, known_keys, load_configs

pytest.importorskip("yaml")

GOOD: dict[str, Any] = {
    "pipe_parallel_size": 0,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "precision": "bfloat16",
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3},
    "deepspeed_extra_args": {"gradient_clipping": 1.0, "zero_topo": {"scheme": "topo"}},
}
SCAPE = {"zero_topo": {"optimizer": "node", "sync": {"mode": "scape"}}, "gradient_clipping": 1.0}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "pipe": ({"pipe_parallel_size": 1}, "pipe_parallel_size = 1: .*; set it to 0"),
    "model": ({"model_parallel_size": 2}, "model_parallel_size = 2: .*; set it to 1"),
    "moe": ({"moe_num_experts": 4}, "moe_num_experts = 4: .*; set it to 1"),
    "no zero": ({"zero_optimization": None}, "zero_optimization.stage is not set: .*; add"),
    "no object": ({"zero_optimization": True}, "zero_optimization.stage is not set: .*; add"),
    "stage 1": (
        {"zero_optimization": {"stage": 1}},
        "zero_optimization.stage = 1: .*; set it to 3",
    ),
    "text stage": (
        {"zero_optimization": {"stage": "3"}},
        'zero_optimization.stage = "3": .*; set it to 3',
    ),
    "two clippings": ({"gradient_clipping": 0.5}, "gradient_clipping = 0.5, but .*make them equal"),
    "removed": (
        {"sparse_attention": {"mode": "fixed"}},
        "sparse_attention = .*DeepSpeed refuses",
    ),
    "curriculum": (
        {"curriculum_learning": {"enabled": True}},
        "curriculum_learning = .*refuses",
    ),
    "precision": (
        {"fp16": {"enabled": True}},
        'precision = "bfloat16", but fp16 is enabled: .*; set it to "fp16"',
    ),
    "fp16": ({"precision": "fp16"}, 'precision = "fp16" without an fp16 block: .*; add "fp16"'),
    "no optimizer": ({"optimizer": None}, "optimizer must name a type and params; write"),
    "one bit": (
        {"optimizer": {"type": "OneBitAdam", "params": {}}},
        '"OneBitAdam": .*; use "Adam" or "AdamS"',
    ),
    "scape": (
        {"deepspeed_extra_args": SCAPE},
        'optimizer.type = "Adam": .*scape.*set it to "AdamS"',
    ),
    "offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        'optimizer.type = "Adam" with offload_optimizer: .*; set it to "cpu_adam"',
    ),
    "mamba": ({"attention_config": [[["mamba"], 2]]}, "attention_config has mamba: .*; use global"),
    "batch": (
        {"train_micro_batch_size_per_gpu": None},
        "train_micro_batch_size_per_gpu is missing.*; give",
    ),
    "number": (
        {"optimizer": {"type": "Adam", "params": {"eps": "1e-8"}}},
        "optimizer.params.eps = .*write it with",
    ),
    "top level": (
        {"zero_topo": {}},
        "zero_topo: NeoX refuses unknown keys at the top level; move it into",
    ),
    "nested": (
        {
            "zero_optimization": {"stage": 3, "zero_topo": {}},
            "deepspeed_extra_args": {"gradient_clipping": 1.0},
        },
        "zero_optimization.zero_topo: .*move",
    ),
    "no block": (
        {"deepspeed_extra_args": {"gradient_clipping": 1.0}},
        "zero_topo is missing: .*; add",
    ),
    "no mapping": (
        {"deepspeed_extra_args": 3, "gradient_clipping": 0.5},
        "deepspeed_extra_args = 3: .*; write",
    ),
}


def write(path: Path, text: str) -> str:
    """A file and its name."""
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("change", "line"), CASES.values(), ids=CASES.keys())
def test_each_problem_is_one_line_with_the_way_out(change: dict[str, Any], line: str) -> None:
    """One change of GOOD, one line; that GOOD itself has no problem, the test of unknown keys
    says.
    """
    found = problems(GOOD | change)
    assert len(found) == 1 and re.search(line, found[0]), found
    assert "\n" not in found[0]


def test_neox_drops_its_own_defaults() -> None:
    """As NeoX does: clipping of 1.0 would not arrive but for the extra arguments, which win."""
    assert "gradient_clipping" not in deepspeed_config({"gradient_clipping": 1.0})
    merged = {"gradient_clipping": 0.5, "deepspeed_extra_args": {"gradient_clipping": 1.0}}
    assert deepspeed_config(merged)["gradient_clipping"] == 1.0
    assert deepspeed_config({"precision": "bfloat16"})["bf16"] == {"enabled": True}


def test_files_are_merged_as_neox_merges_them(tmp_path: Path) -> None:
    """Dashes become underscores, `.yml` may be left out, and what two files give is refused."""
    one = write(tmp_path / "one.yml", '{"num-layers": 2, # a comment\n "eps": 1.0e-8,}')
    two = write(tmp_path / "two.yml", "num_layers: 3")
    assert load_configs([one.removesuffix(".yml")]) == {"num_layers": 2, "eps": 1e-8}
    with pytest.raises(
        ValueError, match=r"num_layers: given by .*one.yml and by .*two.yml; .*remove it"
    ):
        load_configs([one, two])
    (tmp_path / "sub").mkdir()
    with pytest.raises(ValueError, match="a second config of that name"):
        load_configs([one, write(tmp_path / "sub/one.yml", "{a: 1}")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds no keys"),
        ("{a: ", "not valid YAML"),
        ("{a: 1, a: 2}", "repeated key a"),
        ("a: 2026-99-99", "month must be"),
        ("? [1]\n: 2", "not valid YAML"),
        (None, "cannot be read"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    """One line with the path, whatever is wrong."""
    if text is not None:
        write(tmp_path / "x.yml", text)
    with pytest.raises(ValueError, match=f"x.yml: .*{message}"):
        load_configs([str(tmp_path / "x.yml")])


def test_unknown_keys_are_found_in_the_source_of_a_checkout(tmp_path: Path) -> None:
    """The checkout is read, not imported; without one, keys are not judged."""
    folder = tmp_path / "megatron/neox_arguments"
    folder.mkdir(parents=True)
    (folder / "neox_args.py").write_text(
        "import nothing\n@dataclass\nclass A(B):\n    num_layers: int = None\n"
    )
    (folder / "deepspeed_args.py").write_text("class C(B):\n    optimizer: dict = None\n")
    known = known_keys(str(tmp_path))
    assert known is not None and set(known) == {"num_layers", "optimizer"}
    found = problems(GOOD | {"num_layer": 2}, known | set(GOOD))
    assert found == [
        "num_layer: NeoX has no such key and would end with an error; did you mean num_layers?"
    ]
    assert known_keys(None) is None and problems(GOOD | {"num_layer": 2}) == []


def test_the_command_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Status 0 and one line with the plan, or status 2 and a line per problem on stderr, of the
    block too.
    """
    config = ROOT / "neox_configs/frontier-20b.yml"
    assert main(["check", "--ranks", "384", str(config)]) == 0
    expected = "ok: scheme topo on 384 ranks: weights 2, gradients 8, optimizer 384\n"
    assert capsys.readouterr().out == expected
    for words, said in (
        (("--ranks", "0"), "--ranks 0: "),
        (("--neox-path", "/nope"), "NEOX_PATH = /nope: "),
    ):
        assert main(["check", str(config), *words]) == 2 and said in capsys.readouterr().err
    assert main(["check", write(tmp_path / "bad.yml", "{pipe_parallel_size: 1}")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3 and all(line.startswith("zero_topo.neox: ") for line in lines)
    assert (
        main(
            [
                "check",
                write(tmp_path / "block.yml", config.read_text().replace('"scheme"', '"sceme"')),
            ]
        )
        == 2
    )
    assert "scheme" in capsys.readouterr().err


def test_the_command_says_that_deepspeed_was_not_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not installed, as on a login node; the rest is checked all the same."""
    monkeypatch.setattr(refusals, "installed", lambda _: None)
    assert main(["check", str(ROOT / "neox_configs/frontier-20b.yml")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("ok: ") and "- DeepSpeed is not installed here" in out and not err
